from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import select
import socket
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
import uvloop
from aiohttp import web

from gateway import guard
from gateway.config import GatewayConfig, load_config
from gateway.sse import HIGH_WATER, EventStream
from tests.gateway.front import CHAT, Answer, build, call, exchange, hang_up, listening, parse

T = TypeVar("T")
BODY = json.dumps(CHAT).encode()


def run(case: Coroutine[Any, Any, T]) -> T:
    """On the loop the product uses."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(case)


def configured(**seconds: object) -> GatewayConfig:
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in seconds.items()]
    return load_config(argv, {})


async def drip(port: int, start: bytes, drop: bytes, patience: float = 5.0) -> tuple[bytes, float]:
    """Send `start`, then a drop every 50 ms until the server closes; what it said, and after how long."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.monotonic()
    said = asyncio.ensure_future(reader.read())
    try:
        writer.write(start)
        while not said.done() and time.monotonic() - began < patience:
            await asyncio.wait([said], timeout=0.05)
            if drop and not said.done():
                writer.write(drop)
        assert said.done(), "the server never closed this connection"
        with contextlib.suppress(ConnectionError):
            return said.result(), time.monotonic() - began
        return b"", time.monotonic() - began
    finally:
        said.cancel()
        await hang_up(writer)


HEADERS = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    b"Content-Length: 1000\r\n"
)


def test_200_clients_that_drip_headers_or_bodies_are_closed_and_a_good_one_goes_on() -> None:
    config = configured(header_timeout=0.5, body_timeout=0.5)

    async def good(port: int, until: asyncio.Event) -> list[tuple[Answer, float]]:
        answers = []
        while not until.is_set():
            began = time.monotonic()
            answer = await call(port, "POST", "/v1/chat/completions", BODY)
            answers.append((answer, time.monotonic() - began))
            await asyncio.sleep(0.02)
        return answers

    async def case() -> None:
        async with listening(build(config), config) as port:
            done = asyncio.Event()
            friend = asyncio.create_task(good(port, done))
            slow = [drip(port, b"GET / HTTP/1.1\r\nHost: a\r\n", b"X-a: b\r\n") for _ in range(100)]
            slow += [drip(port, HEADERS + b"\r\n{", b" ") for _ in range(100)]
            closed = await asyncio.gather(*slow)
            done.set()
            answers = await friend
            assert max(seconds for _, seconds in closed) < 4
            # A drop that arrives after the end resets the connection, and the answer is lost with it.
            said = [raw.split(b"\r\n")[0] for raw, _ in closed]
            assert all(b" 408 " in line for line in said if line)
            assert sum(map(bool, said)) > 100
            assert len(answers) >= 5
            assert all(answer.status == 200 for answer, _ in answers)
            assert max(seconds for _, seconds in answers) < 3

    run(case())


@pytest.mark.parametrize(
    ("start", "drop"),
    [
        (b"", b""),  # says nothing
        (b"G", b""),
        (b"GET / HTTP/1.1\r\nX: ", b"y"),  # one endless header
        (b"\r\n", b"\r\n"),  # blank lines, which the parser skips
        (b"PUT", b"T"),  # an endless method
    ],
)
def test_a_request_that_never_gets_past_its_head_is_closed(start: bytes, drop: bytes) -> None:
    config = configured(header_timeout=0.2)

    async def case() -> tuple[bytes, float]:
        async with listening(build(config), config) as port:
            return await drip(port, start, drop)

    _, seconds = run(case())
    assert seconds < 2


def test_a_slow_head_is_told_so_with_408() -> None:
    config = configured(header_timeout=0.2)

    async def case() -> tuple[bytes, float]:
        async with listening(build(config), config) as port:
            return await drip(port, b"GET / HTTP/1.1\r\nHost: a\r\n", b"")

    answer = parse(run(case())[0])
    assert (answer.status, answer.error["code"]) == (408, "header_timeout")


@pytest.mark.parametrize(
    "head", [HEADERS, HEADERS.replace(b"Content-Length: 1000", b"Transfer-Encoding: chunked")]
)
def test_a_slow_body_is_told_so_with_408(head: bytes) -> None:
    config = configured(body_timeout=0.2)

    async def case() -> tuple[bytes, float]:
        async with listening(build(config), config) as port:
            return await drip(port, head + b"\r\n", b"")

    raw, seconds = run(case())
    answer = parse(raw)
    assert (answer.status, answer.error["code"]) == (408, "body_timeout")
    assert seconds < 4


def test_a_second_request_on_a_connection_has_a_header_deadline_too() -> None:
    config = configured(header_timeout=0.2, keepalive_timeout=30)

    async def case() -> float:
        async with listening(build(config), config) as port:
            first = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
            _, seconds = await drip(port, first + b"GET /hea", b"l")
            return seconds

    assert run(case()) < 2


def test_an_idle_connection_is_kept_for_its_time_and_no_longer() -> None:
    config = configured(header_timeout=0.2, keepalive_timeout=0.7)

    async def case() -> tuple[bytes, float]:
        async with listening(build(config), config) as port:
            return await drip(port, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n", b"")

    raw, seconds = run(case())
    assert raw.startswith(b"HTTP/1.1 200")
    assert 0.5 < seconds < 3


def test_a_handler_slower_than_the_header_deadline_is_left_alone() -> None:
    config = configured(header_timeout=0.1, keepalive_timeout=0.1)

    async def slow(request: web.Request) -> web.Response:
        await asyncio.sleep(0.5)
        return web.Response(text="done")

    async def case() -> Answer:
        app = build(config)
        app.router.add_get("/slow", slow)
        async with listening(app, config) as port:
            return await call(port, "GET", "/slow")

    assert run(case()).body == b"done"


def test_connections_over_the_cap_get_a_503_at_once_and_the_others_go_on() -> None:
    config = configured(max_connections=20)

    async def case() -> None:
        async with listening(build(config), config) as port:
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
            await asyncio.sleep(0.05)
            began = time.monotonic()
            extra = await asyncio.gather(
                *(exchange(port, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n") for _ in range(10))
            )
            assert time.monotonic() - began < 1
            for raw in extra:
                answer = parse(raw)
                assert (answer.status, answer.error["code"]) == (503, "overloaded")
                assert answer.headers["retry-after"].isdigit()
            reader, writer = held[0]
            writer.write(b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
            assert (await reader.read()).startswith(b"HTTP/1.1 200")
            for _, writer in held:
                await hang_up(writer)
            await asyncio.sleep(0.1)
            assert (await call(port, "GET", "/health")).status == 200

    run(case())


def test_the_cap_leaves_file_descriptors_for_the_rest_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (1000, 4096))
    assert guard.connection_limit(4096) == 900
    assert guard.connection_limit(50) == 50


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 9000 + b"\r\n\r\n",
        b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nBad Name: y\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: y\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\nHost a\n\n",
    ],
)
def test_malformed_http_is_a_400_in_the_usual_form_and_the_connection_ends(sent: bytes) -> None:
    config = configured()

    async def case() -> bytes:
        async with listening(build(config), config) as port:
            return await exchange(port, sent)

    answer = parse(run(case()))
    assert (answer.status, answer.error["code"]) == (400, "malformed_http")
    assert answer.headers["x-request-id"]


def test_a_body_whose_chunks_are_malformed_is_a_400() -> None:
    config = configured()

    async def case() -> bytes:
        async with listening(build(config), config) as port:
            head = HEADERS.replace(b"Content-Length: 1000", b"Transfer-Encoding: chunked")
            return await exchange(port, head + b"\r\nzz\r\nnonsense\r\n")

    answer = parse(run(case()))
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("how", ["close", "abort"])
def test_a_handler_is_cancelled_when_its_client_leaves(how: str) -> None:
    config = configured()
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def endless(request: web.Request) -> web.Response:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return web.Response()

    async def case() -> None:
        app = build(config)
        app.router.add_get("/endless", endless)
        async with listening(app, config) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
            async with asyncio.timeout(2):
                await started.wait()
                if how == "abort":
                    writer.transport.abort()
                await hang_up(writer)
                await cancelled.wait()

    run(case())


def test_pages_of_allowed_origins_may_call_and_others_may_not() -> None:
    config = load_config(["--cors-origins", "http://app.test:3000", "--api-keys", "k"], {})
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
    }

    async def case() -> list[Answer]:
        async with listening(build(config), config) as port:
            ours, theirs = {"Origin": "http://app.test:3000"}, {"Origin": "http://evil.test"}
            key = {"Authorization": "Bearer k"}
            path = "/v1/chat/completions"
            return [
                await call(port, "OPTIONS", path, None, ours | preflight),
                await call(port, "OPTIONS", path, None, theirs | preflight),
                await call(port, "POST", path, BODY, ours | key),
                await call(port, "POST", path, BODY, theirs | key),
                await call(port, "POST", path, BODY, ours),
            ]

    allowed, other, answer, foreign, keyless = run(case())
    assert allowed.status == 204
    assert allowed.headers["access-control-allow-origin"] == "http://app.test:3000"
    assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert other.status == 405
    assert "GATEWAY_CORS_ORIGINS=http://evil.test" in other.json["error"]["message"]
    assert "access-control-allow-origin" not in other.headers
    assert answer.headers["access-control-allow-origin"] == "http://app.test:3000"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-origin" not in foreign.headers
    assert keyless.status == 401  # and the page may read why
    assert keyless.headers["access-control-allow-origin"] == "http://app.test:3000"
    assert "origin" in foreign.headers["vary"].lower()


def test_by_default_no_page_of_another_origin_may_call() -> None:
    config = load_config([], {})

    async def case() -> list[Answer]:
        async with listening(build(config), config) as port:
            origin = {"Origin": "http://app.test"}
            preflight = origin | {"Access-Control-Request-Method": "POST"}
            return [
                await call(port, "OPTIONS", "/v1/chat/completions", None, preflight),
                await call(port, "GET", "/health", None, origin),
            ]

    refused, answer = run(case())
    assert refused.status == 405
    assert "access-control-allow-origin" not in answer.headers


BIG = b"x" * (4 << 20)  # more than the kernel keeps for a client that does not read
EVENT = b"data: " + b"x" * 1000 + b"\n\n"


async def _big(request: web.Request) -> web.Response:
    return web.Response(body=BIG)


async def _tail(request: web.Request) -> web.StreamResponse:
    """A stream that ends while a little of it is still in the server's buffer."""
    transport = request.transport
    assert transport is not None
    events = EventStream(request, 30)
    response = await events.open()
    while not transport.get_write_buffer_size():
        await events.send(EVENT)
    assert transport.get_write_buffer_size() < HIGH_WATER
    await events.close()
    return response


async def _endless_stream(request: web.Request) -> web.StreamResponse:
    events = EventStream(request, 30)
    await events.open()
    while True:
        await events.send(EVENT)


def mute(port: int, sent: bytes) -> socket.socket:
    """A client that asks and does not read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.sendall(sent)
    client.setblocking(False)
    return client


async def until_reset(clients: list[socket.socket], seconds: float) -> None:
    """Fails unless the server has reset all connections by then."""
    poller = select.poll()
    for client in clients:
        poller.register(client, 0)  # errors and hang-ups only
    deadline = time.monotonic() + seconds
    while len(poller.poll(0)) < len(clients):
        left = len(clients) - len(poller.poll(0))
        assert time.monotonic() < deadline, f"{left} connections are still open"
        await asyncio.sleep(0.05)


def serving(config: GatewayConfig) -> web.Application:
    app = build(config)
    app.router.add_get("/big", _big)
    app.router.add_get("/tail", _tail)
    app.router.add_get("/endless", _endless_stream)
    return app


@pytest.mark.parametrize(
    ("path", "times", "keepalive"),
    [
        ("/big", 1, 30),
        ("/big", 10, 30),  # pipelined
        ("/health", 20_000, 30),  # many small ones
        ("/tail", 1, 30),  # the stream has ended and the connection is kept
        ("/tail", 1, 0.05),  # and it is closed as soon as all is sent
    ],
)
def test_clients_that_read_nothing_are_dropped_and_a_good_one_goes_on(
    path: str, times: int, keepalive: float
) -> None:
    config = configured(write_timeout=0.5, keepalive_timeout=keepalive)
    asked = f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode()

    async def insist(client: socket.socket) -> None:
        with contextlib.suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(client, asked * (times - 1))

    async def case() -> None:
        async with listening(serving(config), config) as port:
            clients = [mute(port, asked) for _ in range(10 if times < 100 else 3)]
            insisting = [asyncio.create_task(insist(client)) for client in clients]
            # The handlers' work is not part of the time.
            await asyncio.sleep(0.2)
            friend = asyncio.create_task(call(port, "GET", "/big"))
            await until_reset(clients, 2 if times < 100 else 10)
            assert len((await friend).body) == len(BIG)
            await asyncio.gather(*insisting)
            for client in clients:
                client.close()

    run(case())


@pytest.mark.parametrize("path", ["/big", "/endless"])
def test_a_client_that_reads_slowly_but_steadily_is_kept(path: str) -> None:
    config = configured(write_timeout=0.5)

    async def case() -> None:
        async with listening(serving(config), config) as port:
            loop = asyncio.get_running_loop()
            client = mute(port, f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode())
            for _ in range(20):
                assert await loop.sock_recv(client, 8192)
                await asyncio.sleep(0.1)
            read = 0
            while read < 1 << 20:
                read += len(await loop.sock_recv(client, 1 << 16))
            client.close()

    run(case())


def test_a_pause_of_the_whole_server_is_not_held_against_its_clients() -> None:
    config = configured(write_timeout=0.5)

    async def case() -> None:
        async with listening(serving(config), config) as port:
            loop = asyncio.get_running_loop()
            client = mute(port, b"GET /big HTTP/1.1\r\nHost: a\r\n\r\n")
            await asyncio.sleep(0.1)
            time.sleep(1)  # noqa: ASYNC251 - the loop stands still
            await asyncio.sleep(0)
            read = 0
            while read < len(BIG):
                part = await loop.sock_recv(client, 1 << 16)
                assert part
                read += len(part)
            client.close()

    run(case())


def test_a_client_that_leaves_in_the_middle_is_no_error_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = configured()
    ended = asyncio.Event()

    async def late(request: web.Request) -> web.StreamResponse:
        with contextlib.suppress(asyncio.CancelledError):  # it has something to finish first
            await asyncio.sleep(0.2)
        try:
            events = EventStream(request, 30)
            return await events.open()
        finally:
            ended.set()

    async def case() -> None:
        app = build(config)
        app.router.add_get("/late", late)
        async with listening(app, config) as port:
            mute(port, b"GET /late HTTP/1.1\r\nHost: a\r\n\r\n").close()
            async with asyncio.timeout(3):
                await ended.wait()
            await asyncio.sleep(0.05)

    with caplog.at_level(logging.INFO):
        run(case())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "Traceback" not in caplog.text
