"""Fig. 15a: blocks saved by sharing the prompt among parallel samples of one request, OPT-13B.

Saved is 1 - (distinct blocks / blocks named in tables), over the requests that run. The paper also has beam
search, which this server does not offer.

    python -m bench.paper.sharing [--minutes 4] [--out DIR]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from bench.paper import published, report
from bench.paper.device import OPT_13B
from bench.paper.play import simulate
from bench.paper.policies import Policy
from bench.paper.workload import poisson

CHOICES = (2, 4, 6)
RATES = {"alpaca": 24.0, "sharegpt": 1.6}  # requests/s of one choice; with n choices 1/n of it
WARM = 30.0  # seconds


def main(argv: Sequence[str] | None = None) -> int:
    options = report.parser(__doc__, minutes=4).parse_args(argv)
    rows: list[dict[str, object]] = []
    for dataset, rate in RATES.items():
        pairs = report.lengths(dataset, options)
        for choices in CHOICES:
            seconds = 60 * options.minutes
            requests = poisson(pairs, rate / choices, seconds, options.seed, choices=choices)
            outcome = simulate(
                requests,
                Policy.PAGED,
                OPT_13B,
                warm=min(WARM, seconds / 4),
                end=seconds,
                progress=f"{dataset} n={choices}",
            )
            paper = str(published.SAVED[choices])
            if dataset == "sharegpt":
                paper = "{}-{}".format(*published.SAVED_SHAREGPT)
            saved = 100 * outcome.mean_saved
            rows.append({"data": dataset, "choices": choices, "saved %": saved, "paper %": paper})
    report.publish("sharing", "Blocks saved by parallel sampling", rows, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
