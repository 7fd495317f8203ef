"""Prints what pyproject.toml asks for, one requirement a line: `python requirements.py PYPROJECT [EXTRA…]`.

An image installs these in a layer of their own, which is kept while only the code changes.
"""

from __future__ import annotations

import sys
import tomllib


def requirements(pyproject: bytes, extras: list[str]) -> list[str]:
    """The project's own requirements and those of `extras`, in file order.

    Raises:
        KeyError: an extra that is not there.
    """
    project = tomllib.loads(pyproject.decode())["project"]
    found: list[str] = list(project["dependencies"])
    for extra in extras:
        found += project["optional-dependencies"][extra]
    return found


if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        print("\n".join(requirements(file.read(), sys.argv[2:])))
