"""The device's thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

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
