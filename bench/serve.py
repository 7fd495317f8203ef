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
import gc
import json
import os
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.load import probe, report
from bench.load.client import Client, ServerProblem
from bench.load.datasets import DataProblem
from bench.load.plan import Plan, encoder, vocabulary_of
from bench.load.records import Slo, summarise


def parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.serve",
        description=(__doc__ or "").partition("\n\n    ")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    server = parser.add_argument_group("server")
    server.add_argument("--url", default="http://127.0.0.1:8000", help="without /v1")
    server.add_argument("--model", default="", help="name; empty: the first the server lists")
    server.add_argument("--api-key", default="", help="better given as OPENAI_API_KEY")
    server.add_argument(
        "--body", type=_object, default={}, metavar="JSON", help="more fields of every request"
    )
    server.add_argument(
        "--min-tokens",
        action="store_true",
        help="send min_tokens too, for servers without ignore_eos",
    )
    server.add_argument("--timeout", type=_positive, default=300.0, help="seconds without a byte")

    work = parser.add_argument_group("workload")
    work.add_argument(
        "--workload",
        default="fixed",
        choices=("fixed", "prefix", "sharegpt", "azure", "mooncake", "chat"),
    )
    work.add_argument(
        "--input", type=_count, default=256, help="tokens of a prompt; after the prefix, if any"
    )
    work.add_argument("--output", type=_count, default=128, help="tokens of an answer")
    work.add_argument("--prefix", type=_count, default=341, help="tokens of the shared prefix")
    work.add_argument(
        "--share", choices=("all", "none"), default="all", help="who has the same prefix"
    )
    work.add_argument("--data", type=Path, help="file of a data set: ShareGPT's JSON, a trace")
    work.add_argument("--scale", type=_positive, default=1.0, help="of a trace's lengths")
    work.add_argument("--max-input", type=_count, help="longest prompt of a data set")
    work.add_argument("--max-output", type=_count, help="longest answer of a data set")
    work.add_argument(
        "--context", type=_count, help="longest prompt and answer; default: the model's"
    )
    work.add_argument(
        "--vocab", type=_count, help="token ids to draw from; default: as the server says"
    )
    work.add_argument(
        "--tokenizer", type=Path, help="folder or tokenizer.json; default: the server's /tokenize"
    )
    work.add_argument("--seed", type=int, help="of everything drawn; default: another each time")

    load = parser.add_argument_group("load")
    load.add_argument(
        "--concurrency",
        type=_count,
        help="closed loop: requests in flight (8 if no other load is given)",
    )
    load.add_argument("--rate", type=_positive, help="open loop: Poisson arrivals per second")
    load.add_argument(
        "--speedup",
        type=_positive,
        help="open loop: the trace's own arrivals, so many times as fast",
    )
    load.add_argument("--requests", type=_count, help="how many (64 without --seconds)")
    load.add_argument(
        "--seconds", type=_positive, help="send for so long, then wait for what is in flight"
    )
    load.add_argument(
        "--warmup", type=int, help="requests before that do not count; default: the concurrency"
    )

    out = parser.add_argument_group("report")
    out.add_argument(
        "--slo-ttft",
        type=_positive,
        metavar="MS",
        help="good requests: at most so long to the first token",
    )
    out.add_argument("--slo-tpot", type=_positive, metavar="MS", help="and per further token")
    out.add_argument("--json", type=Path, help="figures")
    out.add_argument("--csv", type=Path, help="one row a request")
    out.add_argument(
        "--plot", type=Path, metavar="PNG", help="distributions, and tokens per second over time"
    )
    return parser


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be more than 0")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


def _object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as problem:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {problem}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags with defaults that depend on others filled in; exits with status 2 on a bad one."""
    flags = parser()
    options = flags.parse_args(argv)
    if sum(bool(way) for way in (options.concurrency, options.rate, options.speedup)) > 1:
        flags.error("give one of --concurrency, --rate, --speedup")
    if options.speedup and options.workload not in ("azure", "mooncake"):
        flags.error("--speedup needs a trace: --workload azure or mooncake")
    if not options.rate and not options.speedup:
        options.concurrency = options.concurrency or 8
    if not options.requests and not options.seconds:
        options.requests = 64
    if options.warmup is None:
        options.warmup = options.concurrency or 8
    if options.seed is None:
        options.seed = secrets.randbelow(1 << 31)
    options.api_key = options.api_key or os.environ.get("OPENAI_API_KEY", "")
    return options


def _client(options: argparse.Namespace, url: str, model: str) -> Client:
    return Client(
        url, model, key=options.api_key, fields=options.body,
        min_tokens=options.min_tokens, timeout=options.timeout,
    )  # fmt: skip


async def measure(options: argparse.Namespace) -> int:
    """One server, one run. Returns the exit status."""
    async with _client(options, options.url, options.model) as client:
        await client.connect()
        vocabulary = await vocabulary_of(client, options.vocab)
        plan = Plan(options, vocabulary, client.max_model_len)
        encode = encoder(client, options.tokenizer, options.api_key)
        before = probe.read_bandwidth()
        records = await plan.round(client, options.seed, encode, client.model)
        after = probe.read_bandwidth()
    summary = summarise(records, Slo(options.slo_ttft, options.slo_tpot))
    print(f"{client.model} at {client.url}, {options.workload}, seed {options.seed}")
    print(report.table(summary))
    print(f"memory read bandwidth before and after: {before:.0f} and {after:.0f} GB/s")
    if options.json:
        content = {"url": client.url, "model": client.model, "options": _told(options),
                   "bandwidth_gb_s": [before, after], "figures": report.as_dict(summary)}  # fmt: skip
        report.write_json(options.json, content)
    if options.csv:
        report.write_csv(options.csv, records)
    if options.plot:
        report.plot(options.plot, {client.model: records})
    return 0 if summary.completed == summary.requests else 1


def _told(options: argparse.Namespace) -> dict[str, object]:
    """The settings of a run, without its key."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in vars(options).items()
        if name != "api_key"
    }


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    gc.freeze()  # what was imported need not be looked at again
    try:
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(measure(options))
    except (ServerProblem, DataProblem) as problem:
        print(f"bench.serve: {problem}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
