"""Stop strings over a stream of text: what may be shown now, what must wait, where it ends.

A stop string may arrive in pieces, so text that could be the beginning of one is held back until it is
either completed (and cut) or refuted (and released). Each stop string is matched by a Knuth-Morris-Pratt
automaton fed one character at a time: its state is exactly the number of characters to hold, and the result
does not depend on how the text was split.

The stop string that is completed first ends the text; of two completed by the same character, the longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Scanned:
    """What one piece of text brought."""

    text: str  # may be shown now
    stop: str | None = None  # the stop string that ended the text; nothing may follow


class _Matcher:
    """How much of one stop string the text read so far ends with."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        # _fallback[k]: length of the longest proper prefix of stop that is a suffix of stop[:k].
        self._fallback = [0, 0]
        k = 0
        for char in stop[1:]:
            while k and stop[k] != char:
                k = self._fallback[k]
            k += stop[k] == char
            self._fallback.append(k)

    def advance(self, char: str) -> bool:
        """Read one character; True when the stop string is complete. Not to be called after that."""
        k = self.matched
        while k and self.stop[k] != char:
            k = self._fallback[k]
        self.matched = k + (self.stop[k] == char)
        return self.matched == len(self.stop)


class StopScanner:
    """Finds the first stop string in text that comes in pieces.

    Args:
        stops: non-empty strings; an empty sequence lets everything through.
        include: whether the stop string itself is shown.
    """

    __slots__ = ("_held", "_include", "_matchers")

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._matchers = [_Matcher(stop) for stop in stops]
        self._include = include
        self._held = ""

    def feed(self, text: str) -> Scanned:
        """Take the next piece of text. After a `stop` nothing more may be fed."""
        if not self._matchers:
            return Scanned(text)
        waiting = self._held + text
        for at, char in enumerate(text, len(self._held) + 1):
            # Every automaton must read every character, so no short-circuit here.
            complete = [matcher.stop for matcher in self._matchers if matcher.advance(char)]
            if complete:
                stop = max(complete, key=len)
                self._held = ""
                return Scanned(waiting[: at if self._include else at - len(stop)], stop)
        shown = len(waiting) - max(matcher.matched for matcher in self._matchers)
        self._held = waiting[shown:]
        return Scanned(waiting[:shown])

    def skip(self, text: str) -> str:
        """Let a piece through that may not end the text (before min_tokens); returns what is shown now."""
        shown, self._held = self._held + text, ""
        for matcher in self._matchers:
            matcher.matched = 0
        return shown

    def release(self) -> str:
        """The text ended otherwise: what was held back is text after all."""
        held, self._held = self._held, ""
        return held
