"""Load client for any OpenAI-compatible server: sends a workload, reports what clients feel.

    python -m bench.serve --url http://127.0.0.1:8000 --concurrency 16 --requests 64
    python -m bench.serve --workload azure --data TRACE.csv --scale 0.25 --rate 2 --seconds 60
    python -m bench.serve --concurrency 16 --versus http://127.0.0.1:8100 --alternations 3

Prompts are token ids unless the workload is a chat, so two servers are asked exactly the same. Output lengths
are forced with `ignore_eos`. Each run draws another seed unless `--seed` is given: a prompt sent twice would
be answered from the prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.load import report, versus
from bench.load.client import Client, ServerProblem
from bench.load.datasets import DataProblem
from bench.load.options import parse
from bench.load.plan import Encode, Plan, Run, encoder, vocabulary_of
from bench.load.records import Slo, Summary, summarise
from bench.load.versus import Comparison
from bench.load.workloads import Vocabulary

OTHER_TOKENS = 1 << 31  # between the seeds of a server that is compared with itself


@dataclass(slots=True)
class Side:
    """A server, or a way to use it, and what was measured of it: one entry a round."""

    name: str
    client: Client
    plan: Plan
    seed: int
    runs: list[Run] = field(default_factory=list)
    summaries: list[Summary] = field(default_factory=list)

    async def measure(self, number: int, encode: Encode) -> None:
        """One round, and its figures on the screen."""
        options, seed = self.plan.options, self.seed + number
        run = await self.plan.round(self.client, seed, encode)
        summary = summarise(run.records, Slo(options.slo_ttft, options.slo_tpot))
        self.runs.append(run)
        self.summaries.append(summary)
        print(f"\n{self.name}: {options.workload}, seed {seed}")
        print(report.table(summary))
        print(
            f"memory read at {run.before:.0f} GB/s before and {run.after:.0f} after; "
            f"the client used {run.client_cpu:.0%} of a CPU",
            flush=True,
        )


async def measure(options: argparse.Namespace) -> int:
    """One server once, or two in turns. Returns the exit status: 1 if a request failed.

    Raises:
        ServerProblem, DataProblem: nothing can be measured, or no more.
    """
    async with AsyncExitStack() as stack:
        clients = []
        for url, model in _servers(options):
            client = Client(
                url, model, key=options.api_key, fields=options.body,
                min_tokens=options.min_tokens, timeout=options.timeout,
            )  # fmt: skip
            clients.append(await stack.enter_async_context(client))
            await client.connect()
        sides = _sides(options, clients, await vocabulary_of(clients, options.vocab))
        # The first server's tokens are sent to both.
        encode = encoder(clients[0], options.tokenizer, options.api_key)
        try:
            for number in range(options.alternations if len(sides) > 1 else 1):
                for side in sides:
                    await side.measure(number, encode)
        finally:
            comparisons = _compared(sides)
            if comparisons:
                print("\n" + versus.table(comparisons, (sides[0].name, sides[1].name)))
            _write(options, sides, comparisons)
    return int(any(each.errors for side in sides for each in side.summaries))


def _servers(options: argparse.Namespace) -> list[tuple[str, str]]:
    first = (options.url, options.model)
    return [first, (options.versus, options.versus_model)] if options.versus else [first]


def _sides(
    options: argparse.Namespace, clients: Sequence[Client], vocabulary: Vocabulary
) -> list[Side]:
    context = min((each.max_model_len for each in clients if each.max_model_len), default=0)
    if options.share == "both":
        ways = {"one shared prefix": "all", "each its own prefix": "none"}
        return [
            Side(
                name,
                clients[0],
                Plan(_with(options, share=share), vocabulary, context),
                options.seed,
            )
            for name, share in ways.items()
        ]
    plan = Plan(options, vocabulary, context)
    names = [f"{client.model} at {client.url}" for client in clients]
    if len(set(names)) < len(names):
        # A server beside itself shows how much two rounds differ by chance, if nothing is cached.
        seeds = (options.seed, options.seed + OTHER_TOKENS)
        return [Side(f"{name}, seed {seed}", client, plan, seed)
                for name, client, seed in zip(names, clients, seeds, strict=True)]  # fmt: skip
    return [
        Side(name, client, plan, options.seed) for name, client in zip(names, clients, strict=True)
    ]


def _with(options: argparse.Namespace, **changes: object) -> argparse.Namespace:
    return argparse.Namespace(**(vars(options) | changes))


def _compared(sides: Sequence[Side]) -> list[Comparison]:
    """The rounds that both sides have ended; none for a single side."""
    rounds = min(len(side.summaries) for side in sides)
    if len(sides) < 2 or not rounds:
        return []
    first, second = ([versus.figures(each) for each in side.summaries[:rounds]] for side in sides)
    return versus.compare(first, second)


def _write(
    options: argparse.Namespace, sides: Sequence[Side], comparisons: Sequence[Comparison]
) -> None:
    rounds = [(side.name, number, run) for side in sides for number, run in enumerate(side.runs, 1)]
    if options.json:
        servers = [
            {"name": side.name, "rounds": [
                {"bandwidth_gb_s": [run.before, run.after], "client_cpu": run.client_cpu}
                | asdict(summary)
                for run, summary in zip(side.runs, side.summaries, strict=True)]}
            for side in sides
        ]  # fmt: skip
        compared = [asdict(each) for each in comparisons]
        report.write_json(
            options.json,
            {"options": _told(options), "servers": servers, "comparison": compared},
        )
    if options.csv:
        report.write_csv(options.csv, [(name, number, run.records) for name, number, run in rounds])
    if options.plot and rounds:
        report.plot(
            options.plot, {f"{name}, round {number}": run.records for name, number, run in rounds}
        )


def _told(options: argparse.Namespace) -> dict[str, object]:
    """The settings of a run, without its key."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name != "api_key"
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = parse((__doc__ or "").partition("\n\n    ")[0], argv)
    try:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(measure(options))
    except (ServerProblem, DataProblem) as problem:
        print(f"bench.serve: {problem}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # what was measured until then has been written
        return 130


if __name__ == "__main__":
    sys.exit(main())
