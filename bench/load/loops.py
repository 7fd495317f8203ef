"""When requests are sent: as soon as an earlier one ended, or when they arrive."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from bench.load.client import Client, Request
from bench.load.records import Record

PAUSE_SECONDS = 0.05  # after a failure, lest a server that is gone be asked without end

Done = Callable[[Record], None]


async def closed_loop(
    client: Client,
    requests: Iterable[Request],
    concurrency: int,
    *,
    seconds: float | None = None,
    done: Done = lambda record: None,
) -> list[Record]:
    """Keep `concurrency` requests in flight until all are sent or `seconds` are over; then wait for them."""
    waiting = iter(requests)
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds if seconds is not None else None
    records: list[Record] = []

    async def work() -> None:
        for request in waiting:
            record = await client.send(request)
            records.append(record)
            done(record)
            if until is not None and loop.time() >= until:
                return
            if not record.ok:
                await asyncio.sleep(PAUSE_SECONDS)

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return records


async def open_loop(
    client: Client,
    requests: Iterable[Request],
    arrivals: Iterable[float],
    *,
    seconds: float | None = None,
    done: Done = lambda record: None,
) -> list[Record]:
    """Send each request at its instant, `arrivals` in seconds after the start, however many are in flight."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    records: list[Record] = []

    async def one(request: Request) -> None:
        record = await client.send(request)
        records.append(record)
        done(record)

    async with asyncio.TaskGroup() as tasks:
        for request, at in zip(requests, arrivals, strict=False):
            if seconds is not None and at > seconds:
                break
            await asyncio.sleep(began + at - loop.time())
            tasks.create_task(one(request))
    return records


def poisson(rate: float, rng: random.Random) -> Iterator[float]:
    """Instants of a Poisson process of `rate` per second, without end."""
    return accumulate(iter(lambda: rng.expovariate(rate), None))


def as_traced(requests: Sequence[Request], speedup: float) -> list[float]:
    """Instants of a trace, from its first request on, `speedup` times as fast."""
    first = requests[0].at if requests else 0.0
    return [(request.at - first) / speedup for request in requests]
