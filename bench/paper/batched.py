"""Fig. 13 and Fig. 2: requests in the batch, and what the slots of the pool hold, OPT-13B.

Arrivals at the paper's rates for an hour, as its traces; the first minute does not count. At 2 requests/s
the three contiguous policies are overloaded and the paged one is near its limit, so a last row has it at a
higher rate, where it is as full as the others. `--slowness` scales the time model.

    python -m bench.paper.batched [--minutes 60] [--datasets sharegpt,alpaca] [--out DIR]
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.paper import published, report
from bench.paper.device import OPT_13B
from bench.paper.play import Outcome, simulate
from bench.paper.policies import Policy, Split
from bench.paper.workload import Pair, poisson

WARM = 60.0  # seconds
SATURATED = 1.5  # times the paper's rate
PARTS = Split.__struct_fields__


def run(
    pairs: Sequence[Pair],
    rate: float,
    policy: Policy,
    *,
    minutes: float,
    seed: int = 1,
    slowness: float = 1.0,
    progress: str = "",
) -> Outcome:
    """One policy under one load, stopped with the last arrival."""
    requests = poisson(pairs, rate, 60 * minutes, seed)
    device = dataclasses.replace(OPT_13B, slowness=slowness)
    warm = min(WARM, 60 * minutes / 4)
    return simulate(requests, policy, device, warm=warm, end=60 * minutes, progress=progress)


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__, minutes=60)
    parser.add_argument("--datasets", default="sharegpt,alpaca")
    parser.add_argument("--slowness", type=float, default=1.0, help="times all step times")
    options = parser.parse_args(argv)
    for dataset in options.datasets.split(","):
        measure(dataset, options)
    return 0


def measure(dataset: str, options: argparse.Namespace) -> None:
    """Both tables and plots of one data set."""
    pairs, rate = report.lengths(dataset, options), published.BATCHED_RATE[dataset]
    runs: dict[str, tuple[Policy, float, Outcome]] = {}
    loads = [(policy.value, policy, rate) for policy in Policy]
    loads.append(("paged, saturated", Policy.PAGED, rate * SATURATED))
    for name, policy, load in loads:
        minutes = options.minutes if load == rate else options.minutes / 4
        outcome = run(
            pairs,
            load,
            policy,
            minutes=minutes,
            seed=options.seed,
            slowness=options.slowness,
            progress=f"{dataset} {name}",
        )
        runs[name] = (policy, load, outcome)
    reference = published.BATCHED[dataset]
    rows: list[report.Row] = []
    for name, (policy, load, outcome) in runs.items():
        shares = outcome.shares()
        rows.append(
            {
                "policy": name,
                "req/s": load,
                "batched": outcome.mean_batched,
                "paper": reference[policy] if load == rate else "",
                "off %": 100 * (outcome.mean_batched / reference[policy] - 1)
                if load == rate
                else "",
                "tokens/s": outcome.token_rate,
                **{f"{part} %": 100 * shares[part] for part in PARTS},
                "of granted %": 100 * shares["states"] / (1 - shares["external"])
                if policy is Policy.PAGED
                else "",
                "preemptions": outcome.preemptions,
            }
        )
    report.publish(
        f"batched-{dataset}",
        f"Batched requests and memory, {dataset}, {OPT_13B.name}",
        rows,
        options.out,
    )
    plot(dataset, runs, options.out)


def plot(dataset: str, runs: dict[str, tuple[Policy, float, Outcome]], out: Path | None) -> None:
    """Fig. 13 left, Fig. 2 right; the paper's figures hatched, beside ours."""
    made, (left, right) = report.figure(2)
    reference = published.BATCHED[dataset]
    for place, policy in enumerate(Policy):
        ours = runs[policy.value][2].mean_batched
        left.bar(place - 0.2, ours, 0.4, color=report.COLORS[policy])
        left.bar(place + 0.2, reference[policy], 0.4, color="lightgray", hatch="//")
        for shift, value in ((-0.2, ours), (0.2, reference[policy])):
            left.text(place + shift, value, f"{value:.1f}", ha="center", va="bottom", fontsize=7)
    left.set_xticks(range(len(Policy)), [policy.value for policy in Policy])
    left.set_title(f"requests in the batch, {dataset}\n(hatched: the paper, Fig. 13)", fontsize=8)
    colors = ("tab:green", "gold", "tab:red", "silver")
    for place, (policy, _, outcome) in enumerate(runs.values()):
        bars = [(place - 0.2, list(outcome.shares().values()), "")]
        if dataset == "sharegpt":
            shown = [(value or 0.0) / 100 for value in published.MEMORY[policy]]
            bars.append((place + 0.2, shown, "//"))
        for at, values, hatch in bars:
            bottom = 0.0
            for part, value, color in zip(PARTS, values, colors, strict=True):
                label = part if place == 0 and not hatch else None
                right.bar(at, value, 0.38, bottom=bottom, color=color, hatch=hatch, label=label)
                bottom += value
    right.set_xticks(range(len(runs)), [name.replace(", ", "\n") for name in runs], fontsize=7)
    right.legend(fontsize=6, loc="lower right")
    right.set_title("share of the pool (hatched: Fig. 2)", fontsize=8)
    report.save(made, f"paper-batched-{dataset}", out)


if __name__ == "__main__":
    sys.exit(main())
