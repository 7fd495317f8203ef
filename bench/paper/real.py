"""The same comparison for real: this executor's engine and native step on this CPU, with a small KV budget.

Computation is the same for all policies, only who may enter differs. Lengths are ShareGPT's over
`--shrink`, the longest sequence 2,048 over it. The paper's gain needs a device on which a larger batch
costs little more time. An A100 is one up to some hundred requests, this CPU up to about eight (a step
takes 8.8, 12.5, 19.1 and 64.1 ms at 1, 8, 16 and 64 streams), so the default pool holds one and a half of
the longest sequences, where paged memory runs about six requests at once. With the paper's proportion,
7.7 of the longest (`--slots 3925`), all policies are bound by computing and differ little.

    python -m bench.paper.real [--minutes 0.33] [--slots 768] [--policies …] [--out DIR]
    python -m bench.paper.real --prefix      instead: a shared prefix of 341 tokens, with and without reuse
    python -m bench.paper.real --blocks      instead: the same load by block size (Fig. 18b)
    python -m bench.paper.real --modelled --minutes 3     instead: on a virtual CPU, to see other pools
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch

from bench.paper import report
from bench.paper.device import CPU
from bench.paper.latency import Curve, Play, curve, publish_curves, sustained
from bench.paper.play import Outcome, RealClock, play, random_prompt, simulate
from bench.paper.policies import Policy, blocks_beneath
from bench.paper.workload import LONGEST, SHAREGPT, Pair, Request, poisson, scaled
from executor.load import DEFAULT_MODEL, LoadedModel, load_model
from executor.native import NativeRunner, why_not
from executor.worker import Worker

SEQUENCES = 64  # most running at once
STEP_TOKENS = 512
FLOOD = 60.0, 15.0  # requests a second, seconds
SHARES = (0.5, 0.75, 0.9, 1.05)  # of the most a policy can serve
LIMIT = 4.0  # times the least latency of all points: where rates are compared
PATIENCE = 12.0  # seconds
PREFIX = 341  # tokens of the paper's five examples
SIZES = (2, 4, 8, 16, 32, 64, 128, 256)  # of blocks; the native bfloat16 step wants even ones


class Place(Protocol):
    """Where runs take place."""

    slots: int

    def play(
        self, policy: Policy, requests: Sequence[Request], progress: str, end: float
    ) -> Outcome: ...


class Modelled:
    """A virtual CPU: what `Machine` does, in a fraction of the time, as far as the time model holds."""

    def __init__(self, slots: int, longest: int) -> None:
        self.slots = slots
        self._longest = longest

    def play(
        self, policy: Policy, requests: Sequence[Request], progress: str, end: float
    ) -> Outcome:
        flooded = math.isfinite(end)
        return simulate(
            requests,
            policy,
            dataclasses.replace(CPU, slots=self.slots),
            longest=self._longest,
            step_tokens=STEP_TOKENS,
            warm=end / 4 if flooded else 0.0,
            patience=math.inf if flooded else PATIENCE,
            end=end,
            progress=progress,
        )


class Machine:
    """The default model on this CPU, in bfloat16, with a pool of `slots`."""

    def __init__(self, slots: int, longest: int) -> None:
        self.slots = slots
        self.longest = longest
        self.worker = Worker()
        self._loaded = self.worker.call(_load, lambda: None, 1.0)
        self._runners: dict[int, NativeRunner] = {}  # by block size

    def play(
        self,
        policy: Policy,
        requests: Sequence[Request],
        progress: str,
        end: float,
        *,
        block_size: int = 16,
        reuse: bool = True,
    ) -> Outcome:
        """One run in real time. Runs that are not flooded are cut when requests wait for too long."""
        flooded = math.isfinite(end)
        return play(
            requests,
            policy,
            self.slots,
            self._runner(block_size),
            RealClock(),
            self.worker,
            partial(random_prompt, vocab=self._loaded.card.vocab_size),
            vocab=self._loaded.card.vocab_size,
            block_size=block_size,
            longest=self.longest,
            sequences=SEQUENCES,
            reuse=reuse,
            step_tokens=STEP_TOKENS,
            warm=end / 4 if flooded else 0.0,
            patience=math.inf if flooded else PATIENCE,
            end=end,
            progress=progress,
        )

    def _runner(self, block_size: int) -> NativeRunner:
        if block_size not in self._runners:
            self._runners[block_size] = self.worker.call(
                lambda: self._make(block_size), lambda: None, 1.0
            )
        return self._runners[block_size]

    def _make(self, block_size: int) -> NativeRunner:
        runner = NativeRunner(
            self._loaded,
            num_blocks=blocks_beneath(self.slots, block_size, SEQUENCES) + 1,
            block_size=block_size,
            device="cpu",
            dtype=torch.bfloat16,
            keep=True,
        )
        runner.warm_up()
        return runner

    def close(self) -> None:
        self.worker.close()


def _load() -> LoadedModel:
    loaded = load_model(
        DEFAULT_MODEL, dtype="bfloat16", device="cpu", on_progress=lambda what, share: None
    )
    if reason := why_not(loaded, torch.bfloat16):
        sys.exit(reason)
    return loaded


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__, minutes=1 / 3)
    parser.add_argument("--slots", type=int, default=768, help="of the pool (%(default)s)")
    parser.add_argument("--shrink", type=int, default=4, help="lengths are divided by it")
    parser.add_argument("--policies", default=",".join(Policy))
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--prefix", action="store_true")
    instead.add_argument("--blocks", action="store_true")
    instead.add_argument("--modelled", action="store_true")
    options = parser.parse_args(argv)
    longest = LONGEST // options.shrink
    means = (SHAREGPT[0] / options.shrink, SHAREGPT[1] / options.shrink)
    pairs = scaled(report.lengths("sharegpt", options), means, longest)
    if options.modelled:
        compare(Modelled(options.slots, longest), pairs, options)
        return 0
    machine = Machine(options.slots, longest + PREFIX if options.prefix else longest)
    try:
        if options.prefix:
            shared_prefix(machine, pairs, options)
        elif options.blocks:
            block_sizes(machine, pairs, options)
        else:
            compare(machine, pairs, options)
    finally:
        machine.close()
    return 0


def compare(machine: Place, pairs: Sequence[Pair], options: argparse.Namespace) -> None:
    """Latency against rate for each policy, and the rates at equal latency."""
    curves: dict[str, Curve] = {}
    floods: dict[str, Outcome] = {}
    for policy in map(Policy, options.policies.split(",")):
        curves[policy.value] = curve(
            _keeping_flood(machine, policy, floods),
            lambda rate, seconds: poisson(pairs, rate, seconds, options.seed),
            60 * options.minutes,
            f"real {policy.value}",
            flood=FLOOD,
            shares=SHARES,
        )
    limit = round(LIMIT * min(latency for points in curves.values() for _, latency in points), 3)
    title = f"on this CPU, {machine.slots} slots (Fig. 12)"
    publish_curves("real", title, curves, options.out, limit)
    rows = sustained(curves, next(iter(curves)), limit)
    for row in rows:
        flood = floods[str(row["policy"])]
        row["flooded: batched"] = flood.mean_batched
        row["tokens/s"] = flood.token_rate
        row["states %"] = 100 * flood.shares()["states"]
    report.publish(
        "real-sustained", "Rate at equal latency, and what a flood comes to", rows, options.out
    )


def _keeping_flood(machine: Place, policy: Policy, floods: dict[str, Outcome]) -> Play:
    def run(requests: Sequence[Request], progress: str, end: float) -> Outcome:
        outcome = machine.play(policy, requests, progress, end)
        if math.isfinite(end):
            floods[policy.value] = outcome
        return outcome

    return run


def shared_prefix(machine: Machine, pairs: Sequence[Pair], options: argparse.Namespace) -> None:
    """Requests a second, flooded, behind one prefix; with and without reuse take turns, three times."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    seconds = 60 * options.minutes
    requests = poisson(pairs, FLOOD[0], seconds, options.seed, prefix=PREFIX)
    mean = statistics.fmean(request.output for request in requests)
    for turn in range(3):
        for reuse in rates:
            name = f"prefix {PREFIX} {'with' if reuse else 'no'} reuse {turn + 1}/3"
            outcome = machine.play(Policy.PAGED, requests, name, seconds, reuse=reuse)
            rates[reuse].append(outcome.token_rate / mean)
    rows: list[report.Row] = [
        {
            "prefix reuse": "yes" if reuse else "no",
            "req/s, median": statistics.median(measured),
            "least": min(measured),
            "most": max(measured),
            "times": statistics.median(measured) / statistics.median(rates[False]),
        }
        for reuse, measured in rates.items()
    ]
    report.publish(
        "real-prefix", f"Shared prefix of {PREFIX} tokens on this CPU", rows, options.out
    )


def block_sizes(machine: Machine, pairs: Sequence[Pair], options: argparse.Namespace) -> None:
    """Output tokens a second, flooded, by block size."""
    rows: list[report.Row] = []
    seconds = 60 * options.minutes
    requests = poisson(pairs, FLOOD[0], seconds, options.seed)
    for size in SIZES:
        outcome = machine.play(Policy.PAGED, requests, f"block {size}", seconds, block_size=size)
        rows.append(
            {
                "block size": size,
                "tokens/s": outcome.token_rate,
                "batched": outcome.mean_batched,
                "states %": 100 * outcome.shares()["states"],
            }
        )
    report.publish("real-blocks", "Block size on this CPU, flooded", rows, options.out)


if __name__ == "__main__":
    sys.exit(main())
