"""Who may still use a pool: one lease per registration, renewed by every valid message.

Times are seconds on the caller's monotonic clock; nothing here reads one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Reason = Literal["lease", "goodbye", "replaced"]


@dataclass(slots=True, frozen=True)
class Ended:
    """A registration that is over, and what went with it."""

    pool: str
    instance: str
    generation: int
    reason: Reason
    sequences: int  # live at the end
    used: int  # blocks referenced at the end


class Leases:
    """Deadlines by pool generation.

    Args:
        length: seconds a lease lives after its last renewal.
    """

    def __init__(self, length: float) -> None:
        self.length = length
        self._deadlines: dict[int, float] = {}

    def renew(self, generation: int, now: float) -> None:
        self._deadlines[generation] = now + self.length

    def alive(self, generation: int, now: float) -> bool:
        return now < self._deadlines[generation]

    def remaining(self, generation: int, now: float) -> float:
        """Seconds until the lease ends; 0 when it has."""
        return max(0.0, self._deadlines[generation] - now)

    def deadline(self, generation: int) -> float:
        return self._deadlines[generation]

    def end(self, generation: int) -> None:
        del self._deadlines[generation]

    def expired(self, now: float) -> list[int]:
        """Generations whose lease is over, in the order of registration."""
        return [name for name, deadline in self._deadlines.items() if now >= deadline]
