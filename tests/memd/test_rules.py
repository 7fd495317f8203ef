"""The twelve rules of memory, each by an example; `Memory.check` verifies them in every other test too."""

from __future__ import annotations

import pytest

from memd.invariants import Broken
from memd.journal import replay
from tests.memd.driver import Driver, memory, pack
from wire.errors import Code, Refused
from wire.memory import Admit, Append, Change, Commit, Copy, Fork, Refusal


def states(driver: Driver) -> tuple[int, int, int, int]:
    counts = driver.pool.counts()
    return counts.free, counts.cached, counts.used, counts.quarantined


# ---------------------------------------------------------------- 1: states partition the pool


def test_rule_1_every_block_is_free_cached_used_or_quarantined() -> None:
    one = Driver()
    assert states(one) == (10, 0, 0, 0)
    one.cached(range(8), 1)
    assert states(one) == (8, 2, 0, 0)
    one.admit(2, range(8))  # one whole block, seven tokens: the second is copied
    assert states(one) == (7, 0, 2, 1)
    one.step()
    assert states(one) == (7, 1, 2, 0)


def test_rule_1_a_block_in_two_states_is_found_by_the_check() -> None:
    one = Driver()
    one.cached(range(8), 1)
    one.pool.free.append(1)
    with pytest.raises(Broken, match="partition"):
        one.memory.check()


# ---------------------------------------------------------------- 2: refcounts


def test_rule_2_a_refcount_is_the_tables_and_pins_that_name_the_block() -> None:
    one = Driver()
    (first, second) = one.cached(range(8), 1)
    one.admit(2, range(9))
    one.admit(3, range(9))
    one.memory.pin("p", second)
    assert [one.pool.refs[first], one.pool.refs[second]] == [3, 3]
    one.free(2, 3)
    assert [one.pool.refs[first], one.pool.refs[second]] == [1, 1]
    one.memory.unpin("p", second)
    assert [one.pool.refs[first], one.pool.refs[second]] == [0, 0]
    with pytest.raises(Refused):
        one.memory.unpin("p", second)


def test_rule_2_a_wrong_refcount_is_found_by_the_check() -> None:
    one = Driver()
    one.admit(1, range(3))
    one.pool.refs[1] += 1
    with pytest.raises(Broken, match="refcount 2 but 1 references"):
        one.memory.check()


# ---------------------------------------------------------------- 3: bad batches are refused whole


def test_rule_3_a_batch_with_one_bad_part_changes_nothing() -> None:
    one = Driver()
    one.admit(1, range(6))
    good = {"commits": [Commit(1, 6)], "admits": [Admit(2, pack(range(6)), 9)]}
    assert one.rejected(**good, frees=[1, 1]).code == Code.DUPLICATE
    assert one.rejected(**good, frees=[99]).code == Code.UNKNOWN_SEQUENCE
    assert one.rejected(**good, appends=[Append(99, 1)]).code == Code.UNKNOWN_SEQUENCE
    one.generation -= 1
    assert one.rejected(**good).code == Code.FENCED
    one.generation += 1
    one.step(**good, frees=[1])


def test_rule_3_freeing_a_sequence_twice_is_harmless() -> None:
    one = Driver()
    one.admit(1, range(6))
    one.free(1)
    before = one.pool.counts()
    one.free(1)
    assert one.pool.counts() == before
    assert len(one.pool.free) == len(set(one.pool.free)) == 2


# ---------------------------------------------------------------- 4, 5: copy-on-write


def test_rule_4_a_write_into_a_shared_or_sealed_block_goes_to_a_private_copy() -> None:
    one = Driver()
    one.admit(1, range(6))
    one.fork(1, 2, 6)
    assert one.append(1, 7).copies == [Copy(2, 3)]
    one.commit(1, 8, [6, 7])  # seals the copy; the child still has the half block
    one.append(1, 8)
    one.fork(1, 3, 7)  # shares a sealed block half-way
    one.free(1)
    assert one.pool.refs[3] == 1
    assert one.append(3, 8).copies == [Copy(3, 4)]


def test_rule_5_copy_on_write_takes_one_block_drops_one_reference_and_leaves_others_alone() -> None:
    one = Driver()
    one.admit(1, range(6))
    one.step(forks=[Fork(1, 2, 6), Fork(1, 3, 6)])
    used = one.pool.counts().used
    reply = one.append(2, 7)
    assert reply.copies == [Copy(2, 3)]
    assert reply.changes == [Change(2, 1, [3])]
    assert one.pool.counts().used == used + 1
    assert one.pool.refs[2] == 2
    assert [one.table(1), one.table(2), one.table(3)] == [[1, 2], [1, 3], [1, 2]]


def test_rule_5_with_one_reference_left_it_writes_in_place() -> None:
    one = Driver()
    one.admit(1, range(6))
    one.fork(1, 2, 6)
    one.append(2, 7)
    reply = one.append(1, 7)
    assert (reply.copies, reply.changes) == ([], [])


# ---------------------------------------------------------------- 6: what can be hit


def test_rule_6_nothing_is_hit_before_it_is_committed_and_full() -> None:
    one = Driver()
    one.admit(1, range(6))
    assert one.admit(2, range(9)).admitted[0].computed == 0
    one.commit(1, 3)
    assert one.admit(3, range(9)).admitted[0].computed == 0
    one.commit(1, 6)  # one block is full, the second is not
    assert one.admit(4, range(9)).admitted[0].computed == 4


def test_rule_6_at_least_one_token_of_a_prompt_is_computed() -> None:
    one = Driver(40)
    one.cached(range(16), 1)
    for seq in range(2, 19):
        length = seq - 1
        assert one.admit(seq, range(length)).admitted[0].computed == min(length - 1, 16)
        one.free(seq)


def test_rule_6_a_hit_needs_the_same_tokens_parent_and_tenant_when_all_hashes_are_equal() -> None:
    one = Driver(hash_bits=1)
    one.pool.index.key_of = lambda parent, tokens: b"same"  # type: ignore[method-assign]
    one.cached([1, 2, 3, 4], 1)
    hits = [
        one.admit(2, [9, 9, 9, 9, 5]),  # other tokens
        one.admit(3, [1, 2, 3, 4, 5], tenant="red"),  # another tenant
        one.admit(4, [1, 2, 3, 4, 1, 2, 3, 4, 5]),  # the second block has another parent
    ]
    assert [reply.admitted[0].computed for reply in hits] == [0, 0, 4]


def test_rule_6_prefixes_of_two_tenants_never_meet() -> None:
    one = Driver()
    one.admit(1, range(8), tenant="red")
    one.commit(1, 8)
    assert one.admit(2, range(9), tenant="blue").admitted[0].computed == 0
    assert one.admit(3, range(9)).admitted[0].computed == 0
    assert one.admit(4, range(9), tenant="red").admitted[0].computed == 8


def test_rule_6_without_reuse_nothing_is_looked_up() -> None:
    one = Driver()
    one.cached(range(8), 1)
    reply = one.admit(2, range(9), reuse=False)
    assert reply.admitted[0].computed == 0
    assert reply.usage.query_tokens == 8


# ---------------------------------------------------------------- 7: merge at commit


def test_rule_7_two_sequences_that_commit_equal_blocks_share_one() -> None:
    one = Driver()
    one.step(admits=[Admit(1, pack(range(9)), 9), Admit(2, pack(range(9)), 9)])
    assert one.table(2) == [4, 5, 6]
    reply = one.step(commits=[Commit(1, 9), Commit(2, 9)])
    assert (one.table(1), one.table(2)) == ([1, 2, 3], [1, 2, 6])
    assert one.pool.free == [4, 5]
    # Found when the reply had gone already: the next one tells.
    assert reply.changes == []
    assert one.step().changes == [Change(2, 0, [1]), Change(2, 1, [2])]
    assert one.step().changes == []


def test_rule_7_a_step_that_looks_at_what_is_sealed_merges_before_it_does() -> None:
    one = Driver()
    one.step(admits=[Admit(1, pack(range(9)), 9), Admit(2, pack(range(9)), 9)])
    reply = one.step(
        commits=[Commit(1, 9), Commit(2, 9)], frees=[1], admits=[Admit(3, pack(range(9)), 9)]
    )
    assert reply.changes == [Change(2, 0, [1]), Change(2, 1, [2])]
    assert reply.admitted[0].computed == 8
    assert one.table(3)[:2] == [1, 2]


def test_rule_7_a_late_merge_of_a_sequence_that_ends_is_not_told() -> None:
    one = Driver()
    one.step(admits=[Admit(1, pack(range(9)), 9), Admit(2, pack(range(9)), 9)])
    one.step(commits=[Commit(1, 9), Commit(2, 9)])
    reply = one.step(frees=[2], admits=[Admit(2, pack([7, 7]), 2)])
    assert reply.changes == []
    assert one.table(2) == reply.admitted[0].blocks


def test_rule_7_a_merge_moves_every_fork_that_shares_the_block() -> None:
    one = Driver()
    one.step(admits=[Admit(1, pack(range(6)), 9), Admit(2, pack(range(6)), 9)])
    one.fork(2, 3, 6)
    one.step(commits=[Commit(1, 6), Commit(2, 6)])
    assert one.step().changes == [Change(2, 0, [1]), Change(3, 0, [1])]
    assert one.pool.refs[1] == 3


# ---------------------------------------------------------------- 8: hits inside a block


def test_rule_8_a_prompt_that_leaves_a_cached_block_half_way_hits_by_a_copy() -> None:
    one = Driver()
    one.cached(range(8), 1)
    reply = one.admit(2, [0, 1, 2, 3, 4, 5, 99, 98, 97])
    assert reply.admitted[0].computed == 6
    assert reply.admitted[0].blocks == [1, 3, 4]
    assert reply.copies == [Copy(2, 3)]


def test_rule_8_a_prompt_of_exactly_cached_blocks_hits_all_but_its_last_token() -> None:
    one = Driver()
    one.cached(range(8), 1)
    reply = one.admit(2, range(8))
    assert reply.admitted[0].computed == 7
    assert reply.copies == [Copy(2, 3)]


def test_rule_8_the_best_of_several_continuations_is_copied() -> None:
    one = Driver(40)
    one.cached([0, 1, 2, 3], 1)
    one.cached([0, 1, 7, 7], 2)
    one.cached([0, 1, 2, 8], 3)
    assert one.admit(4, [0, 1, 7, 9, 9]).admitted[0].computed == 3
    assert one.admit(5, [0, 1, 2, 8, 9]).admitted[0].computed == 4


def test_rule_8_where_copying_would_not_fit_the_prompt_is_admitted_without() -> None:
    """Two blocks in all, both cached, and a prompt of just these: the copy would need a third."""
    one = Driver(3)
    one.cached(range(8), 1)
    reply = one.admit(2, range(8))
    assert not reply.refused
    assert (reply.admitted[0].computed, reply.copies) == (4, [])


# ---------------------------------------------------------------- 9: all or nothing


def test_rule_9_what_cannot_be_granted_changes_nothing() -> None:
    one = Driver(4)
    one.admit(1, range(8))
    blocks = one.table(1)
    reply = one.step(appends=[Append(1, 17)], admits=[Admit(2, pack(range(8)), 8)])
    assert reply.refused == [
        Refusal(1, Code.NEVER_FITS, 3, 1),
        Refusal(2, Code.NO_BLOCKS, 2, 1),
    ]
    assert one.table(1) == blocks
    assert 2 not in one.pool.sequences
    assert not one.append(1, 12).refused


def test_rule_9_after_a_refused_admission_the_rest_wait_their_turn() -> None:
    one = Driver(4)
    reply = one.step(
        admits=[
            Admit(1, pack(range(8)), 8),
            Admit(2, pack(range(8)), 8),
            Admit(3, pack([1]), 8),
        ]
    )
    assert [item.seq for item in reply.admitted] == [1]
    assert reply.refused == [Refusal(2, Code.NO_BLOCKS, 2, 1), Refusal(3, Code.BEHIND, 0, 0)]


def test_rule_9_a_group_comes_in_together_or_not_at_all() -> None:
    one = Driver(6)
    group = [Admit(seq, pack([seq] * 5), 8, group=1) for seq in (1, 2, 3)]
    reply = one.step(admits=group)
    assert not reply.admitted
    assert [refusal.seq for refusal in reply.refused] == [1, 2, 3]
    assert not one.step(admits=group[:2]).refused


def test_rule_9_the_hits_of_a_whole_group_are_taken_before_anything_is_evicted() -> None:
    one = Driver(6)
    one.cached([7] * 4, 1)
    one.cached([8] * 4, 2)
    group = [Admit(3, pack([9] * 12), 12, group=1), Admit(4, pack([7] * 4 + [1]), 8, group=1)]
    reply = one.step(admits=group)
    assert [item.computed for item in reply.admitted] == [0, 4]


def test_rule_9_a_block_freed_by_a_step_can_be_granted_by_that_step() -> None:
    one = Driver(3)
    one.admit(1, range(8))
    reply = one.step(frees=[1], admits=[Admit(2, pack(range(8)), 8)])
    assert reply.admitted[0].blocks == [1, 2]


def test_rule_9_the_source_of_a_copy_is_not_granted_before_the_next_step() -> None:
    one = Driver(5)
    one.cached(range(8), 1)
    copying = Admit(2, pack([0, 1, 2, 3, 4, 5, 9]), 9)
    reply = one.step(admits=[copying, Admit(3, pack([7] * 5), 9)])
    assert reply.copies == [Copy(2, 3)]
    assert reply.refused == [Refusal(3, Code.NO_BLOCKS, 2, 1)]
    assert one.admit(3, [7] * 5).admitted[0].blocks == [4, 2]


def test_rule_9_the_source_that_copy_on_write_drops_is_not_granted_before_the_next_step() -> None:
    one = Driver(4)
    one.admit(1, range(8))
    one.fork(1, 2, 6)
    one.commit(1, 8)
    one.free(1)  # the child alone is left, in a block that is sealed
    reply = one.step(appends=[Append(2, 7)], admits=[Admit(3, pack([9]), 1)])
    assert reply.copies == [Copy(2, 3)]
    assert reply.refused == [Refusal(3, Code.NO_BLOCKS, 1, 0)]
    assert one.admit(3, [9]).admitted[0].blocks == [2]


# ---------------------------------------------------------------- 10: eviction


def test_rule_10_the_least_recently_used_chain_goes_first_its_tail_before_its_head() -> None:
    one = Driver()
    assert one.cached([1] * 12, 1) == [1, 2, 3]
    assert one.cached([2] * 12, 2) == [4, 5, 6]
    one.admit(3, [1] * 5)  # touches the head of the first chain
    one.free(3)
    order = []
    for seq in range(10, 20):
        order += one.admit(seq, [seq] * 4).admitted[0].blocks
    # Given back last, never used, then by age: the first chain's tail, the second chain, the touched head.
    assert order == [7, 8, 9, 10, 3, 2, 6, 5, 4, 1]
    assert one.pool.counters.evictions == 6


def test_rule_10_some_blocks_are_kept_free_for_the_next_step_the_oldest_cached_ones() -> None:
    one = Driver(spare=2)
    one.cached([1] * 20, 1)
    one.cached([2] * 16, 2)
    assert (one.pool.free_blocks(), one.pool.cached_blocks()) == (2, 8)
    # A reply tells what was granted from; what is given up after it shows in the next one.
    reply = one.admit(3, [3] * 8)
    assert (reply.usage.free, reply.usage.cached) == (0, 8)
    assert (one.pool.free_blocks(), one.pool.cached_blocks()) == (2, 6)
    assert one.admit(4, [1] * 13).admitted[0].computed == 8  # the first chain lost its tail
    assert not one.admit(5, [5] * 12).refused
    assert (one.pool.free_blocks(), one.pool.cached_blocks()) == (1, 0)  # all there was


def test_rule_10_blocks_kept_free_never_come_from_a_tenants_reserve() -> None:
    one = Driver(spare=9, reserves={"red": 0.2})
    one.admit(1, range(12), tenant="red")
    one.commit(1, 12)
    one.free(1)
    assert (one.pool.free_blocks(), one.pool.cached_blocks()) == (8, 2)
    assert one.admit(2, range(12), tenant="red").admitted[0].computed == 8


def test_rule_10_few_blocks_are_kept_free_and_none_in_a_small_pool() -> None:
    for blocks, spare in ((11, 0), (256, 0), (257, 1), (10_000, 39), (1_000_000, 64)):
        assert Driver(blocks).pool.spare == spare


def test_rule_10_a_pinned_prefix_stays_with_all_that_is_before_it() -> None:
    one = Driver()
    blocks = one.cached(range(8), 1)
    one.memory.pin("p", blocks[1])
    assert one.admit(2, [9] * 40).refused
    assert not one.admit(2, [9] * 32).refused
    one.free(2)
    assert one.admit(3, range(9)).admitted[0].computed == 8


def test_rule_10_a_block_that_is_not_sealed_cannot_be_pinned() -> None:
    one = Driver()
    one.admit(1, range(6))
    for block in (0, 1, 9, 77):
        with pytest.raises(Refused):
            one.memory.pin("p", block)
    with pytest.raises(Refused):
        one.memory.pin("q", 1)


def test_rule_10_a_tenants_reserve_survives_a_flood_by_others() -> None:
    one = Driver(reserves={"red": 0.2})
    one.admit(1, range(12), tenant="red")
    one.commit(1, 12)
    one.free(1)
    for seq in range(2, 30):
        one.admit(seq, [seq] * 32)
        one.commit(seq, 32)
        one.free(seq)
    # Two of ten blocks are red's to keep: its chain lost the tail, not the head.
    assert one.admit(30, range(12), tenant="red").admitted[0].computed == 8


def test_rule_10_what_others_reserve_can_never_be_granted() -> None:
    one = Driver(reserves={"red": 0.2})
    assert one.admit(1, range(33)).refused[0] == Refusal(1, Code.NEVER_FITS, 9, 8)
    assert not one.admit(2, range(40), tenant="red").refused


def test_rule_10_the_hash_goes_before_the_block_is_used_again() -> None:
    one = Driver(3)
    one.cached(range(8), 1)
    one.admit(2, [9] * 8)
    assert not one.pool.index.by_key
    one.free(2)
    assert one.admit(3, range(8)).admitted[0].computed == 0


# ---------------------------------------------------------------- 11: tables


def test_rule_11_a_table_has_one_block_per_started_block_of_tokens() -> None:
    one = Driver(200)
    one.admit(1, range(1))
    for upto in range(1, 60):
        one.append(1, upto)
        assert len(one.table(1)) == -(-upto // 4)
        assert 0 not in one.table(1)


def test_rule_11_an_append_to_what_is_there_already_does_nothing() -> None:
    one = Driver()
    one.admit(1, range(6))
    reply = one.append(1, 3)
    assert (reply.changes, reply.copies, reply.refused) == ([], [], [])
    assert one.pool.sequences[1].tokens == 6


def test_rule_11_the_null_block_is_never_granted() -> None:
    one = Driver()
    granted = one.admit(1, range(40)).admitted[0].blocks
    assert sorted(granted) == list(range(1, 11))


# ---------------------------------------------------------------- 12: the same inputs, the same state


def test_rule_12_equal_inputs_give_equal_digests_and_the_journal_replays() -> None:
    drivers = [Driver(), Driver()]
    for one in drivers:
        one.cached(range(8), 1)
        one.admit(2, range(8))
        one.fork(2, 3, 7)
        one.append(3, 9)
    assert drivers[0].memory.digest() == drivers[1].memory.digest()
    again = replay(drivers[0].memory.journal, memory())
    assert again.digest() == drivers[0].memory.digest()


def test_rule_12_a_different_order_of_use_is_a_different_digest() -> None:
    digests = []
    for order in ((2, 3), (3, 2)):
        one = Driver()
        one.step(admits=[Admit(2, pack([2] * 4), 9), Admit(3, pack([3] * 4), 9)])
        one.step(commits=[Commit(2, 4), Commit(3, 4)])
        one.step(frees=list(order))
        digests.append(one.memory.digest())
    assert digests[0] != digests[1]
