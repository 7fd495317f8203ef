from __future__ import annotations

from tests.memd.driver import Driver
from wire.clock import PauseClock


class Wall:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_time_passes_as_on_the_wall_while_someone_looks_often() -> None:
    wall = Wall()
    clock = PauseClock(wall, limit=1.5)
    start = clock()
    for _ in range(100):
        wall.now += 0.1
        clock()
    assert abs(clock() - start - 10) < 1e-6
    assert clock.pauses == 0


def test_a_pause_takes_no_time_and_is_counted_once() -> None:
    wall = Wall()
    clock = PauseClock(wall, limit=1.5)
    before = clock()
    wall.now += 3600
    assert clock() == before
    assert clock() == before
    wall.now += 0.1
    assert abs(clock() - before - 0.1) < 1e-6
    assert clock.pauses == 1


def test_it_never_goes_back() -> None:
    wall = Wall()
    clock = PauseClock(wall, limit=1.5)
    last = clock()
    for gap in (0.1, 2.0, 0.0, 1.4999, 1e6, 0.1):
        wall.now += gap
        assert clock() >= last
        last = clock()


def test_a_lease_outlives_a_pause_of_memd_and_then_ends_if_nobody_renews_it() -> None:
    wall = Wall()
    clock = PauseClock(wall, limit=1.5)
    driver = Driver(lease_ms=3000)
    driver.now = clock()
    driver.register()
    driver.memory.tick(clock())  # the driver's first registration, replaced by this one
    wall.now += 60  # stopped; the executor's messages wait in the socket
    assert driver.memory.tick(clock()) == []
    for _ in range(31):
        wall.now += 0.1
        ended = driver.memory.tick(clock())
        if ended:
            break
    assert [lease.reason for lease in ended] == ["lease"]
