"""The device's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from executor.worker import Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def test_all_work_runs_on_one_thread_which_is_not_the_callers(worker: Worker) -> None:
    threads = {worker.call(threading.get_ident, lambda: None, 1.0) for _ in range(5)}
    assert len(threads) == 1
    assert threading.get_ident() not in threads


def test_the_caller_does_its_chores_while_work_takes_long(worker: Worker) -> None:
    chores: list[int] = []
    worker.call(lambda: time.sleep(0.3), lambda: chores.append(threading.get_ident()), 0.02)
    assert len(chores) >= 3
    assert set(chores) == {threading.get_ident()}


def test_what_work_raises_is_raised_to_the_caller_and_the_worker_goes_on(worker: Worker) -> None:
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 // 0, lambda: None, 1.0)
    assert worker.call(lambda: 7, lambda: None, 1.0) == 7


def test_a_chore_that_raises_ends_the_wait(worker: Worker) -> None:
    def give_up() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        worker.call(lambda: time.sleep(0.2), give_up, 0.01)


def test_what_follows_a_result_is_made_and_started_on_the_devices_thread(worker: Worker) -> None:
    """The caller may be anywhere: if it has to wake up first, the device waits for it."""
    threads: list[int] = []

    def then(result: int) -> Callable[[], int] | None:
        threads.append(threading.get_ident())
        return (lambda: result + 1) if result < 3 else None

    gate = threading.Event()
    threading.Timer(0.05, gate.set).start()
    worker.start(lambda: gate.wait(5) and 1)
    for _ in range(3):
        worker.wait(then, lambda: None, 1.0)
    assert threads[0] == worker.call(threading.get_ident, lambda: None, 1.0)
    assert len(threads) == 3


def test_a_result_that_came_before_the_wait_is_not_lost(worker: Worker) -> None:
    results: list[int] = []
    worker.start(lambda: 1)
    time.sleep(0.05)
    worker.wait(lambda result: lambda: results.append(result), lambda: None, 1.0)
    worker.wait(results.append, lambda: None, 1.0)
    assert results == [1, None]


def test_chores_and_what_follows_a_result_never_run_side_by_side(worker: Worker) -> None:
    inside: list[str] = []
    seen: list[tuple[str, ...]] = []

    def busy(name: str, seconds: float) -> None:
        inside.append(name)
        seen.append(tuple(inside))
        time.sleep(seconds)
        inside.remove(name)

    for milliseconds in [0, 1, 2, 3] * 8:
        worker.start(partial(time.sleep, milliseconds / 1000))
        worker.wait(lambda _: busy("then", 0.004), lambda: busy("chore", 0.001), 0.001)
    assert set(seen) == {("then",), ("chore",)}


def test_after_a_chore_raised_nothing_follows_the_result(worker: Worker) -> None:
    followed: list[object] = []

    def give_up() -> None:
        raise TimeoutError

    worker.start(lambda: time.sleep(0.05))
    with pytest.raises(TimeoutError):
        worker.wait(followed.append, give_up, 0.01)
    time.sleep(0.1)
    assert not followed


def test_what_raises_after_a_result_is_raised_to_the_caller(worker: Worker) -> None:
    worker.start(lambda: time.sleep(0.01))
    with pytest.raises(ZeroDivisionError):
        worker.wait(lambda _: 1 // 0, lambda: None, 1.0)  # type: ignore[arg-type, return-value]
    assert worker.call(lambda: 7, lambda: None, 1.0) == 7
