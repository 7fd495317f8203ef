"""Fig. 17: chat with history, OPT-13B: prompts of up to 1,024 tokens of the conversation so far.

As in the paper nothing is kept between rounds, so memory policy is all that differs; a server that does
keep prefixes gains more. In the paper most prompts have all 1,024 tokens, so that a region that also holds
an output is one of 2,048. The snapshot at hand cuts long conversations into pieces, and 40 % of its turns
have as much history: `--full` takes only those.

    python -m bench.paper.chat [--full] [--minutes 10] [--out DIR]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.paper import published, report
from bench.paper.device import OPT_13B
from bench.paper.latency import Curve, curve, publish_curves, simulated, sustained
from bench.paper.policies import Policy
from bench.paper.workload import CHAT_PROMPT, chat, poisson


def main(argv: Sequence[str] | None = None) -> int:
    parser = report.parser(__doc__, minutes=10)
    parser.add_argument("--full", action="store_true", help="only prompts of 1,024 tokens")
    options = parser.parse_args(argv)
    pairs = [pair for pair in chat() if pair[0] == CHAT_PROMPT or not options.full]
    name = "chat-full" if options.full else "chat"
    curves: dict[str, Curve] = {}
    for policy in Policy:
        curves[policy.value] = curve(
            simulated(policy, OPT_13B),
            lambda rate, seconds: poisson(pairs, rate, seconds, options.seed),
            60 * options.minutes,
            f"{name} {policy.value}",
        )
    rows = sustained(curves, "paged")
    for row in rows:
        row["paper"] = f"{published.CHAT}x" if row["policy"] != "paged" else ""
    publish_curves(name, "chat with history, OPT-13B (Fig. 17)", curves, options.out)
    report.publish(f"{name}-sustained", "Rate at equal latency", rows, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
