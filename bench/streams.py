"""Many streams at once: opens them, keeps them open, closes them, and watches the server's processes.

A stream that ends is followed by another, so that the number stays. Memory is steady when it does not grow
over the second half of that time.

    EXECUTOR_MAX_SEQUENCES=1024 .venv/bin/pagekeeper up --kv-memory 512MiB --max-step-tokens 1024 &
    python -m bench.streams --streams 1000 --seconds 60

With the server's defaults all 1,000 streams are open, but 256 run at a time and the others wait in the
executor's queue (`--max-sequences`, `--max-waiting`); each step computes at most `--max-step-tokens`. The
gateway takes 1,024 requests and 4,096 connections (`GATEWAY_MAX_REQUESTS`, `GATEWAY_MAX_CONNECTIONS`), of one
key 256 (`GATEWAY_PER_KEY_REQUESTS`; without keys there is no such bound). Both sides need as many open files
as streams, and a tenth more (`ulimit -n`).

A block of the KV pool takes memory from its first use on, so the executor's grows until every block was used
once: give a pool that is small enough for that, or more `--seconds`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from urllib.parse import urlsplit

import psutil
from tqdm import tqdm

from bench import output
from bench.load import report, workloads
from bench.load.client import Client, Request, ServerProblem
from bench.load.options import key_from
from bench.load.plan import vocabulary_of
from bench.load.processes import MIB, Watched, behind, name_of, slope
from bench.load.records import Record

STEADY_MIB = 8.0  # growth over the second half that is taken for noise,
STEADY_SHARE = 0.02  # or this share of the memory, whichever is more
SETTLE_SECONDS = 3.0  # after closing, before memory is looked at for the last time


@dataclass(slots=True)
class Streams:
    """The streams of a run. `open` are now; records of all that were ever opened are kept."""

    client: Client
    requests: Iterator[Request]
    records: list[Record] = field(default_factory=list)

    async def keep_open(self) -> None:
        """One stream after the other until cancelled; a failed one is followed by another a second later."""
        while True:
            request = next(self.requests)
            record = Record(0.0, request.output)
            self.records.append(record)
            await self.client.send(request, record)
            if not record.ok:
                await asyncio.sleep(1)

    def open(self) -> int:
        return sum(not record.ended for record in self.records)

    def started(self) -> int:
        """Streams that are open and had output."""
        return sum(bool(record.arrivals) and not record.ended for record in self.records)

    def tokens(self) -> int:
        return sum(len(record.arrivals) for record in self.records)


@dataclass(frozen=True, slots=True)
class Row:
    """One process: memory in MiB, CPU as share of one CPU while the streams were open."""

    process: str
    pid: int
    before: float
    half: float
    end: float
    after: float
    slope_per_minute: float
    steady: bool
    cpu: float


def rows_of(watched: Sequence[Watched], opened: float, closed: float) -> list[Row]:
    """What the samples say; `opened` is when all streams were open, `closed` when they were closed."""
    return [_row(each, opened, closed) for each in watched if each.rss]


def _row(each: Watched, opened: float, closed: float) -> Row:
    half = (opened + closed) / 2
    rss = [value / MIB for value in each.rss]
    held = [k for k, at in enumerate(each.at) if opened <= at <= closed] or [len(rss) - 1]
    second = [k for k in held if each.at[k] >= half] or held[-1:]
    rise = slope([each.at[k] for k in second], [rss[k] for k in second])
    grown = rise * (each.at[second[-1]] - each.at[second[0]])
    took = each.at[held[-1]] - each.at[held[0]]
    return Row(
        process=each.name + (" (ended)" if each.gone else ""),
        pid=each.process.pid,
        before=rss[0],
        half=rss[second[0]],
        end=rss[held[-1]],
        after=rss[-1],
        slope_per_minute=rise * 60,
        # One sample shows no growth; a process that ended shows nothing that would count.
        steady=not each.gone and not grown > max(STEADY_MIB, STEADY_SHARE * rss[held[-1]]),
        cpu=(each.cpu[held[-1]] - each.cpu[held[0]]) / took if took else 0.0,
    )


def table(rows: Sequence[Row]) -> str:
    """The processes for people."""
    width = max(len(row.process) for row in rows) + 2
    lines = [
        f"{'RSS in MiB':<{width}}{'pid':>8}{'before':>9}{'half':>9}{'end':>9}{'after':>9}"
        f"{'MiB/min':>9}{'CPU':>7}"
    ]
    for row in rows:
        lines.append(
            f"{row.process:<{width}}{row.pid:>8}{row.before:>9.1f}{row.half:>9.1f}{row.end:>9.1f}"
            f"{row.after:>9.1f}{row.slope_per_minute:>9.2f}{row.cpu:>7.0%}"
            + ("" if row.steady else "   not steady: grew, or ended")
        )
    lines.append(
        f"{'all':<{width}}{'':>8}"
        + "".join(
            f"{sum(getattr(row, name) for row in rows):>9.1f}"
            for name in ("before", "half", "end", "after", "slope_per_minute")
        )
        + f"{sum(row.cpu for row in rows):>7.0%}"
    )
    return "\n".join(lines)


async def measure(options: argparse.Namespace) -> int:
    """Returns the exit status: 1 if a stream failed, a process ended, or memory grew."""
    watched = [
        Watched(name_of(process.cmdline()), process)
        for process in [*behind(urlsplit(options.url).port or 80), psutil.Process()]
    ]
    watched[-1].name = "this client"
    async with Client(options.url, options.model, key=options.api_key) as client:
        await client.connect()
        vocabulary = await vocabulary_of([client], options.vocab)
        requests = workloads.fixed(vocabulary, options.input, options.output, options.seed)
        streams = Streams(client, requests)
        sampler = asyncio.create_task(_sample(watched))
        await asyncio.sleep(1.5)  # a sample before anything is asked
        tasks = []
        for _ in tqdm(range(options.streams), desc="opening", unit="stream"):
            tasks.append(asyncio.create_task(streams.keep_open()))
            await asyncio.sleep(options.ramp / options.streams)
        opened, tokens = time.monotonic(), streams.tokens()
        peak, started = await _hold(streams, options.seconds)
        tokens, closed = streams.tokens() - tokens, time.monotonic()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(SETTLE_SECONDS)
        sampler.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sampler
    rows = rows_of(watched, opened, closed)
    errors = Counter(record.error for record in streams.records if record.error)
    examples = {record.error: record.message for record in streams.records if record.error}
    print(
        f"{options.streams} streams for {closed - opened:.0f} s: at most {peak} open at once, "
        f"{started} of them with output; {len(streams.records)} opened in all; "
        f"{tokens / (closed - opened):.0f} events/s; {errors.total()} errors"
    )
    for kind, count in errors.items():
        print(f"failed: {count} x {kind}: {examples[kind]}")
    print(table(rows))
    if options.json:
        figures = {"streams": options.streams, "open": peak, "with_output": started,
                   "opened": len(streams.records), "events_per_s": tokens / (closed - opened),
                   "seconds": closed - opened, "errors": dict(errors),
                   "processes": [asdict(row) for row in rows]}  # fmt: skip
        report.write_json(options.json, figures)
    return int(bool(errors) or not all(row.steady for row in rows))


async def _sample(watched: Sequence[Watched]) -> None:
    while True:
        now = time.monotonic()
        for each in watched:
            each.sample(now)
        await asyncio.sleep(max(0.0, now + 1.0 - time.monotonic()))


async def _hold(streams: Streams, seconds: float) -> tuple[int, int]:
    """Wait; returns the most streams that were open at once, and that had output at once."""
    peak = started = 0
    with tqdm(total=round(seconds), desc="holding", unit="s") as bar:
        for _ in range(round(seconds)):
            await asyncio.sleep(1)
            peak, started = max(peak, streams.open()), max(started, streams.started())
            bar.set_postfix(open=streams.open(), output=streams.started())
            bar.update()
    return peak, started


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """All flags."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.streams",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="a server on this machine")
    parser.add_argument("--model", default="", help="name; empty: the first the server lists")
    parser.add_argument("--api-key", default="", help="better given as OPENAI_API_KEY")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long all are kept open")
    parser.add_argument(
        "--ramp", type=float, default=5.0, help="seconds over which they are opened"
    )
    parser.add_argument("--input", type=int, default=16, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=1024, help="tokens of an answer")
    parser.add_argument("--vocab", type=int, help="token ids; default: as the server says")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=output.file, help="figures")
    options = parser.parse_args(argv)
    if min(options.streams, options.seconds, options.input, options.output) < 1:
        parser.error("--streams, --seconds, --input and --output must be at least 1")
    options.api_key = key_from(options.api_key)
    return options


def _allow_files(count: int) -> None:
    """Let this process have `count` open files, if it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def main(argv: Sequence[str] | None = None) -> int:
    import uvloop

    options = parse(argv)
    _allow_files(options.streams + 100)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(measure(options))
    except ServerProblem as problem:
        print(f"bench.streams: {problem}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
