"""An application with the real perimeter around trivial handlers, served over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
from aiohttp import web

from gateway import guard, ops
from gateway.config import GatewayConfig
from gateway.engine import ENGINE, Engine
from gateway.errors import decode_body
from gateway.limits import ADMISSION, Admission, Limits
from gateway.metrics import METRICS, Metrics
from gateway.openai import ChatRequest
from wire.generate import Status

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def status(**changes: Any) -> Status:
    """A healthy, idle executor's status with some fields changed."""
    numbers = {
        name: 0 for name in Status.__struct_fields__ if name not in ("ready", "draining", "reason")
    }
    return Status(**{"ready": True, "draining": False, "reason": "", **numbers, **changes})


@dataclass
class FakeLink:
    name: str = "executor-0"
    status: Status | None = field(default_factory=status)


@dataclass
class FakeEngine:
    """What the perimeter asks of an engine."""

    links: list[FakeLink] = field(default_factory=lambda: [FakeLink()])
    problem: str = ""

    def not_ready(self) -> str:
        return self.problem


def build(config: GatewayConfig, engine: FakeEngine | None = None) -> web.Application:
    app = web.Application(client_max_size=config.max_body)
    guard.protect(app, config)
    app[ENGINE] = cast(Engine, engine or FakeEngine())
    app[ADMISSION] = Admission(
        Limits(config.max_requests, config.max_queued_tokens, config.per_key_requests)
    )
    app[METRICS] = Metrics("tiny")
    app.add_routes(ops.routes)
    app.router.add_post("/v1/chat/completions", _chat)
    app.router.add_post("/crash", _crash)
    app.router.add_get("/half", _half)
    app.router.add_get("/whoami", _whoami)
    return app


_decoder = msgspec.json.Decoder(ChatRequest)


async def _chat(request: web.Request) -> web.Response:
    """Decode a chat request."""
    body = await decode_body(request, _decoder)
    return web.json_response({"messages": len(body.messages)})


async def _crash(request: web.Request) -> web.Response:
    raise ValueError("secret detail")


async def _half(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"first")
    raise ValueError("secret detail")


async def _whoami(request: web.Request) -> web.Response:
    from gateway.auth import KEY_ID, TENANT

    return web.json_response({"tenant": request[TENANT], "key": request[KEY_ID]})


@contextlib.asynccontextmanager
async def listening(app: web.Application, config: GatewayConfig) -> AsyncIterator[int]:
    """Serve `app` as the product does; yields the port."""
    runner = guard.GuardedRunner(app, config)
    await runner.setup()
    try:
        _, port = await runner.listen("127.0.0.1", 0)
        yield port
    finally:
        runner.stop_listening()
        await runner.cleanup()


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, after checking that it is one of OpenAI's form."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return dict(error)


async def hang_up(writer: asyncio.StreamWriter) -> None:
    """Close a client's connection, and be sure that it is closed."""
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def exchange(port: int, sent: bytes, patience: float = 5.0) -> bytes:
    """Send bytes and return all that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        async with asyncio.timeout(patience):
            with contextlib.suppress(ConnectionError):
                await writer.drain()
                return await reader.read()
            return b""
    finally:
        await hang_up(writer)


def parse(raw: bytes) -> Answer:
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {
        name.strip().lower(): value.strip()
        for name, _, value in (line.partition(":") for line in lines)
    }
    return Answer(int(first.split()[1]), headers, body)


async def call(
    port: int,
    method: str,
    path: str,
    body: bytes | dict[str, Any] | None = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """One request on its own connection, written byte for byte as given."""
    payload = json.dumps(body).encode() if isinstance(body, dict) else body
    given = {"Host": "localhost", "Connection": "close", **(headers or {})}
    if payload is not None:
        given.setdefault("Content-Length", str(len(payload)))
        given.setdefault("Content-Type", "application/json")
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items() if value is not None)
    sent = f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("utf-8", "surrogateescape")
    return parse(await exchange(port, sent + (payload or b"")))
