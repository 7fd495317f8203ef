"""A clock for leases and sessions that stands still while this process does.

When a process is stopped (SIGSTOP, a suspended or paused machine), what others sent to be counted alive
waits in its socket, unread. Judged by the wall, every lease and session would be over at the first look after
such a gap, and all would be cut off for the absence of the one who judges. So a gap between two looks that is
longer than a loop ever takes is left out: after it, each has as much time left as before.
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
