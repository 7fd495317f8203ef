"""Executors come, go, fall silent and forget; clients leave. No request hangs and none is left running."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from gateway import generation, link
from gateway.engine import ENGINE
from gateway.inbox import Inbox, Submission
from gateway.limits import ADMISSION
from tests.fake_executor import FakeExecutor, Script, byte_level_tokenizer, make_card
from tests.gateway.serving import Served, run, serve, until
from wire.errors import Code, Refused
from wire.generate import Abort, Delta, Submit, TokenLogprobs
from wire.sampling import Sampling

TOKENIZER = byte_level_tokenizer()
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
URL = "/v1/chat/completions"


def _ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def _endless(submit: Submit) -> Script:
    """A token every 10 ms, for ever."""
    return Script([_ids("the fox ") * 2000] * submit.n, "", delay=0.01)


def _nothing_yet(submit: Submit) -> Script:
    """Queued: no token comes."""
    return Script([_ids("a")] * submit.n, "", delay=1000)


async def _open(served: Served, events: int = 1, **body: Any) -> aiohttp.ClientResponse:
    """A stream that has brought this many events."""
    response = await served.http.post(served.url + URL, json={**CHAT, "stream": True, **body})
    assert response.status == 200
    for _ in range(events):
        await response.content.readuntil(b"\n\n")
    return response


async def _error_at_the_end(response: aiohttp.ClientResponse) -> dict[str, Any]:
    raw = await response.content.read()
    assert b"[DONE]" not in raw
    error: dict[str, Any] = json.loads(raw.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]
    return error


# ---------------------------------------------------------------- executors that are lost


def test_when_an_executor_falls_silent_its_requests_end_and_new_ones_are_refused() -> None:
    async def test() -> None:
        async with serve(_endless) as served:
            stream = await _open(served)
            whole = asyncio.create_task(served.post(URL, CHAT))
            await until(lambda: len(served.executor.submits) == 2)
            served.executor.silent = True
            before = time.monotonic()
            assert (await _error_at_the_end(stream))["code"] == "executor_lost"
            status, answer = await whole
            assert (status, answer["error"]["code"]) == (503, "executor_lost")
            assert time.monotonic() - before < 5
            before = time.monotonic()
            async with served.http.post(served.url + URL, json=CHAT) as response:
                assert response.status == 503
                assert int(response.headers["Retry-After"]) >= 1
                assert "try again in a few seconds" in (await response.json())["error"]["message"]
                assert "silent" in served.app[ENGINE].not_ready()
            assert time.monotonic() - before < 0.5
            assert (await served.http.get(f"{served.url}/ready")).status == 503
            served.executor.silent = False
            served.executor.respond = lambda submit: Script([_ids("back")], "stop")
            await until(lambda: not served.app[ENGINE].not_ready())
            status, answer = await served.post(URL, CHAT)
            assert (status, answer["choices"][0]["message"]["content"]) == (200, "back")

    run(test())


def test_when_an_executor_is_killed_its_streams_end_and_its_successor_serves() -> None:
    async def test() -> None:
        async with serve(_endless) as served:
            stream = await _open(served)
            directory = served.app[ENGINE].links[0]._endpoint.removeprefix("ipc://")
            await served.executor.stop()
            before = time.monotonic()
            assert (await _error_at_the_end(stream))["code"] == "executor_lost"
            assert time.monotonic() - before < 5
            successor = FakeExecutor(Path(directory).parent, make_card())
            async with successor:
                await until(lambda: not served.app[ENGINE].not_ready())
                status, answer = await served.post(URL, CHAT)
                assert status == 200
                assert answer["choices"][0]["message"]["content"] == "Hello world"
            served.executor.start()  # for the end of the test to stop

    run(test())


def test_a_session_the_executor_forgot_is_opened_again() -> None:
    async def test() -> None:
        async with serve(_endless) as served:
            stream = await _open(served)
            served.executor.forget_sessions()
            error = await _error_at_the_end(stream)
            assert error["code"] == "executor_lost"
            assert "send the request again" in error["message"]
            await until(lambda: not served.app[ENGINE].not_ready(), 1)
            assert served.executor.hellos >= 2

    run(test())


def test_a_request_the_executor_lost_track_of_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link, "FORGOTTEN_S", 0.3)

    async def test() -> None:
        async with serve(_nothing_yet) as served:
            answer = asyncio.create_task(served.post(URL, CHAT))
            await until(lambda: served.executor.running == 1)
            await asyncio.sleep(0.6)
            assert not answer.done()  # it runs: waiting is right
            for key in list(served.executor._running):
                served.executor._running.pop(key).cancel()
            status, body = await answer
            assert (status, body["error"]["code"]) == (500, "internal_error")
            await until(lambda: served.executor.aborts == [served.executor.submits[0].id])

    run(test())


def test_an_executor_that_is_not_ready_or_drains_gets_nothing() -> None:
    async def test() -> None:
        async with serve() as served:
            for change in ("ready", "draining"):
                setattr(served.executor, change, change == "draining")
                await until(lambda: served.app[ENGINE].not_ready())
                status, answer = await served.post(URL, CHAT)
                assert (status, answer["error"]["code"]) == (503, "unavailable")
                setattr(served.executor, change, change == "ready")
                await until(lambda: not served.app[ENGINE].not_ready())
            assert served.executor.submits == []

    run(test())


def test_a_card_that_cannot_be_used_is_named_as_the_reason() -> None:
    async def test() -> None:
        async with serve() as served:
            for card, reason in (
                (make_card(chat_template="{% for %}"), "chat template does not compile"),
                (make_card(add_bos=True, bos_token="<none>"), "'<none>'"),
            ):
                served.executor.card = card
                served.app[ENGINE].links[0].model = None
                served.executor.forget_sessions()
                await until(lambda why=reason: why in served.app[ENGINE].not_ready())
                status, answer = await served.post(URL, CHAT)
                assert status == 503
                assert "Loading model" in answer["error"]["message"]

    run(test())


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("respond", [_endless, _nothing_yet])
def test_a_client_that_leaves_is_aborted_at_any_stage(respond: Any, stream: bool) -> None:
    async def test() -> None:
        async with serve(respond) as served:
            async with aiohttp.ClientSession() as leaving:
                body = {**CHAT, "stream": stream, "n": 2}
                request = asyncio.create_task(leaving.post(served.url + URL, json=body))
                await until(lambda: served.executor.running == 1)
                await asyncio.sleep(0.05)
                if request.done():  # a stream that has begun
                    request.result().close()
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)
            await until(lambda: served.executor.running == 0, 1)
            assert served.executor.aborts == [served.executor.submits[0].id]
            assert served.app[ADMISSION].requests == 0
            assert served.app[ENGINE].in_progress == 0

    run(test())


def test_a_reader_that_stops_reading_is_dropped_and_aborted() -> None:
    async def test() -> None:
        def flood(submit: Submit) -> Script:
            return Script([_ids("the fox ") * 100_000], "", step=100, delay=0.001)

        async with serve(flood, write_timeout=0.5) as served:
            host, port = served.url.removeprefix("http://").split(":")
            body = json.dumps({**CHAT, "stream": True, "logprobs": True, "top_logprobs": 20})
            with socket.socket() as stuck:
                stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                stuck.connect((host, int(port)))
                stuck.sendall(
                    f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                    f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
                )
                await until(lambda: served.executor.running == 1)
                before = time.monotonic()
                await until(lambda: served.executor.aborts, 10)
                assert time.monotonic() - before < 5
            assert served.app[ADMISSION].requests == 0

    run(test())


def test_a_silent_stream_is_kept_alive_with_empty_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generation, "PING_S", 0.1)

    async def test() -> None:
        async with serve(lambda submit: Script([_ids("a")], "stop", delay=0.8)) as served:
            raw = await served.raw(URL, {**CHAT, "stream": True})
            assert raw.startswith(b"\n\ndata: ") or raw.startswith(b"\n\n\n\n")
            assert raw.endswith(b"data: [DONE]\n\n")
            chunks = [part for part in raw.split(b"\n\n") if part.startswith(b"data: {")]
            assert json.loads(chunks[0][6:])["choices"][0]["delta"]["content"] == "a"

    run(test())


def test_draining_ends_what_is_left_with_an_error_event() -> None:
    async def test() -> None:
        async with serve(_endless) as served:
            stream = await _open(served)
            served.app[ENGINE].fail_all(Refused(Code.DRAINING, "Shutting down."))
            assert (await _error_at_the_end(stream))["code"] == "draining"
            await until(lambda: served.executor.aborts)

    run(test())


# ---------------------------------------------------------------- several executors


def test_requests_go_to_the_executor_with_less_to_do() -> None:
    async def test() -> None:
        async with serve(_endless, executors=("executor-0", "second")) as served:
            directory = Path(served.app[ENGINE].links[0]._endpoint.removeprefix("ipc://")).parent
            async with FakeExecutor(directory, make_card(), _endless, "second") as second:
                await until(lambda: not served.app[ENGINE].links[1].not_ready())
                streams = [await _open(served) for _ in range(4)]
                assert len(served.executor.submits) == len(second.submits) == 2
                second.forget_sessions()
                ended = [
                    task
                    for task in [asyncio.create_task(_error_at_the_end(one)) for one in streams]
                    if await _finishes(task)
                ]
                assert len(ended) == 2
                assert served.executor.running == 2
                for stream in streams:
                    stream.close()
                await until(lambda: served.executor.running == 0)

    run(test())


async def _finishes(task: asyncio.Task[Any]) -> bool:
    done, _ = await asyncio.wait([task], timeout=0.5)
    if not done:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return bool(done)


# ---------------------------------------------------------------- the inbox


class _Sink:
    """Stands for a link: keeps what was aborted."""

    def __init__(self) -> None:
        self.aborted: list[int] = []

    def abort(self, id: int) -> None:
        self.aborted.append(id)


def _submit(inbox: Inbox, sink: _Sink, id: int, base: int, n: int) -> None:
    inbox.add(Submission(sink, id, inbox, base, n, 0.0))


def test_an_inbox_merges_what_is_not_taken_in_time() -> None:
    async def test() -> None:
        inbox = Inbox(asyncio.get_running_loop())
        inbox.put(0, Delta(1, 0, [1], "", 5, [TokenLogprobs(-1)]))
        inbox.put(1, Delta(1, 1, [7]))
        inbox.put(0, Delta(1, 0, [2, 3], "length", 0, [TokenLogprobs(-2), TokenLogprobs(-3)]))
        taken = dict(await inbox.take(1))
        logprobs = [TokenLogprobs(-1), TokenLogprobs(-2), TokenLogprobs(-3)]
        assert taken == {
            0: Delta(1, 0, [1, 2, 3], "length", 5, logprobs),
            1: Delta(1, 1, [7]),
        }

    run(test())


def test_what_arrived_before_a_failure_is_taken_before_it() -> None:
    async def test() -> None:
        inbox = Inbox(asyncio.get_running_loop())
        inbox.put(0, Delta(1, 0, [1]))
        inbox.fail(Refused(Code.LOST, "first"))
        inbox.fail(Refused(Code.INTERNAL, "second"))
        assert await inbox.take(1) == [(0, Delta(1, 0, [1]))]
        with pytest.raises(Refused, match="first"):
            await inbox.take(1)

    run(test())


def test_a_submission_is_aborted_when_none_of_its_choices_is_needed() -> None:
    async def test() -> None:
        inbox, sink = Inbox(asyncio.get_running_loop()), _Sink()
        _submit(inbox, sink, 1, 0, 2)
        _submit(inbox, sink, 2, 2, 1)
        inbox.finish(0)
        assert sink.aborted == []
        inbox.finish(1)
        assert sink.aborted == [1]
        inbox.finish(2)
        assert sink.aborted == [1, 2]

    run(test())


def test_an_abort_the_socket_does_not_take_is_sent_later() -> None:
    async def test() -> None:
        async with serve(_endless) as served:
            link = served.app[ENGINE].links[0]
            stream = await _open(served)
            send = link._send
            link._send = lambda message: not isinstance(message, Abort) and send(message)  # type: ignore[method-assign]
            stream.close()
            await until(lambda: link._unsent)
            assert served.executor.aborts == []
            link._send = send  # type: ignore[method-assign]
            await until(lambda: served.executor.aborts, 2)

    run(test())


def test_malformed_messages_are_dropped_and_the_session_goes_on() -> None:
    async def test() -> None:
        async with serve() as served:
            (peer,) = served.executor._peers
            for junk in (b"", b"\xff" * 10, b"\x91" * 5000, msgspec.msgpack.encode(["events", 5])):
                served.executor._router.send(peer, junk)
            status, _ = await served.post(URL, CHAT)
            assert status == 200

    run(test())


def test_ids_sent_to_executors_count_up_whatever_clients_send() -> None:
    async def test() -> None:
        async with serve() as served:
            inbox = served.app[ENGINE].open()
            options = link.SubmitOptions(Sampling(seed=1))
            served.app[ENGINE].submit(inbox, [[1], [2], [3]], options)
            await until(lambda: len(served.executor.submits) == 3)
            ids = [submit.id for submit in served.executor.submits]
            assert ids == list(range(ids[0], ids[0] + 3))
            served.app[ENGINE].release(inbox)

    run(test())
