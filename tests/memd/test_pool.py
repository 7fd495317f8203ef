"""Blocks: which are handed out in which order, pins, reserves, and a reset of the cache."""

from __future__ import annotations

import gc

import pytest

from tests.memd.driver import Driver, memory, pack
from wire.errors import Code, Refused
from wire.memory import Admit, Commit


def test_new_blocks_go_out_in_order_and_freed_ones_come_back_head_first() -> None:
    one = Driver()
    assert one.admit(1, [1] * 12).admitted[0].blocks == [1, 2, 3]
    assert one.admit(2, [2] * 8).admitted[0].blocks == [4, 5]
    one.free(1)  # nothing was committed: free, not cached
    assert one.admit(3, [3] * 16).admitted[0].blocks == [1, 2, 3, 6]


def test_a_blocks_own_generation_rises_each_time_it_is_handed_out() -> None:
    one = Driver(3)
    for seq in range(1, 6):
        one.admit(seq, [seq] * 8)
        assert one.pool.grants[1:] == [seq, seq]
        one.commit(seq, 8)
        one.free(seq)


def test_a_reset_makes_an_idle_pool_cold_and_is_refused_on_a_busy_one() -> None:
    one = Driver()
    one.cached(range(8), 1)
    one.admit(2, [5])
    with pytest.raises(Refused) as refused:
        one.memory.reset_cache("p")
    assert refused.value.code == Code.POOL_BUSY
    one.free(2)
    assert one.memory.reset_cache("p") == 2
    one.memory.check()
    assert one.pool.counts().free == 10
    assert one.admit(3, range(9)).admitted[0].computed == 0


def test_two_pins_of_one_block_need_two_unpins() -> None:
    one = Driver(3)
    (first, second) = one.cached(range(8), 1)
    one.memory.pin("p", second)
    one.memory.pin("p", second)
    one.memory.pin("p", first)
    one.memory.check()
    one.memory.unpin("p", second)
    assert one.admit(2, [9] * 8).refused
    one.memory.unpin("p", second)
    one.memory.check()
    assert one.pool.refs[first] == 1  # its own pin
    assert one.admit(3, [9] * 4).admitted[0].blocks == [second]
    with pytest.raises(Refused):
        one.memory.unpin("p", second)


def test_a_tenant_may_evict_its_own_reserve() -> None:
    one = Driver(reserves={"red": 0.5})
    for seq, tenant in ((1, "red"), (2, "")):
        one.admit(seq, [seq] * 20, tenant=tenant)
        one.commit(seq, 20)
        one.free(seq)
    one.admit(3, [3] * 40, tenant="red")
    assert sorted(one.table(3)) == list(range(1, 11))


def test_the_oldest_goes_first_across_tenants() -> None:
    one = Driver(reserves={"red": 0.1})
    for seq, tenant in ((1, ""), (2, "red"), (3, ""), (4, "red")):
        one.admit(seq, [seq] * 8, tenant=tenant)
        one.commit(seq, 8)
        one.free(seq)
    blocks = one.admit(5, [9] * 36).admitted[0].blocks
    assert blocks == [9, 10, 2, 1, 4, 3, 6, 5, 8]  # red keeps one: the head of its younger chain


@pytest.mark.parametrize("shares", [{"a": 0.5, "b": 0.5}, {"a": -0.1}, {"a": 1.0}])
def test_shares_that_leave_nothing_or_make_no_sense_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="shares must be"):
        memory(reserves=shares)


def test_reserves_hold_while_two_tenants_admit_in_one_step() -> None:
    one = Driver(reserves={"red": 0.3})
    one.step(admits=[Admit(1, pack([1] * 12), 12, tenant="red")])
    one.step(commits=[Commit(1, 12)])
    one.free(1)
    reply = one.step(
        admits=[
            Admit(2, pack([2] * 28), 28),
            Admit(3, pack([3] * 4), 4, tenant="red"),
        ]
    )
    assert not reply.refused
    assert one.table(3) == [3]


def test_finished_sequences_and_evicted_blocks_leave_no_cycles_to_collect() -> None:
    """memd's server runs Python's collector only when a pool ends."""
    one = Driver(6)
    gc.collect()
    gc.disable()
    try:
        for seq in range(1, 200, 2):
            one.admit(seq, [seq % 5] * 9, tenant=str(seq % 3))
            one.commit(seq, 9)
            one.fork(seq, seq + 1, 7)
            one.free(seq, seq + 1)
        assert one.pool.counters.evictions > 50
        assert gc.collect() == 0
    finally:
        gc.enable()
