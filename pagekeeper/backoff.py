"""How long to wait before a dead child is started again, and when to stop trying."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class Policy:
    """Times in seconds."""

    first: float = 0.2  # before the first restart; doubles with every further one
    most: float = 10.0
    healthy: float = 60.0  # a child that ran this long starts again at `first`
    attempts: int = 3  # starts of one child before start-up is given up


@dataclass(slots=True)
class Backoff:
    """Restart delays of one child; pure, the running times are passed in."""

    policy: Policy
    failures: int = field(default=0, init=False)  # in a row

    def died(self, ran: float) -> float:
        """Count a death after `ran` seconds; returns the seconds to wait before the next start."""
        if ran >= self.policy.healthy:
            self.failures = 0
        self.failures += 1
        # The exponent is bounded so that a child failing for days does not build huge numbers.
        doublings = min(self.failures - 1, 32)
        return min(self.policy.first * float(2**doublings), self.policy.most)

    @property
    def exhausted(self) -> bool:
        """Whether a child that has not come up yet has used all its attempts."""
        return self.failures >= self.policy.attempts
