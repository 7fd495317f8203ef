"""Cases drawn from public bug reports of other servers, played on the core (CASES 5, 14 to 17, 22 and 23)."""

from __future__ import annotations

from itertools import permutations

import pytest

from tests.memd.driver import OTHER, Driver, memory, pack
from tests.memd.naive import Naive
from wire.errors import Code, Refused
from wire.memory import Admit, Append, Change, Commit, Copy, Fork


def test_four_choices_share_three_and_a_half_blocks_with_at_most_three_copies() -> None:
    """vllm#10980, and section 4.4 of the PagedAttention paper."""
    one = Driver(40)
    one.admit(1, range(14))
    reply = one.step(
        forks=[Fork(1, child, 14) for child in (2, 3, 4)],
        appends=[Append(seq, 15) for seq in (1, 2, 3, 4)],
    )
    assert reply.copies == [Copy(4, 5), Copy(4, 6), Copy(4, 7)]
    one.commit(1, 14)
    assert [one.pool.refs[block] for block in (1, 2, 3)] == [4, 4, 4]
    assert [one.pool.refs[block] for block in (4, 5, 6, 7)] == [1, 1, 1, 1]
    one.free(1, 2, 3, 4)
    assert one.pool.counts().used == 0
    assert (one.pool.counts().cached, one.pool.counts().free) == (3, 36)


def test_a_childs_table_in_the_reply_is_the_parents_before_its_own_copy_on_write() -> None:
    one = Driver(40)
    one.admit(1, range(6))
    reply = one.step(forks=[Fork(1, 2, 6)], appends=[Append(1, 7)])
    assert reply.changes == [Change(2, 0, [1, 2]), Change(1, 1, [3])]
    assert one.table(2) == [1, 2]


@pytest.mark.parametrize("order", list(permutations((1, 2))))
def test_two_equal_prompts_of_one_step_freed_in_either_order_leave_a_valid_index(
    order: tuple[int, int],
) -> None:
    """nano-vllm#243."""
    one = Driver()
    one.step(admits=[Admit(1, pack(range(8)), 8), Admit(2, pack(range(8)), 8)])
    one.step(commits=[Commit(1, 8), Commit(2, 8)])
    one.free(order[0])
    assert one.admit(3, range(9)).admitted[0].computed == 8
    one.free(3)
    one.free(order[1])
    assert one.admit(4, range(9)).admitted[0].computed == 8
    one.free(4)
    counts = one.pool.counts()
    assert (counts.free, counts.cached, counts.used) == (8, 2, 0)


def test_equal_hashes_of_different_tokens_are_a_miss() -> None:
    """openvino.genai#3722. With one bit of hash, two contents fill the index and every other is private."""
    naive = Naive(Driver(40, 4, under=memory(hash_bits=1)), exact_hash=False)
    for first in range(30):
        naive.admit([first] * 4 + [7], 1 << 20)
        naive.send()
        (seq,) = naive.seqs.values()
        naive.commit(seq, 5, 0)
        naive.free(seq)
        naive.send()
    assert naive.pool.counters.seals == 2


def test_ids_that_are_equal_in_their_low_byte_never_match() -> None:
    """vllm-mlx#444: 65 and 321."""
    one = Driver()
    one.cached([65, 65, 65, 65], 1)
    assert one.admit(2, [321, 65, 65, 65, 1]).admitted[0].computed == 0
    assert one.admit(3, [65, 321, 65, 65, 1]).admitted[0].computed == 1


@pytest.mark.parametrize("order", list(permutations((1, 2))))
def test_fork_append_both_free_both_costs_one_copy_and_one_write_in_place(
    order: tuple[int, int],
) -> None:
    """vllm#1584, vllm#3347."""
    one = Driver()
    one.admit(1, range(6))
    one.fork(1, 2, 6)
    reply = one.step(appends=[Append(2, 7), Append(1, 7)])
    assert reply.copies == [Copy(2, 3)]
    assert reply.changes == [Change(2, 1, [3])]
    for seq in order:
        one.free(seq)
    assert not any(one.pool.refs)
    assert one.rejected(frees=[1, 1]).code == Code.DUPLICATE
    one.free(1, 2)
    assert sorted(one.pool.free) == [1, 2, 3]


def test_allocating_past_the_free_list_takes_the_older_tail_and_spares_a_touched_prefix() -> None:
    """vllm#4761, vllm#16825."""
    one = Driver(8)
    assert one.cached([1] * 12, 1) == [1, 2, 3]
    assert one.cached([2] * 12, 2) == [4, 5, 6]
    one.admit(3, [1] * 9)
    one.free(3)  # touched: the first two of the first chain
    assert one.admit(4, [9] * 12).admitted[0].blocks == [7, 3, 6]
    one.free(4)
    assert one.admit(5, [1] * 13).admitted[0].computed == 8
    assert one.admit(6, [2] * 13, chunk=1).admitted[0].computed == 8


def test_an_aborted_prompt_leaves_only_what_was_committed() -> None:
    """vllm#27073, vllm#9428: a hundred aborts at every stage do not move the count of used blocks."""
    one = Driver(40)
    for seq in range(1, 101):
        one.admit(seq, [seq] * 9, chunk=1 + seq % 9)
        if seq % 3:
            one.step(appends=[Append(seq, 9)])
        if seq % 2:
            one.free(seq)
        else:
            one.step(frees=[seq], admits=[Admit(1000 + seq, pack([1]), 1)])
            one.free(1000 + seq)
    assert one.pool.counts().used == 0
    assert one.pool.counts().free == 39


def test_an_executor_that_dies_after_its_lookup_holds_no_block_beyond_its_lease() -> None:
    """CASES 22; vllm#44100. Here a hit is a reference from the same step on, so it ends with the lease."""
    one = Driver()
    one.cached(range(8), 1)
    assert (
        one.admit(2, range(9)).admitted[0].computed == 8
    )  # hit, and then nothing is heard of it again
    assert one.pool.counts().used == 3
    assert not one.memory.tick(one.now + 2.9)
    (ended,) = one.memory.tick(one.now + 3.1)
    assert (ended.reason, ended.sequences, ended.used) == ("lease", 1, 3)
    assert not one.memory.pools
    two = Driver(under=one.memory, instance=OTHER)
    two.now = one.now + 4
    two.register()
    assert two.pool.counts().used == 0


def test_a_cache_in_use_is_not_reset_and_an_idle_one_is_cold_afterwards() -> None:
    """CASES 23; vllm#28827."""
    one = Driver()
    one.cached(range(8), 1)
    one.admit(2, range(9))
    before = one.memory.digest()
    with pytest.raises(Refused, match="1 live sequences"):
        one.memory.reset_cache("p")
    assert one.memory.digest() == before
    one.free(2)
    assert one.memory.reset_cache("p") == 2
    assert one.admit(3, range(9)).admitted[0].computed == 0
