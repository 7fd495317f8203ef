"""The flags of `python -m bench.serve`, and what follows from one for another."""

from __future__ import annotations

import argparse
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from bench import output

OPEN_WARMUP = 8  # warm-up requests in flight where no concurrency is given


def parser(description: str) -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.serve",
        description=description,
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
        "--share",
        choices=("all", "none", "both"),
        default="all",
        help="all requests have the same prefix, or each its own; both: one and the other in turns",
    )
    work.add_argument(
        "--turns",
        type=_count,
        default=2,
        help="questions of a chat's conversation; --requests counts conversations",
    )
    work.add_argument(
        "--followup", type=_count, default=64, help="words of a chat's questions after the first"
    )
    work.add_argument(
        "--think", type=float, default=1.0, help="mean seconds before a chat's next question"
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

    two = parser.add_argument_group("comparison")
    two.add_argument(
        "--versus", metavar="URL", help="another server, measured in turns with the first"
    )
    two.add_argument("--versus-model", default="", help="its model")
    two.add_argument(
        "--alternations", type=_count, default=3, help="rounds, each measuring both servers"
    )

    out = parser.add_argument_group("report")
    out.add_argument(
        "--slo-ttft",
        type=_positive,
        metavar="MS",
        help="good requests: at most so long to the first token",
    )
    out.add_argument("--slo-tpot", type=_positive, metavar="MS", help="and per further token")
    out.add_argument("--json", type=output.file, help="figures")
    out.add_argument("--csv", type=output.file, help="one row a request")
    out.add_argument(
        "--plot",
        type=output.file,
        metavar="PNG",
        help="distributions, and tokens per second over time",
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


def parse(description: str, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Flags with defaults that depend on others filled in; exits with status 2 on a bad one."""
    flags = parser(description)
    options = flags.parse_args(argv)
    if sum(bool(way) for way in (options.concurrency, options.rate, options.speedup)) > 1:
        flags.error("give one of --concurrency, --rate, --speedup")
    if options.share == "both" and (options.workload != "prefix" or options.versus):
        flags.error("--share both needs --workload prefix, and compares a server with itself")
    if options.workload == "chat" and (options.rate or options.speedup):
        flags.error("a chat is a closed loop; give --concurrency, the conversations held at once")
    if options.speedup and options.workload not in ("azure", "mooncake"):
        flags.error("--speedup needs a trace: --workload azure or mooncake")
    texts = options.data and options.workload in ("sharegpt", "chat")
    if texts and options.seconds and not options.requests:
        flags.error("give --requests too, as a bound: texts are tokenized before they are sent")
    if not options.rate and not options.speedup:
        options.concurrency = options.concurrency or 8
    if not options.requests and not options.seconds:
        options.requests = 64
    if options.warmup is None:
        options.warmup = options.concurrency or OPEN_WARMUP
    if options.seed is None:
        options.seed = secrets.randbelow(1 << 31)
    options.api_key = key_from(options.api_key)
    return options


def key_from(flag: str) -> str:
    """The key to send: as given, or from the environment, where other users cannot read it."""
    return flag or os.environ.get("OPENAI_API_KEY", "")
