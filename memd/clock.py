"""A clock for leases that stands still while this process does.

When memd is stopped (SIGSTOP, a suspended or paused machine), the messages that renewed leases wait in its
socket, unread. Judged by the wall, every lease would be over at the first look after such a gap, and every
executor would lose its blocks for memd's absence. So a gap between two looks that is longer than the loop
ever takes is left out: after it, each lease has as much time left as before.
"""

from __future__ import annotations

from collections.abc import Callable


class PauseClock:
    """Seconds that this process has been running; never goes back.

    Args:
        monotonic: the real clock, in seconds.
        limit: a gap between two looks longer than this was a pause. Look far more often than that.
    """

    def __init__(self, monotonic: Callable[[], float], limit: float) -> None:
        self._monotonic = monotonic
        self._limit = limit
        self._last = monotonic()
        self._left_out = 0.0
        self.pauses = 0

    def __call__(self) -> float:
        now = self._monotonic()
        gap = now - self._last
        if gap > self._limit:
            self._left_out += gap
            self.pauses += 1
        self._last = now
        return now - self._left_out
