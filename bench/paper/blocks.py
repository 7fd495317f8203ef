"""Fig. 18b: normalised latency by block size at a fixed load, OPT-13B.

The simulation charges a step for what it reads, not for how it is laid out, so only the cost of large
blocks shows here: slots lost in last blocks. What small blocks cost a kernel is measured by
`bench.paper.real --blocks`.

    python -m bench.paper.blocks [--minutes 10] [--out DIR]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

from bench.paper import report
from bench.paper.device import OPT_13B
from bench.paper.play import simulate
from bench.paper.policies import Policy
from bench.paper.workload import poisson

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
RATES = {"sharegpt": 1.9, "alpaca": 29.0}  # requests/s, near what blocks of 16 can serve


def main(argv: Sequence[str] | None = None) -> int:
    options = report.parser(__doc__, minutes=10).parse_args(argv)
    rows: list[dict[str, object]] = []
    made, (axis, *_) = report.figure()
    for dataset, rate in RATES.items():
        requests = poisson(
            report.lengths(dataset, options), rate, 60 * options.minutes, options.seed
        )
        latencies = []
        for size in SIZES:
            outcome = simulate(
                requests,
                Policy.PAGED,
                OPT_13B,
                block_size=size,
                patience=240.0,
                progress=f"{dataset} block {size}",
            )
            shares = outcome.shares()
            latencies.append(outcome.normalized)
            rows.append(
                {
                    "data": dataset,
                    "req/s": rate,
                    "block size": size,
                    "s/token": outcome.normalized,
                    "batched": outcome.mean_batched,
                    "lost in last blocks %": 100 * shares["internal"] / (1 - shares["external"]),
                    "preemptions": outcome.preemptions,
                }
            )
        served = [point for point in zip(SIZES, latencies, strict=True) if math.isfinite(point[1])]
        axis.plot(*zip(*served, strict=True), marker=".", label=f"{dataset} at {rate:g}/s")
    axis.set_xscale("log", base=2)
    axis.set_xticks(SIZES, SIZES)
    axis.set_yscale("log")
    axis.set_xlabel("block size, slots")
    axis.set_ylabel("normalised latency, s/token")
    axis.set_title("block size, OPT-13B (Fig. 18b)", fontsize=9)
    axis.legend(fontsize=7)
    report.publish("blocks", "Block size", rows, options.out)
    report.save(made, "paper-blocks", options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
