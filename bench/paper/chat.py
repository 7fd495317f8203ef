"""Fig. 17: chat with history, OPT-13B: prompts of up to 1,024 tokens of the conversation so far.

As in the paper nothing is kept between rounds, so memory policy is all that differs; a server that does keep
prefixes gains more (`bench.serve` measures that).

    python -m bench.paper.chat [--minutes 10] [--out DIR]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.paper import published, report
from bench.paper.device import OPT_13B
from bench.paper.latency import Curve, curve, draw_curves, simulated, sustained
from bench.paper.policies import Policy
from bench.paper.workload import chat, poisson


def main(argv: Sequence[str] | None = None) -> int:
    options = report.parser(__doc__, minutes=10).parse_args(argv)
    pairs = chat()
    curves: dict[str, Curve] = {}
    for policy in Policy:
        curves[policy.value] = curve(
            simulated(policy, OPT_13B),
            lambda rate, seconds: poisson(pairs, rate, seconds, options.seed),
            60 * options.minutes,
            f"chat {policy.value}",
        )
    rows = sustained(curves, "paged")
    for row in rows:
        row["paper"] = f"{published.CHAT}x" if row["policy"] != "paged" else ""
    report.publish("chat", "Chat with history, OPT-13B", rows, options.out)
    draw_curves(curves, "chat with history, OPT-13B (Fig. 17)", "paper-chat", options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
