"""The command line: `pagekeeper up`, `pagekeeper status`, `pagekeeper down`."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence

from pagekeeper.config import load_at, load_up

USAGE = """usage: pagekeeper COMMAND [FLAGS]

  up      start memd, executor and gateway, and keep them running until Ctrl-C
  status  show what runs and what is in memory
  down    stop a server started with `up`

`pagekeeper --version` prints the version.
`pagekeeper COMMAND --help` lists the flags; each has a PAGEKEEPER_… environment twin."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    match arguments:
        case ["up", *rest]:
            from pagekeeper.up import up

            return up(load_up(rest))
        case ["status", *rest]:
            from pagekeeper.status import status

            return status(load_at(rest, "status", "Show what runs and what is in memory."))
        case ["down", *rest]:
            from pagekeeper.status import down

            return down(load_at(rest, "down", "Stop a server started with `pagekeeper up`."))
        case ["--version" | "-V" | "version"]:
            print(f"pagekeeper {_version()}")
            return 0
        case ["-h" | "--help" | "help"]:
            print(USAGE)
            return 0
        case _:
            print(USAGE, file=sys.stderr)
            return 2


def _version() -> str:
    try:
        return importlib.metadata.version("pagekeeper")
    except importlib.metadata.PackageNotFoundError:
        return "unknown: this is a source tree that is not installed"


if __name__ == "__main__":
    raise SystemExit(main())
