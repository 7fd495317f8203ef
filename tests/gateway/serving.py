"""A gateway on a free port in front of a fake executor, for one test."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import tempfile
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import openai
from aiohttp import web

from gateway.app import build_app
from gateway.config import GatewayConfig
from gateway.engine import ENGINE
from gateway.guard import GuardedRunner
from tests.fake_executor import FakeExecutor, Respond, make_card
from wire.generate import ModelCard

T = TypeVar("T")


def run(test: Coroutine[Any, Any, T]) -> T:
    """Run one asynchronous test; nothing in it may take longer than 30 s."""

    async def bounded() -> T:
        async with asyncio.timeout(30):
            return await test

    return asyncio.run(bounded())


@dataclass(slots=True)
class Served:
    app: web.Application
    executor: FakeExecutor
    url: str
    http: aiohttp.ClientSession
    client: openai.AsyncOpenAI

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        async with self.http.post(self.url + path, json=body) as response:
            return response.status, await response.json()

    async def raw(self, path: str, body: dict[str, Any]) -> bytes:
        async with self.http.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            return await response.read()


async def until(condition: Any, seconds: float = 5.0) -> None:
    """Wait for `condition()`; fails after `seconds`."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - polls what has no event
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def serve(
    respond: Respond | None = None, card: ModelCard | None = None, **settings: Any
) -> AsyncIterator[Served]:
    """Yields when the gateway is ready."""
    directory = Path(tempfile.mkdtemp(prefix="pk-"))
    config = dataclasses.replace(GatewayConfig(), run_dir=directory, port=0, **settings)
    app = build_app(config)
    runner = GuardedRunner(app, config)
    try:
        await runner.setup()
        host, port = await runner.listen("127.0.0.1", 0)
        url = f"http://{host}:{port}"
        async with (
            FakeExecutor(directory, card or make_card(), respond) as executor,
            aiohttp.ClientSession() as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as client,
        ):
            await until(lambda: not app[ENGINE].not_ready())
            yield Served(app, executor, url, http, client)
    finally:
        runner.stop_listening()
        await runner.cleanup()
        shutil.rmtree(directory, ignore_errors=True)
