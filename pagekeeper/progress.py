"""What a person sees while the server starts: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import re
import shutil
from typing import TextIO

BAR_CELLS = 24
PLAIN_STEP = 25  # per cent between two plain lines

_LOADING = re.compile(r"loading (?P<what>\S+) (?P<percent>\d{1,3})\s?%")


def loading(line: str) -> tuple[str, int] | None:
    """The name and per cent of a `loading NAME NN%` log line; None for any other line."""
    found = _LOADING.search(line)
    return (found["what"], min(int(found["percent"]), 100)) if found else None


def bar(percent: int) -> str:
    """A bar of `BAR_CELLS` cells."""
    full = percent * BAR_CELLS // 100
    return "█" * full + "░" * (BAR_CELLS - full)


class Progress:
    """Writes log lines and, below them on a terminal, one line that says what start-up waits for."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._live = out.isatty()
        self._status = ""  # the live line as shown now
        self._said = ""  # the last plain line, so that none is repeated

    def line(self, text: str) -> None:
        """Write one whole line above the live one."""
        self._erase()
        self._out.write(text + "\n")
        self._draw()
        self._out.flush()

    def stage(self, text: str) -> None:
        """Say what is waited for."""
        self._show(text, text)

    def loading(self, what: str, percent: int) -> None:
        """Say how far the model is."""
        rounded = percent - percent % PLAIN_STEP
        self._show(f"loading {what} {bar(percent)} {percent:3d} %", f"loading {what} {rounded} %")

    def done(self) -> None:
        """Remove the live line."""
        self._erase()
        self._status = ""
        self._out.flush()

    def _show(self, live: str, plain: str) -> None:
        if self._live:
            self._erase()
            self._status = live[: shutil.get_terminal_size().columns - 1]
            self._draw()
            self._out.flush()
        elif plain != self._said:
            self._said = plain
            self._out.write(plain + "\n")
            self._out.flush()

    def _erase(self) -> None:
        if self._live and self._status:
            self._out.write("\r\x1b[2K")

    def _draw(self) -> None:
        if self._live and self._status:
            self._out.write(self._status)
