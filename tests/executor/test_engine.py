"""The step loop over real sockets, with memd's core behind it and a model whose text shows a wrong table."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from executor.engine import Wedged
from executor.memory import Idle, RemoteMemory
from executor.news import News
from executor.plan import Plan
from tests.executor.daemon import Daemon
from tests.executor.house import Gateway, House
from tests.fakes import VOCAB, oracle
from wire.errors import Code, Refused
from wire.generate import Failed
from wire.memory import PoolSpec
from wire.rpc import Dealer, Limits, ipc


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.close()
    house.local.core.check()


@pytest.fixture
def gateway(house: House) -> Iterator[Gateway]:
    gateway = Gateway(house)
    yield gateway
    gateway.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "memd.sock", lease_ms=1000)
    yield daemon
    daemon.kill()
    daemon.core.check()


@pytest.fixture
def remote(tmp_path: Path, daemon: Daemon) -> Iterator[tuple[House, Gateway]]:
    """An executor whose memd is behind a socket, running on a thread, and a gateway."""
    with Dealer(ipc(tmp_path / "memd.sock"), Limits()) as dealer:
        spec = PoolSpec("pool", "model", "none", 4, 201, 64)
        house = House(tmp_path, blocks=200, memory=RemoteMemory(dealer, uuid.uuid4().hex, spec))
        house.start()
        gateway = Gateway(house)
        yield house, gateway
        house.close()
        gateway.close()


def many(seed: int, count: int) -> list[tuple[list[int], int]]:
    draw = random.Random(seed)
    return [
        ([draw.randrange(1, VOCAB) for _ in range(draw.randint(1, 40))], draw.randint(1, 40))
        for _ in range(count)
    ]


def test_a_batch_in_a_pool_that_preempts_gives_the_texts_of_one_at_a_time(tmp_path: Path) -> None:
    house = House(tmp_path, blocks=40)
    gateway = Gateway(house)
    wanted = many(1, 16)
    for request, (prompt, most) in enumerate(wanted, 1):
        gateway.submit(request, prompt, most)
    gateway.await_(lambda: len(gateway.finished) == 16)
    for request, (prompt, most) in enumerate(wanted, 1):
        assert gateway.texts[request, 0] == oracle(prompt, 0, most)
    assert house.engine.status().preemptions > 0
    house.until(lambda: house.local.used() == 0)
    gateway.close()
    house.close()


def test_a_step_ends_only_after_the_tokens_before_it_went_out_and_memd_was_asked_for_the_next(
    house: House, gateway: Gateway
) -> None:
    def wait_for_both(plan: Plan) -> None:
        end = time.monotonic() + 20
        while len(house.local.asked) - plan.number < 1 or len(sent) < len(house.runner.plans) - 1:
            assert time.monotonic() < end, "the loop waits for the step first"
            time.sleep(0.001)

    sent: list[News] = []
    emit = house.server.emit

    def look(news: News, failed: list[tuple[bytes, Failed]]) -> None:
        emit(news, failed)
        sent.extend([news] if news else [])

    house.server.emit = look  # type: ignore[method-assign]
    house.runner.broken = wait_for_both
    gateway.submit(1, [1, 2], 20)
    gateway.await_(lambda: gateway.finished)
    assert gateway.texts[1, 0] == oracle([1, 2], 0, 20)
    assert house.runner.prepared == 20  # the next plan, while each was computed


def test_an_idle_executor_renews_its_lease_four_times_a_second(house: House) -> None:
    house.turn()
    before, started = len(house.local.asked), time.monotonic()
    while time.monotonic() - started < 1.1:
        house.turn()
    assert 3 <= len(house.local.asked) - before <= 5
    assert not any(house.local.asked[before:])


def test_status_counts_what_happened(house: House, gateway: Gateway) -> None:
    gateway.submit(1, list(range(1, 30)), 10, n=2)
    gateway.await_(lambda: len(gateway.finished) == 2)
    gateway.submit(2, list(range(1, 30)), 10)
    gateway.await_(lambda: (2, 0) in gateway.finished)
    house.until(lambda: not house.scheduler.busy)
    status = house.engine.status()
    assert (status.ready, status.reason, status.step_age_ms) == (True, "", 0)
    assert (status.prompt_tokens, status.generated_tokens) == (58, 30)
    assert (status.hit_tokens, status.query_tokens) == (28, 58)
    assert (status.running, status.waiting, status.blocks_total) == (0, 0, 4000)
    assert status.steps == house.engine.steps == len(house.runner.plans)


# ---------------------------------------------------------------- failures


class OutOfMemoryError(RuntimeError):
    """As torch names it."""


@pytest.mark.parametrize("error", [MemoryError(), OutOfMemoryError("CUDA out of memory")])
def test_a_step_without_memory_costs_its_largest_request_and_no_other(
    house: House, gateway: Gateway, error: Exception
) -> None:
    def once(plan: Plan) -> None:
        if len(house.runner.plans) == 5:
            raise error

    house.runner.broken = once
    for request in range(1, 6):
        gateway.submit(request, [request] * 5 * request, 20)
    gateway.await_(lambda: len(gateway.finished) == 4 and gateway.failed)
    assert list(gateway.failed) == [5]
    assert gateway.failed[5].code is Code.INTERNAL
    for request in range(1, 5):
        assert gateway.texts[request, 0] == oracle([request] * 5 * request, 0, 20)


def test_a_second_step_in_a_row_without_memory_ends_the_executor(
    house: House, gateway: Gateway
) -> None:
    def always(plan: Plan) -> None:
        raise MemoryError

    house.runner.broken = always
    house.start()
    gateway.submit(1, [1], 20)
    gateway.submit(2, [1, 2], 20)
    gateway.await_(lambda: len(gateway.failed) == 2)
    with pytest.raises(MemoryError):
        house.join()
    assert not house.local.core.pools  # said goodbye: memd has its blocks back at once


def test_an_error_of_a_step_ends_the_executor_and_tells_its_gateways(
    house: House, gateway: Gateway
) -> None:
    def bug(plan: Plan) -> None:
        raise ZeroDivisionError

    house.runner.broken = bug
    house.start()
    gateway.submit(1, [1], 20)
    gateway.await_(lambda: gateway.gone)
    assert gateway.failed[1].code is Code.UNAVAILABLE
    with pytest.raises(ZeroDivisionError):
        house.join()


def test_logits_that_are_not_numbers_fail_one_request(house: House, gateway: Gateway) -> None:
    house.runner.bad_draws = {1}
    gateway.submit(1, [1, 2], 8, n=2)
    gateway.submit(2, [1, 2], 8)
    gateway.await_(lambda: gateway.finished and gateway.failed)
    assert gateway.failed[1].code is Code.NOT_NUMBERS
    assert gateway.texts[2, 0] == oracle([1, 2], 0, 8)


def test_a_step_that_never_ends_ends_the_executor(tmp_path: Path) -> None:
    house = House(tmp_path, step_timeout=0.5)
    gateway = Gateway(house)
    house.runner.broken = lambda plan: time.sleep(2)
    house.start()
    gateway.submit(1, [1], 20)
    gateway.await_(lambda: gateway.failed)
    with pytest.raises(Wedged, match="limit is 0 s"):
        house.join()
    gateway.close()
    house.close()


def test_a_memd_that_will_not_have_this_executor_ends_it(house: House) -> None:
    def refuse(idle: Idle) -> None:
        raise Refused(Code.POOL_BUSY, "pool test is held")

    house.local.register = refuse  # type: ignore[method-assign]
    with pytest.raises(Refused, match="is held"):
        house.engine.run()


# ---------------------------------------------------------------- memd comes and goes


def test_memd_killed_half_way_is_registered_with_again_and_texts_come_out_right(
    remote: tuple[House, Gateway], daemon: Daemon
) -> None:
    house, gateway = remote
    wanted = many(2, 12)
    for request, (prompt, most) in enumerate(wanted, 1):
        gateway.submit(request, prompt, most + 40)
    for kill in range(3):
        gateway.await_(lambda kill=kill: len(gateway.events) > 10 * kill)  # type: ignore[misc]
        daemon.kill()
        time.sleep(0.05)
        daemon.start()
    gateway.await_(lambda: len(gateway.finished) == 12)
    for request, (prompt, most) in enumerate(wanted, 1):
        assert gateway.texts[request, 0] == oracle(prompt, 0, most + 40)
    assert daemon.core.epoch == 4
    house.until(lambda: daemon.used() == 0)


def test_while_memd_is_away_streams_pause_and_gateways_are_told(
    remote: tuple[House, Gateway], daemon: Daemon
) -> None:
    house, gateway = remote
    gateway.submit(1, [1, 2, 3], 100)
    gateway.await_(lambda: gateway.texts)
    daemon.kill()
    gateway.statuses.clear()  # one from before the executor was registered says the same
    gateway.await_(lambda: any("memory daemon" in status.reason for status in gateway.statuses))
    computed = house.engine.steps
    time.sleep(0.1)
    assert house.engine.steps == computed
    daemon.start()
    gateway.await_(lambda: gateway.finished)
    assert gateway.texts[1, 0] == oracle([1, 2, 3], 0, 100)
    assert not gateway.gone
    gateway.statuses.clear()
    gateway.await_(lambda: any(status.ready for status in gateway.statuses))


def test_a_step_longer_than_the_lease_loses_nothing_and_gateways_are_answered(
    remote: tuple[House, Gateway], daemon: Daemon
) -> None:
    house, gateway = remote

    def slow_once(plan: Plan) -> None:
        if len(house.runner.plans) == 3:
            gateway.statuses.clear()
            time.sleep(2.5)

    house.runner.broken = slow_once
    gateway.submit(1, [1, 2, 3], 6)
    gateway.await_(lambda: gateway.finished)
    assert gateway.texts[1, 0] == oracle([1, 2, 3], 0, 6)
    assert len(gateway.statuses) >= 3
    assert max(status.step_age_ms for status in gateway.statuses) > 1000
    assert len(house.runner.plans) == 6  # nothing was computed twice


# ---------------------------------------------------------------- the end


def test_draining_finishes_what_runs_and_refuses_what_is_new(
    house: House, gateway: Gateway
) -> None:
    house.runner.broken = lambda plan: time.sleep(0.005)  # slow enough for all that follows
    house.start()
    gateway.submit(1, [1], 300)
    gateway.await_(lambda: gateway.texts)
    house.engine.stop()
    gateway.await_(lambda: any(status.draining for status in gateway.statuses))
    gateway.submit(2, [2], 5)
    gateway.await_(lambda: gateway.finished and gateway.failed and gateway.gone)
    house.join()
    assert gateway.failed[2].code is Code.DRAINING
    assert gateway.texts[1, 0] == oracle([1], 0, 300)
    assert not house.local.core.pools


def test_what_a_drain_cannot_finish_in_time_fails(tmp_path: Path) -> None:
    house = House(tmp_path, drain_seconds=0.2)
    gateway = Gateway(house)
    house.start()
    gateway.submit(1, [1], 4000)
    gateway.await_(lambda: gateway.texts)
    house.runner.broken = lambda plan: time.sleep(0.01)
    house.engine.stop()
    gateway.await_(lambda: gateway.failed)
    house.join()
    assert gateway.failed[1].code is Code.UNAVAILABLE
    gateway.close()
    house.close()


def test_told_to_stop_twice_it_stops_at_once(house: House, gateway: Gateway) -> None:
    house.start()
    gateway.submit(1, [1], 4000)
    gateway.await_(lambda: gateway.texts)
    house.engine.stop()
    house.engine.stop()
    gateway.await_(lambda: gateway.failed)
    house.join()


def test_a_loop_that_ends_leaves_nothing_behind(tmp_path: Path) -> None:
    """Nor a token of it; its worker and its runner may be used by another one."""
    house = House(tmp_path, drain_seconds=0)
    gateway = Gateway(house)
    done: list[int] = []

    def slow(plan: Plan) -> None:
        time.sleep(0.05)
        done.append(plan.number)

    house.runner.broken = slow
    house.start()
    gateway.submit(1, [1], 300)
    gateway.await_(lambda: gateway.texts)
    house.engine.stop()
    house.join()
    assert done == [plan.number for plan in house.runner.plans]
    gateway.await_(lambda: gateway.gone)
    assert len(gateway.texts[1, 0]) == house.scheduler.counters.generated_tokens
    assert house.worker.call(lambda: 7, lambda: None, 1.0) == 7
    gateway.close()
    house.close()
