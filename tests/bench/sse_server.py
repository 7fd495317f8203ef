"""A small OpenAI-compatible server that answers as a test says: well, badly, or not to the end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Answer = Callable[[web.StreamResponse, dict[str, Any]], Awaitable[None]]
DONE = b"data: [DONE]\n\n"


def text(token: str = "a") -> bytes:
    """An event with one token of a text completion."""
    return b'data: {"id":"x","choices":[{"index":0,"text":"%b"}]}\n\n' % token.encode()


def usage(prompt: int, output: int, cached: int = 0) -> bytes:
    return (
        b'data: {"choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,'
        b'"prompt_tokens_details":{"cached_tokens":%d}}}\n\n' % (prompt, output, cached)
    )


async def well(response: web.StreamResponse, body: dict[str, Any]) -> None:
    """As many tokens as asked for, then usage."""
    if "messages" in body:
        await response.write(b'data: {"choices":[{"delta":{"role":"assistant"}}]}\n\n')
        event = b'data: {"choices":[{"delta":{"content":"word "}}]}\n\n'
        prompt = sum(len(message["content"].split()) for message in body["messages"])
    else:
        event, prompt = text(), len(body["prompt"])
    for _ in range(body["max_tokens"]):
        await response.write(event)
        await asyncio.sleep(0)
    await response.write(usage(prompt, body["max_tokens"]) + DONE)


def writes(*parts: bytes) -> Answer:
    """These bytes, whatever was asked."""

    async def answer(response: web.StreamResponse, body: dict[str, Any]) -> None:
        for part in parts:
            await response.write(part)
            await asyncio.sleep(0)

    return answer


async def hangs(response: web.StreamResponse, body: dict[str, Any]) -> None:
    """One token, then nothing."""
    await response.write(text())
    await asyncio.Event().wait()


async def breaks(response: web.StreamResponse, body: dict[str, Any]) -> None:
    """One token, then the connection is gone."""
    await response.write(text())
    assert response._req is not None
    assert response._req.transport is not None
    response._req.transport.abort()


@dataclass
class Server:
    url: str = ""
    answer: Answer = well
    status: int = 200  # of completions
    models_status: int = 200
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    most: int = 0  # requests in progress at once

    async def models(self, request: web.Request) -> web.Response:
        listed = {"data": [{"id": "fake", "max_model_len": 2048}]}
        return web.json_response(listed, status=self.models_status)

    async def tokenize(self, request: web.Request) -> web.Response:
        words = (await request.json())["prompt"].split()
        return web.json_response({"tokens": [len(word) for word in words]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            error = {"error": {"message": "slow down", "code": "rate_limit_exceeded"}}
            return web.json_response(error, status=self.status)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            with contextlib.suppress(ConnectionError):
                await self.answer(response, body)
            return response
        finally:
            self.running -= 1


@contextlib.asynccontextmanager
async def serve() -> AsyncIterator[Server]:
    """A server on a free port of this machine, for one test."""
    server = Server()
    app = web.Application()
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/tokenize", server.tokenize)
    app.router.add_post("/v1/completions", server.complete)
    app.router.add_post("/v1/chat/completions", server.complete)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        assert site._server is not None
        port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        server.url = f"http://127.0.0.1:{port}"
        yield server
    finally:
        await runner.cleanup()
