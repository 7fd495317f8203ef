"""The PagedAttention paper's evaluation, with this server's scheduler and memd's core.

python -m bench.paper all --out DIR          everything, one after the other
python -m bench.paper simulated --out DIR    all but what runs a model
python -m bench.paper NAME [its options]     one of: batched latency prefix chat blocks sharing real
"""

from __future__ import annotations

import sys

from bench.paper import batched, blocks, chat, latency, prefix, real, sharing

EXPERIMENTS = {
    "batched": batched.main,
    "latency": latency.main,
    "prefix": prefix.main,
    "chat": chat.main,
    "blocks": blocks.main,
    "sharing": sharing.main,
    "real": real.main,
}


def main() -> int:
    name, arguments = (sys.argv[1] if len(sys.argv) > 1 else "--help"), sys.argv[2:]
    if name in ("-h", "--help"):
        print(__doc__)
        return 0
    if name in EXPERIMENTS:
        return EXPERIMENTS[name](arguments)
    if name not in ("all", "simulated"):
        print(
            f"{name} is no experiment; there are: all simulated {' '.join(EXPERIMENTS)}",
            file=sys.stderr,
        )
        return 2
    for experiment, run in EXPERIMENTS.items():
        if name == "all" or experiment != "real":
            print(f"\n# {experiment}")
            run(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
