"""The client of memd over a real socket: lost, repeated and late answers, restarts, leases."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.memory import Fenced, RemoteMemory
from executor.proposal import Wants
from executor.request import pack
from tests.executor.daemon import Daemon
from wire.errors import Code, Refused
from wire.memory import Admit, Append, PoolSpec, Step
from wire.rpc import Dealer, Limits, ipc


def idle() -> None:
    """Nothing else to do."""


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "memd.sock", lease_ms=800)
    yield daemon
    daemon.kill()
    daemon.core.check()


def client(path: Path, name: str = "pool") -> tuple[RemoteMemory, Dealer]:
    dealer = Dealer(ipc(path / "memd.sock"), Limits())
    spec = PoolSpec(name, "model", "float32", 4, 11, 64)
    return RemoteMemory(dealer, uuid.uuid4().hex, spec), dealer


@pytest.fixture
def memory(tmp_path: Path, daemon: Daemon) -> Iterator[RemoteMemory]:
    memory, dealer = client(tmp_path)
    with dealer:
        memory.register(idle)
        yield memory


def admit(seq: int, count: int) -> Wants:
    return Wants(admits=[Admit(seq, pack(list(range(count))), 512)])


def test_a_step_is_answered(memory: RemoteMemory) -> None:
    memory.ask(admit(1, 6))
    granted = memory.answer(idle)
    assert (granted.number, granted.usage.used, len(granted.admitted[0].blocks)) == (1, 2, 2)
    assert memory.waited_us > 0
    assert not memory.stale()


def test_registration_waits_for_a_memd_that_is_not_there_yet(tmp_path: Path) -> None:
    memory, dealer = client(tmp_path)
    calls = []
    started: list[Daemon] = []
    timer = threading.Timer(0.3, lambda: started.append(Daemon(tmp_path / "memd.sock")))
    with dealer:
        timer.start()
        memory.register(lambda: calls.append(1))
        memory.ask(admit(1, 1))
        assert memory.answer(idle).number == 1
    timer.join()
    started[0].kill()
    assert calls  # gateways were answered meanwhile


def test_what_the_idle_call_raises_ends_the_wait(tmp_path: Path) -> None:
    memory, dealer = client(tmp_path)

    def stop() -> None:
        raise InterruptedError

    with dealer, pytest.raises(InterruptedError):
        memory.register(stop)


def test_a_pool_held_by_an_executor_that_died_is_taken_when_its_lease_ends(
    tmp_path: Path, memory: RemoteMemory
) -> None:
    other, dealer = client(tmp_path)
    with dealer:
        started = time.monotonic()
        other.register(idle)
        assert 0.1 < time.monotonic() - started < 5


def test_a_pool_held_by_a_living_executor_is_refused_in_the_end(
    tmp_path: Path, memory: RemoteMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executor.memory.BUSY_LEASES", 0.2)
    other, dealer = client(tmp_path)
    stop = threading.Event()

    def live() -> None:
        while not stop.is_set():
            memory.ask(Wants())
            memory.answer(idle)
            time.sleep(0.05)

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with dealer, pytest.raises(Refused) as caught:
            other.register(idle)
    finally:
        stop.set()
        thread.join()
    assert caught.value.code is Code.POOL_BUSY


def test_a_lost_answer_is_asked_for_again_and_the_step_has_one_effect(
    memory: RemoteMemory, daemon: Daemon
) -> None:
    seen = len(daemon.handled)
    daemon.answers = lambda request, count: 0 if count == seen + 1 else 1
    memory.ask(admit(1, 6))
    granted = memory.answer(idle)
    assert [admitted.seq for admitted in granted.admitted] == [1]
    steps = [request for request in daemon.handled if isinstance(request, Step)]
    assert [step.number for step in steps] == [1, 1]
    assert daemon.used() == 2


def test_answers_that_come_twice_or_late_are_not_taken_for_later_ones(
    memory: RemoteMemory, daemon: Daemon
) -> None:
    daemon.answers = lambda request, count: 3
    for number in range(1, 6):
        memory.ask(admit(number, 1))
        granted = memory.answer(idle)
        assert granted.number == number
        assert [entry.seq for entry in granted.admitted] == [number]


def test_an_answer_heard_beside_a_step_is_given_once(memory: RemoteMemory) -> None:
    for number in (1, 2):
        memory.ask(admit(number, 1))
        heard = memory.hear(5000)
        assert heard is not None
        assert heard.number == number


def test_an_answer_that_is_not_heard_beside_a_step_is_waited_for_after_it(
    memory: RemoteMemory, daemon: Daemon
) -> None:
    seen = len(daemon.handled)
    daemon.answers = lambda request, count: 0 if count == seen + 1 else 1
    memory.ask(admit(1, 1))
    assert memory.hear(1) is None
    assert memory.answer(idle).number == 1


def test_what_is_heard_of_an_earlier_step_is_not_taken_for_the_answer(
    memory: RemoteMemory, daemon: Daemon
) -> None:
    daemon.answers = lambda request, count: 2
    for number in range(1, 9):
        memory.ask(admit(number, 1))
        granted = memory.hear(5000) or memory.answer(idle)
        assert granted.number == number


def test_a_loss_that_is_heard_of_beside_a_step_is_told_by_the_answer(
    memory: RemoteMemory, daemon: Daemon
) -> None:
    memory.ask(admit(1, 6))
    memory.answer(idle)
    time.sleep(0.9)
    memory.ask(Wants())
    assert memory.hear(5000) is None
    seen = len(daemon.handled)
    with pytest.raises(Fenced, match="no lease"):
        memory.answer(idle)
    assert len(daemon.handled) == seen  # it was not asked again


def test_a_memd_that_restarts_fences_and_takes_a_new_registration(
    memory: RemoteMemory, daemon: Daemon
) -> None:
    memory.ask(admit(1, 6))
    memory.answer(idle)
    daemon.kill()
    memory.ask(Wants(appends=[Append(1, 9)]))
    daemon.start()
    with pytest.raises(Fenced, match="epoch 1 became 2"):
        memory.answer(idle)
    memory.register(idle)
    memory.ask(admit(2, 6))
    assert memory.answer(idle).epoch == 2


def test_a_lease_that_ran_out_fences(memory: RemoteMemory, daemon: Daemon) -> None:
    memory.ask(admit(1, 6))
    memory.answer(idle)
    time.sleep(0.9)
    assert memory.stale()
    memory.ask(Wants())
    with pytest.raises(Fenced, match="no lease"):
        memory.answer(idle)
    assert daemon.used() == 0


def test_a_step_longer_than_the_lease_is_survived_by_renewing_it(
    memory: RemoteMemory, daemon: Daemon
) -> None:
    memory.ask(admit(1, 6))
    memory.answer(idle)
    memory.ask(Wants(appends=[Append(1, 9)]))
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        time.sleep(0.02)
        memory.renew()
    assert not memory.stale()
    assert memory.answer(idle).number == 2
    memory.ask(Wants(appends=[Append(1, 13)]))
    assert memory.answer(idle).number == 3
    assert daemon.used() == 4


def test_a_step_memd_finds_wrong_fences_too(memory: RemoteMemory) -> None:
    memory.ask(Wants(appends=[Append(77, 9)]))
    with pytest.raises(Fenced, match="77"):
        memory.answer(idle)


def test_saying_goodbye_gives_everything_back_at_once(memory: RemoteMemory, daemon: Daemon) -> None:
    memory.ask(admit(1, 6))
    memory.answer(idle)
    memory.close()
    until = time.monotonic() + 0.6  # less than the lease
    while daemon.core.pools and time.monotonic() < until:
        time.sleep(0.01)
    assert not daemon.core.pools


def test_an_answer_too_large_for_the_socket_costs_a_registration_not_the_service(
    tmp_path: Path, daemon: Daemon
) -> None:
    """libzmq drops the connection at an oversize frame and does not come back by itself."""
    dealer = Dealer(ipc(tmp_path / "memd.sock"), Limits(max_message=400))
    spec = PoolSpec("pool", "model", "float32", 1, 2000, 64)
    memory = RemoteMemory(dealer, uuid.uuid4().hex, spec)
    with dealer:
        memory.register(idle)
        memory.ask(admit(1, 500))  # 500 block ids come back
        with pytest.raises(Fenced):
            memory.answer(idle)
        memory.register(idle)
        memory.ask(admit(2, 5))
        assert len(memory.answer(idle).admitted[0].blocks) == 5
