"""Fig. 16: translation behind a shared prefix of 80 tokens (one example) or 341 (five), LLaMA-13B on one
A100.

LLaMA-13B has OPT-13B's sizes. Paged memory keeps the prefix once and computes it once; without reuse, and
with contiguous regions, every request holds and computes its own. Sentences are drawn with WMT16's mean
lengths.

    python -m bench.paper.prefix [--minutes 4] [--out DIR]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.paper import published, report
from bench.paper.device import OPT_13B
from bench.paper.latency import Curve, curve, publish_curves, simulated, sustained
from bench.paper.policies import Policy
from bench.paper.workload import poisson, translation

PREFIXES = (80, 341)
SYSTEMS = {  # policy, and whether prompts find cached prefixes
    "paged": (Policy.PAGED, True),
    "paged, no reuse": (Policy.PAGED, False),
    "oracle": (Policy.ORACLE, False),
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__, minutes=4)
    options = parser.parse_args(argv)
    rows: list[report.Row] = []
    for prefix in PREFIXES:
        pairs = translation(seed=options.seed)
        curves: dict[str, Curve] = {}
        for name, (policy, reuse) in SYSTEMS.items():
            curves[name] = curve(
                simulated(policy, OPT_13B, reuse=reuse),
                lambda rate, seconds, prefix=prefix, pairs=pairs: poisson(  # type: ignore[misc]
                    pairs, rate, seconds, options.seed, prefix=prefix
                ),
                60 * options.minutes,
                f"prefix {prefix} {name}",
            )
        for row in sustained(curves, "paged"):
            paper = f"{published.PREFIX[prefix]}x" if row["policy"] == "oracle" else ""
            rows.append({"prefix": prefix, **row, "paper": paper})
        title = f"shared prefix of {prefix} tokens (Fig. 16)"
        publish_curves(f"prefix-{prefix}", title, curves, options.out)
    report.publish("prefix", "Shared prefix, translation", rows, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
