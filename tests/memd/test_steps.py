"""What makes a step invalid, and what it costs to handle a valid one."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.memd.driver import ME, Driver, memory, pack
from wire.errors import Code
from wire.memory import (
    Admit,
    Append,
    Commit,
    Fork,
    Granted,
    PoolSpec,
    Register,
    Registered,
    Rejected,
    Step,
)


def fills(*pairs: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("<QQ", *pair) for pair in pairs)


# One sequence of six prompt tokens in two blocks of four, five computed; and a fork of it at six.
BAD: dict[str, tuple[Code, dict[str, Any]]] = {
    "commit unknown": (Code.UNKNOWN_SEQUENCE, {"commits": [Commit(9, 1)]}),
    "commit twice": (Code.DUPLICATE, {"commits": [Commit(1, 5), Commit(1, 6)]}),
    "commit backwards": (Code.INVALID, {"commits": [Commit(1, 4)]}),
    "commit of ids memd was not told": (Code.INVALID, {"commits": [Commit(1, 7)]}),
    "commit past the table": (Code.INVALID, {"commits": [Commit(1, 9, pack([6, 7, 8]))]}),
    "commit into a borrowed block": (Code.INVALID, {"commits": [Commit(2, 7, pack([6]))]}),
    "commit of half an id": (Code.INVALID, {"commits": [Commit(1, 5, b"123")]}),
    "more ids than the pool has slots": (
        Code.INVALID,
        {"commits": [Commit(1, 5, pack(range(40)))]},
    ),
    "free unknown": (Code.UNKNOWN_SEQUENCE, {"frees": [9]}),
    "free twice": (Code.DUPLICATE, {"frees": [1, 2, 1]}),
    "fork of unknown": (Code.UNKNOWN_SEQUENCE, {"forks": [Fork(9, 10, 1)]}),
    "fork of freed": (Code.UNKNOWN_SEQUENCE, {"frees": [1], "forks": [Fork(1, 10, 1)]}),
    "fork past the room": (Code.INVALID, {"forks": [Fork(1, 10, 9)]}),
    "fork past a borrowed room": (Code.INVALID, {"forks": [Fork(2, 10, 7)]}),
    "fork of a new child past its room": (
        Code.INVALID,
        {"forks": [Fork(1, 10, 3), Fork(10, 11, 4)]},
    ),
    "fork into a living id": (Code.DUPLICATE, {"forks": [Fork(1, 2, 3)]}),
    "fork twice into one id": (Code.DUPLICATE, {"forks": [Fork(1, 10, 3), Fork(1, 10, 3)]}),
    "append unknown": (Code.UNKNOWN_SEQUENCE, {"appends": [Append(9, 3)]}),
    "append freed": (Code.UNKNOWN_SEQUENCE, {"frees": [1], "appends": [Append(1, 7)]}),
    "append twice": (Code.DUPLICATE, {"appends": [Append(1, 7), Append(1, 9)]}),
    "append to one that comes in": (
        Code.UNKNOWN_SEQUENCE,
        {"appends": [Append(9, 7)], "admits": [Admit(9, pack([1]), 1)]},
    ),
    "admit a living id": (Code.DUPLICATE, {"admits": [Admit(1, pack([1]), 1)]}),
    "admit a child": (
        Code.DUPLICATE,
        {"forks": [Fork(1, 10, 3)], "admits": [Admit(10, pack([1]), 1)]},
    ),
    "admit twice": (Code.DUPLICATE, {"admits": [Admit(9, pack([1]), 1), Admit(9, pack([1]), 1)]}),
    "admit nothing": (Code.INVALID, {"admits": [Admit(9, b"", 1)]}),
    "admit half an id": (Code.INVALID, {"admits": [Admit(9, b"12345", 1)]}),
    "a group of two tenants": (
        Code.INVALID,
        {
            "admits": [
                Admit(9, pack([1]), 1, tenant="red", group=3),
                Admit(10, pack([1]), 1, tenant="blue", group=3),
            ]
        },
    ),
    "half a fill": (Code.INVALID, {"fills": b"123"}),
    "fill of unknown": (Code.UNKNOWN_SEQUENCE, {"fills": fills((9, 1))}),
    "fill past the room": (Code.INVALID, {"fills": fills((1, 9))}),
    "fill of a borrowed block": (Code.INVALID, {"fills": fills((2, 7))}),
}


@pytest.mark.parametrize("what", BAD)
def test_an_invalid_step_is_refused_whole_with_its_code_and_does_not_use_up_its_number(
    what: str,
) -> None:
    code, bad = BAD[what]
    one = Driver(9)
    one.admit(1, range(6))
    one.commit(1, 5)
    one.fork(1, 2, 6)
    assert one.rejected(**bad).code == code
    assert not one.step(appends=[Append(2, 7)]).refused


def test_a_step_may_fork_a_child_it_has_just_forked_and_append_to_both() -> None:
    one = Driver()
    one.admit(1, range(6))
    reply = one.step(forks=[Fork(1, 2, 6), Fork(2, 3, 5)], appends=[Append(2, 7), Append(3, 6)])
    assert not reply.refused
    assert (one.table(1), one.table(2), one.table(3)) == ([1, 2], [1, 3], [1, 4])


def test_a_freed_id_may_come_back_even_in_the_same_step() -> None:
    one = Driver()
    one.admit(1, range(6))
    reply = one.step(frees=[1], admits=[Admit(1, pack(range(3)), 3)])
    assert reply.admitted[0].seq == 1
    assert one.pool.sequences[1].tokens == 3


def test_fills_raise_the_count_of_tokens_and_never_lower_it() -> None:
    one = Driver()
    one.admit(1, range(6))
    one.step(fills=fills((1, 8)))
    one.step(fills=fills((1, 5)))
    assert one.pool.sequences[1].tokens == 8


def test_a_refused_append_of_a_running_sequence_does_not_stop_the_others() -> None:
    one = Driver(5)
    one.step(admits=[Admit(seq, pack([seq] * 4), 4) for seq in (1, 2, 3)])
    reply = one.step(appends=[Append(1, 9), Append(2, 5), Append(3, 4)])
    assert [(refusal.seq, refusal.need, refusal.available) for refusal in reply.refused] == [
        (1, 2, 1)
    ]
    assert one.table(2) == [2, 4]


small = st.integers(0, 12)
ids = st.integers(1, 8)
packed = st.lists(st.integers(0, 1), max_size=9).map(pack) | st.binary(max_size=5)
any_step = st.fixed_dictionaries(
    {},
    optional={
        "commits": st.lists(st.builds(Commit, ids, small, packed), max_size=3),
        "frees": st.lists(ids, max_size=3),
        "forks": st.lists(st.builds(Fork, ids, ids, small), max_size=3),
        "appends": st.lists(st.builds(Append, ids, small), max_size=3),
        "admits": st.lists(
            st.builds(
                Admit,
                ids,
                packed,
                st.integers(1, 9),
                st.sampled_from(["", "red"]),
                st.integers(0, 1),
                st.booleans(),
            ),
            max_size=3,
        ),
        "fills": st.lists(st.tuples(ids, small), max_size=2).map(lambda pairs: fills(*pairs)),
    },
)


@settings(max_examples=300, deadline=None)
@given(st.lists(any_step, max_size=12))
def test_whatever_a_step_says_it_is_refused_without_a_trace_or_granted_with_every_rule_kept(
    steps: list[dict[str, Any]],
) -> None:
    """No promise of truth here: the steps contradict each other and themselves."""
    one = Driver(7, 3)
    for parts in steps:
        before = one.memory.digest()
        reply = one.send(**parts)  # checks every rule
        if isinstance(reply, Rejected):
            assert one.memory.digest() == before


def test_sequences_that_lie_about_shared_slots_share_nothing_after_the_lie() -> None:
    """Two forks claim different tokens for one physical block: only the first word is indexed."""
    one = Driver()
    one.admit(1, [1, 2])
    one.append(1, 8)
    one.fork(1, 2, 8)
    one.step(commits=[Commit(1, 8, pack([3, 4, 5, 6, 7, 8]))])
    one.step(commits=[Commit(2, 8, pack([9, 9, 9, 9, 9, 9]))])
    assert one.admit(3, [1, 2, 9, 9, 9]).admitted[0].computed == 2
    assert one.admit(4, [1, 2, 3, 4, 5]).admitted[0].computed == 4


# ---------------------------------------------------------------- cost


def best_of(times: int, act: Callable[[], float]) -> float:
    return min(act() for _ in range(times))


def crossing_step(num_blocks: int, sequences: int) -> float:
    """Best seconds for a step in which 16 of many decoding sequences cross into a new block."""
    held = memory()
    spec = PoolSpec("p", "model", "bf16", 16, num_blocks, 1)
    registered = held.handle(0.0, Register((1, 0), ME, spec))
    assert isinstance(registered, Registered)
    number = 0

    def step(**parts: Any) -> float:
        nonlocal number
        number += 1
        request = Step(ME, registered.generation, 7, number, **parts)
        start = time.perf_counter()
        reply = held.handle(0.0, request)
        took = time.perf_counter() - start
        assert isinstance(reply, Granted)
        assert not reply.refused
        return took

    lengths = dict.fromkeys(range(1, sequences + 1), 160)
    for seq in lengths:
        step(admits=[Admit(seq, pack([seq] * 160), 160)])
    step(commits=[Commit(seq, 160) for seq in lengths])
    took = []
    for turn in range(60):
        crossing = [1 + (turn * 16 + i) % sequences for i in range(16)]
        commits, appends = [], []
        for seq in crossing:
            if lengths[seq] > 160:
                commits.append(Commit(seq, lengths[seq], pack([turn] * 16)))
            appends.append(Append(seq, lengths[seq] + 16))
            lengths[seq] += 16
        took.append(step(commits=commits, appends=appends))
    return min(took[20:])


def test_a_step_costs_the_same_whatever_the_pool_and_however_many_sequences_stand_still() -> None:
    small = best_of(3, lambda: crossing_step(4_000, 64))
    large = best_of(3, lambda: crossing_step(1 << 20, 256))
    assert large < 3 * small + 50e-6


def test_a_pool_of_a_million_blocks_registers_in_under_a_tenth_of_a_second() -> None:
    spec = PoolSpec("p", "model", "bf16", 16, 1 << 20, 1)

    def register() -> float:
        start = time.perf_counter()
        memory().handle(0.0, Register((1, 0), ME, spec))
        return time.perf_counter() - start

    assert best_of(3, register) < 0.1
