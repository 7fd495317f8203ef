"""The client that takes next to nothing of the CPUs it shares counts what the careful one counts."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from bench.load import lean
from bench.load.client import Client, Request, ServerProblem
from bench.load.records import Record
from tests.bench.sse_server import DONE, breaks, serve, text, usage, writes


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(60):
                await test(*args, **kwargs)

        uvloop.run(bounded())  # as the benches that use it

    return run


@on_a_loop
async def test_each_stream_has_an_instant_a_token() -> None:
    async with serve() as server, Client(server.url, key="secret") as client:
        await client.connect()
        requests = [Request(output=n, prompt=[1] * n) for n in (1, 5, 40)]
        records = await lean.at_once(client, requests)
        assert [(len(r.arrivals), r.prompt_tokens, r.ok) for r in records] == [
            (1, 1, True),
            (5, 5, True),
            (40, 40, True),
        ]
        for record in records:
            instants = [record.sent, *record.arrivals, record.ended]
            assert instants == sorted(instants)
        assert server.most > 1
        assert server.bodies[0]["ignore_eos"] is True


@pytest.mark.parametrize("size", [1, 3, 11, 12, 13, 40, 1000])
@on_a_loop
async def test_an_event_counts_once_however_the_bytes_are_cut(size: int) -> None:
    whole = text() * 7 + usage(3, 7) + DONE
    record = Record(0.0, 7)
    stream = lean.Stream(record, b"")
    stream.connection_made(_Transport())
    for at in range(0, len(whole), size):
        stream.data_received(whole[at : at + size])
    stream.connection_lost(None)
    assert len(record.arrivals) == record.output_tokens == 7
    assert record.ok


class _Transport(asyncio.Transport):
    def write(self, data: object) -> None: ...
    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("answer", "error"),
    [(breaks, "cut off"), (writes(text(), text()), "cut off"), (writes(DONE), "no output")],
)
@on_a_loop
async def test_an_answer_that_is_none_is_a_failure(answer: object, error: str) -> None:
    async with serve() as server, Client(server.url) as client:
        await client.connect()
        server.answer = answer  # type: ignore[assignment]
        (record,) = await lean.at_once(client, [Request(output=3, prompt=[1])])
        assert record.error == error


@on_a_loop
async def test_a_refusal_is_told_in_the_servers_words() -> None:
    async with serve() as server, Client(server.url) as client:
        await client.connect()
        server.status = 429
        (record,) = await lean.at_once(client, [Request(output=3, prompt=[1])])
        assert not record.ok
        assert "slow down" in record.message


@on_a_loop
async def test_a_server_that_is_gone_is_named() -> None:
    async with serve() as server, Client(server.url) as client:
        await client.connect()
    async with Client(server.url) as client:
        with pytest.raises(ServerProblem, match=re.escape(server.url)):
            await lean.at_once(client, [Request(output=3, prompt=[1])])
