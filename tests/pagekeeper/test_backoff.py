from __future__ import annotations

from pagekeeper.backoff import Backoff, Policy


def test_delays_double_up_to_the_most() -> None:
    backoff = Backoff(Policy(first=0.2, most=10.0))
    assert [backoff.died(1.0) for _ in range(8)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]


def test_a_child_that_ran_healthily_starts_again_at_the_first_delay() -> None:
    backoff = Backoff(Policy(first=0.2, healthy=60.0))
    for _ in range(5):
        backoff.died(59.9)
    assert backoff.died(60.0) == 0.2
    assert backoff.died(0.0) == 0.4


def test_attempts_are_used_up_by_deaths_in_a_row() -> None:
    backoff = Backoff(Policy(attempts=3))
    assert [bool(backoff.died(0.1)) and backoff.exhausted for _ in range(3)] == [False, False, True]


def test_a_child_failing_for_ever_keeps_a_finite_delay() -> None:
    backoff = Backoff(Policy())
    assert max(backoff.died(0.0) for _ in range(5000)) == 10.0
