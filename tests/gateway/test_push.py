"""Tokens written where they arrive: clients see what they see of tokens that are waited for."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from gateway import sse
from gateway.choice import Choice, Piece
from gateway.engine import ENGINE
from gateway.generation import Generation
from gateway.inbox import Inbox
from gateway.sse import EventStream
from tests.fake_executor import Script, byte_level_tokenizer
from tests.gateway.front import exchange, parse
from tests.gateway.serving import Served, run, serve, until
from wire.errors import Code, Refused
from wire.generate import Delta, Events, Submit

URL = "/v1/completions"
TOKENIZER = byte_level_tokenizer()
TEXT = "the quick brown fox jumps over the lazy dog, 🙂 again and again"
FOX = list(TOKENIZER.encode(TEXT, add_special_tokens=False).ids)


def _slowly(submit: Submit) -> Script:
    """Each token in a message of its own."""
    return Script([FOX] * submit.n, delay=0.002)


def _silent(submit: Submit) -> Script:
    """The first token; the test brings the others."""
    return Script([FOX[:1]] * submit.n, "")


def _ask(**body: Any) -> dict[str, Any]:
    return {"prompt": "Hi", "stream": True, **body}


def _http(version: str, body: dict[str, Any], headers: str = "") -> bytes:
    sent = json.dumps(body)
    return (
        f"POST {URL} HTTP/{version}\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
        f"Content-Length: {len(sent)}\r\n\r\n{sent}"
    ).encode()


def _events(raw: bytes) -> list[dict[str, Any]]:
    """Every event but the last, which must be [DONE]."""
    *events, done, nothing = raw.split(b"\n\n")
    assert (done, nothing) == (b"data: [DONE]", b"")
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


def _unchunked(body: bytes) -> bytes:
    """A chunked body's content; nothing may follow its end."""
    content = b""
    while True:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        content += body[:length]
        assert body[length : length + 2] == b"\r\n"
        body = body[length + 2 :]
        if not length:
            assert body == b""
            return content


def _text(events: list[dict[str, Any]], index: int = 0) -> str:
    choices = [event["choices"][0] for event in events if event["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


def _port(served: Served) -> int:
    return int(served.url.rsplit(":", 1)[1])


class _Counted:
    """Counts the calls of a function."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: type, name: str) -> None:
        self.calls = 0
        inner: Callable[..., Any] = getattr(owner, name)

        def counting(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return inner(*args, **kwargs)

        patch.setattr(owner, name, counting)


async def _opened(served: Served, **body: Any) -> tuple[asyncio.Task[bytes], int]:
    """A stream that has its first token and waits for more, and its request's id."""
    sent = len(served.executor.submits)
    raw = asyncio.create_task(served.raw(URL, _ask(**body)))
    (inbox,) = await _waiting(served)
    await until(lambda: inbox._sink is not None)
    return raw, served.executor.submits[sent].id


async def _waiting(served: Served) -> list[Inbox]:
    await until(lambda: served.app[ENGINE]._inboxes)
    return list(served.app[ENGINE]._inboxes)


# ---------------------------------------------------------------- what a client sees


@pytest.mark.parametrize("n", [1, 3])
def test_tokens_that_come_one_by_one_wake_nobody_and_all_arrive_in_order(
    monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    pushed = _Counted(monkeypatch, EventStream, "push")
    woken = _Counted(monkeypatch, Generation, "next")

    async def test() -> list[dict[str, Any]]:
        async with serve(_slowly) as served:
            return _events(await served.raw(URL, _ask(n=n)))

    events = run(test())
    assert [_text(events, index) for index in range(n)] == [TEXT] * n
    # What comes while the first events are sent is waited for, and merged.
    assert n * len(FOX) // 2 < pushed.calls <= len(events) <= n * len(FOX)
    assert woken.calls < len(FOX)


def test_pushed_and_waited_for_pieces_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = _Counted(monkeypatch, EventStream, "push")
    ready, asked = EventStream.ready, 0

    def every_third(self: EventStream) -> bool:
        nonlocal asked
        asked += 1
        return asked % 3 == 0 and ready(self)

    monkeypatch.setattr(EventStream, "ready", every_third)

    async def test() -> list[dict[str, Any]]:
        async with serve(_slowly) as served:
            return _events(await served.raw(URL, _ask(n=2, stream_options={"include_usage": True})))

    events = run(test())
    assert (_text(events, 0), _text(events, 1)) == (TEXT, TEXT)
    assert events[-1]["usage"]["completion_tokens"] == 2 * len(FOX)
    assert 0 < pushed.calls < len(FOX)


def test_an_end_in_the_same_message_as_other_tokens_comes_after_them() -> None:
    async def test() -> list[dict[str, Any]]:
        async with serve(_silent) as served:
            raw, id = await _opened(served)
            rest = [Delta(id, 0, [token]) for token in FOX[1:-1]]
            end = Delta(id, 0, FOX[-1:], "length")
            served.app[ENGINE].links[0]._on_events(Events([*rest, end]))
            return _events(await raw)

    events = run(test())
    assert _text(events) == TEXT
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (
        len(events) - 1
    )
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_a_stop_string_in_a_pushed_token_ends_the_stream_and_aborts() -> None:
    async def test() -> tuple[list[dict[str, Any]], list[int], int]:
        async with serve(_silent) as served:
            raw, id = await _opened(
                served, stop="fox jumps", stream_options={"include_usage": True}
            )
            # All at once, with tokens behind the stop string and a failure behind them.
            tokens = [Delta(id, 0, [token]) for token in FOX[1:]]
            served.app[ENGINE].links[0]._on_events(Events(tokens))
            served.app[ENGINE].fail_all(Refused(Code.LOST, "late"))
            events = _events(await raw)
            await until(lambda: served.executor.aborts)
            return events, served.executor.aborts, id

    events, aborts, id = run(test())
    assert _text(events) == "the quick brown "
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    read = len(TOKENIZER.encode("the quick brown fox jumps", add_special_tokens=False).ids)
    assert events[-1]["usage"]["completion_tokens"] == read
    assert aborts == [id]


def test_a_choice_that_a_stop_string_ended_gets_no_more_and_the_other_goes_on() -> None:
    stop = list(TOKENIZER.encode("the END, and more", add_special_tokens=False).ids)

    async def test() -> list[dict[str, Any]]:
        async with serve(lambda submit: Script([stop, FOX], delay=0.002)) as served:
            return _events(await served.raw(URL, _ask(n=2, stop="END")))

    events = run(test())
    assert (_text(events, 0), _text(events, 1)) == ("the ", TEXT)


def test_a_failure_after_pushed_tokens_is_an_error_event_behind_them() -> None:
    def failing(submit: Submit) -> Script:
        return Script([FOX], delay=0.002, fail_after=8)

    async def test() -> bytes:
        async with serve(failing) as served:
            return await served.raw(URL, _ask())

    *events, error, nothing = run(test()).split(b"\n\n")
    text = "".join(
        json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events
    )
    assert text == TOKENIZER.decode(FOX[:8])
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "internal_error"
    assert nothing == b""


def test_an_error_in_one_stream_s_tokens_ends_that_stream_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    feed = Choice.feed

    def feed_or_fail(self: Choice, delta: Delta) -> Piece:
        if self._stops and self.generated == 5:
            raise ZeroDivisionError("secret detail")
        return feed(self, delta)

    monkeypatch.setattr(Choice, "feed", feed_or_fail)

    async def test() -> tuple[bytes, bytes, bytes]:
        async with serve(_slowly) as served:
            asked = [_ask(stop="never there"), _ask(), _ask()]
            one, two, three = await asyncio.gather(*(served.raw(URL, body) for body in asked))
            assert len(served.executor.aborts) == 1
            assert served.app[ENGINE].in_progress == 0
            return one, two, three

    broken, *whole = run(test())
    last = broken.split(b"\n\n")[-2]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["code"] == "internal_error"
    assert "secret" not in error["message"]
    assert "ZeroDivisionError" in caplog.text
    assert [_text(_events(raw)) for raw in whole] == [TEXT] * 2


# ---------------------------------------------------------------- HTTP


def test_http_1_1_gets_well_formed_chunks_and_http_1_0_plain_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pushed = _Counted(monkeypatch, EventStream, "push")

    async def test() -> tuple[bytes, bytes]:
        async with serve(_slowly) as served:
            new = await exchange(_port(served), _http("1.1", _ask(), "Connection: close\r\n"))
            old = await exchange(_port(served), _http("1.0", _ask()))
            return new, old

    new, old = map(parse, run(test()))
    assert new.headers["transfer-encoding"] == "chunked"
    assert _text(_events(_unchunked(new.body))) == TEXT
    assert "transfer-encoding" not in old.headers
    assert _text(_events(old.body)) == TEXT
    assert pushed.calls > len(FOX) // 2


def test_a_connection_serves_another_request_after_a_stream() -> None:
    async def test() -> bytes:
        async with serve(_slowly) as served:
            asked = _http("1.1", _ask()) + _http("1.1", _ask(), "Connection: close\r\n")
            return await exchange(_port(served), asked)

    first, second = run(test()).split(b"HTTP/1.1 200 OK\r\n")[1:]
    for answer in (first, second):
        assert _text(_events(_unchunked(answer.partition(b"\r\n\r\n")[2]))) == TEXT


def test_a_client_that_leaves_between_pushed_tokens_has_its_request_aborted() -> None:
    async def test() -> None:
        async with serve(lambda submit: Script([FOX * 1000], "", delay=0.002)) as served:
            response = await served.http.post(served.url + URL, json=_ask())
            for _ in range(20):
                await response.content.readuntil(b"\n\n")
            response.close()
            await until(lambda: served.executor.aborts == [served.executor.submits[0].id])
            assert served.executor.running == 0
            await until(lambda: served.app[ENGINE].in_progress == 0)

    run(test())


def test_a_client_that_stops_reading_is_waited_for_and_then_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "_SOCKET_BUFFER", 4096)  # so that less text does
    monkeypatch.setattr(sse, "HIGH_WATER", 2048)
    most, push = 0, EventStream.push

    def watched(self: EventStream, events: bytes) -> None:
        nonlocal most
        push(self, events)
        most = max(most, self._transport.get_write_buffer_size())

    monkeypatch.setattr(EventStream, "push", watched)
    waited = _Counted(monkeypatch, EventStream, "_drained")

    async def test() -> None:
        async with serve(
            lambda submit: Script([FOX * 2000], "", delay=0.0001), write_timeout=0.5
        ) as served:
            with socket.socket() as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                client.connect(("127.0.0.1", _port(served)))
                client.sendall(_http("1.1", _ask()))
                await until(lambda: served.executor.aborts, 20)
            assert served.executor.running == 0
            await until(lambda: served.app[ENGINE].in_progress == 0)

    run(test())
    assert waited.calls >= 1
    assert most < sse.HIGH_WATER + 1024


# ---------------------------------------------------------------- the inbox


def test_what_a_sink_takes_is_not_waited_for_and_what_comes_behind_the_rest_is() -> None:
    async def test() -> None:
        inbox, taken = Inbox(asyncio.get_running_loop()), []

        def sink(choice: int, delta: Delta) -> bool:
            taken.append(delta.tokens)
            return delta.tokens != [2]

        waiting = asyncio.create_task(inbox.take(10, sink))
        await asyncio.sleep(0)
        for token in (1, 2, 3):  # the third could be taken, but the second waits
            inbox.put(0, Delta(1, 0, [token]))
        assert await waiting == [(0, Delta(1, 0, [2, 3]))]
        assert taken == [[1], [2]]
        inbox.put(0, Delta(1, 0, [4]))
        assert await inbox.take(10, sink) == [(0, Delta(1, 0, [4]))]

    run(test())


def test_what_a_sink_takes_starts_the_patience_anew() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        inbox = Inbox(loop)
        waiting = asyncio.create_task(inbox.take(10, lambda choice, delta: True))
        await asyncio.sleep(0)
        inbox.put(0, Delta(1, 0, [1]))
        inbox.tick(loop.time() + 15)
        inbox.tick(loop.time() + 20)
        await asyncio.sleep(0)
        assert not waiting.done()
        inbox.tick(loop.time() + 26)
        assert await waiting == []

    run(test())
