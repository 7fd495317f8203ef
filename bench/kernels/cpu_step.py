"""Milliseconds of one step of the default model: the native step against the torch runner.

Both run in this process and take turns, round by round, so that a noisy machine is noisy to both; beside
each figure stands the read bandwidth probed in the same rounds, which small batches follow.

    python -m bench.kernels.cpu_step [--model NAME] [--streams 1,8,16,64] [--context 320] [--rounds 5]
        [--only native|torch] [--weights plain|file|int8|w8a8] [--csv FILE]

With several --weights, such as `plain,file`, each is a runner of its own.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

import numpy as np
import torch
from tqdm import tqdm

from bench import output
from executor.load import DEFAULT_MODEL, LoadedModel, load_model
from executor.native import NativeRunner, why_not
from executor.plan import Draw, Plan, Row
from executor.quantize import Weights
from executor.runner import Runner
from wire.sampling import Sampling

BLOCK = 16
GREEDY = Sampling(seed=0, temperature=0)
PROBE = 64 << 20  # bytes read by the bandwidth probe; more than the caches hold
LEAST_S = 0.1  # of repeats in one round

Step = Callable[[], object]


@dataclass(slots=True)
class Case:
    """One kind of step and what was measured of it, in ms, by runner."""

    name: str
    plan: Plan
    times: dict[str, list[float]] = field(default_factory=dict)
    bandwidth: list[float] = field(default_factory=list)  # GB/s


def decode_plan(streams: int, context: int, blocks: int, rng: random.Random) -> Plan:
    """One token of each stream, behind `context - 1` others in random blocks."""
    per = -(-context // BLOCK)
    ids = rng.sample(range(1, blocks), streams * per)
    rows = []
    for seq in range(streams):
        draw = Draw(seq, 0, context, GREEDY, (), ())
        table = ids[seq * per : (seq + 1) * per]
        rows.append(Row(seq, context - 1, [rng.randrange(1000)], table, (draw,)))
    return Plan(0, rows)


def prefill_plan(tokens: int, blocks: int, rng: random.Random) -> Plan:
    """A whole prompt, and the first token behind it."""
    table = rng.sample(range(1, blocks), -(-tokens // BLOCK))
    draw = Draw(0, 0, tokens, GREEDY, (), ())
    return Plan(0, [Row(0, 0, [rng.randrange(1000) for _ in range(tokens)], table, (draw,))])


def bandwidth(buffer: torch.Tensor) -> float:
    """GB/s of reading `buffer` once, on torch's threads."""
    began = time.perf_counter()
    buffer.sum()
    return float(buffer.nbytes / (time.perf_counter() - began) / 1e9)


def timed(step: Step) -> float:
    """Median ms of one step, over at least `LEAST_S`."""
    times: list[float] = []
    end = time.perf_counter() + LEAST_S
    while len(times) < 3 or time.perf_counter() < end:
        began = time.perf_counter()
        step()
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def runners(
    model: str, blocks: int, only: str, weights: Sequence[Weights]
) -> dict[str, Runner | NativeRunner]:
    """Those asked for, KV memory zeroed. Ends the process when there is no native step."""

    def loaded() -> LoadedModel:
        return load_model(
            model, dtype="bfloat16", device="cpu", on_progress=lambda what, share: None
        )

    kind = torch.bfloat16
    made: dict[str, Runner | NativeRunner] = {}
    if only != "torch":
        for held in weights:
            model_loaded = loaded()
            if reason := why_not(model_loaded, kind):
                sys.exit(reason)
            native = NativeRunner(
                model_loaded,
                num_blocks=blocks,
                block_size=BLOCK,
                device="cpu",
                dtype=kind,
                weights=held,
            )
            native.kv.memory.fill(0)
            made["native" if held == "plain" else held] = native
    if only != "native":
        plain = Runner(loaded(), num_blocks=blocks, block_size=BLOCK, device="cpu", dtype=kind)
        plain.kv.keys.zero_()
        plain.kv.values.zero_()
        made["torch"] = plain
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.kernels.cpu_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--streams", default="1,8,16,64", help="that decode together")
    parser.add_argument("--context", type=int, default=320, help="positions of each stream")
    parser.add_argument("--prefill", default="256", help="tokens of a prompt, computed in one step")
    parser.add_argument("--rounds", type=int, default=5, help="each runner once, in turn")
    parser.add_argument(
        "--only", choices=("native", "torch", "both"), default="both", help="the runners measured"
    )
    parser.add_argument("--weights", default="plain", help="as the native runner holds them")
    parser.add_argument("--csv", type=output.file)
    args = parser.parse_args()
    rng = random.Random(0)
    streams = [int(n) for n in args.streams.split(",") if n]
    prompts = [int(n) for n in args.prefill.split(",") if n]
    blocks = 2 + max(max(streams, default=1) * args.context, *prompts, 0) // BLOCK * 2
    weights = [held for held in get_args(Weights) if held in args.weights.split(",")]
    if len(weights) != len(args.weights.split(",")):
        parser.error(f"--weights {args.weights}: choose of {', '.join(get_args(Weights))}")
    made = runners(args.model, blocks, args.only, weights)
    cases = [Case(f"{n} streams", decode_plan(n, args.context, blocks, rng)) for n in streams]
    cases += [Case(f"prompt of {n}", prefill_plan(n, blocks, rng)) for n in prompts]
    probe = torch.from_numpy(np.zeros(PROBE // 4, np.float32) + 1)
    bar = tqdm(total=args.rounds * len(cases), unit="case", leave=False)
    for _ in range(args.rounds):
        for case in cases:
            bar.set_description(case.name)
            case.bandwidth.append(max(bandwidth(probe) for _ in range(3)))
            for name, runner in made.items():
                ms = timed(lambda runner=runner, case=case: runner.run(case.plan))  # type: ignore[misc]
                case.times.setdefault(name, []).append(ms)
            bar.update()
    bar.close()
    report(cases, list(made), args.csv)
    return 0


def report(cases: list[Case], names: list[str], path: Path | None) -> None:
    """A table for people, and rows for machines."""
    two = len(names) == 2
    print("ms: median (least-most)" + "; ratio: second to first" * two)
    print(
        f"{'':16}"
        + "".join(f"{name:>22}" for name in names)
        + f"{'ratio':>8}" * two
        + f"{'GB/s':>8}"
    )
    rows = []
    for case in cases:
        medians = {name: statistics.median(case.times[name]) for name in names}
        spread = "".join(
            f"{medians[name]:>10.2f} ({min(case.times[name]):.1f}-{max(case.times[name]):.1f})".rjust(
                22
            )
            for name in names
        )
        ratio = f"{medians[names[-1]] / medians[names[0]]:>8.2f}" if two else ""
        print(f"{case.name:16}{spread}{ratio}{statistics.median(case.bandwidth):>8.1f}")
        rows += [
            {"case": case.name, "runner": name, "ms": f"{ms:.3f}"} for name, ms in medians.items()
        ]
    if path is not None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["case", "runner", "ms"])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
