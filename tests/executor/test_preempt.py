"""Who loses its blocks, on groups made by hand."""

from __future__ import annotations

from executor.preempt import for_growth, for_priority
from executor.request import Group, Sequence, State
from wire.sampling import Sampling


def group(number: int, priority: int, *tables: list[int]) -> Group:
    made = Group(b"", number, [1], b"", Sampling(seed=0), 1, frozenset(), (), (priority, number))
    made.live = [Sequence(made, choice, [1]) for choice in range(len(tables) or 1)]
    for seq, table in zip(made.live, tables, strict=False):
        seq.blocks = table
    made.state = State.RUNNING
    return made


def test_the_newest_go_first_and_only_as_many_as_needed() -> None:
    running = [group(n, 0, [3 * n, 3 * n + 1, 3 * n + 2]) for n in range(1, 5)]
    assert for_growth(running, {running[0]: 1}, 0) == [running[3]]
    assert for_growth(running, {running[0]: 4}, 0) == [running[3], running[2]]
    assert for_growth(running, {running[0]: 4}, 1) == [running[3]]
    assert for_growth(running, {running[0]: 1}, 1) == []


def test_a_chosen_group_that_was_short_itself_needs_nothing_any_more() -> None:
    running = [group(1, 0, [1]), group(2, 0, [2]), group(3, 0, [3])]
    assert for_growth(running, {running[0]: 1, running[2]: 9}, 0) == [running[2]]


def test_the_oldest_is_never_chosen_even_if_that_is_not_enough() -> None:
    running = [group(1, 0, [1]), group(2, 0, [2])]
    assert for_growth(running, {running[0]: 100}, 0) == [running[1]]
    assert for_growth(running[:1], {running[0]: 1}, 0) == []


def test_blocks_that_choices_share_count_once() -> None:
    running = [group(1, 0, [1]), group(2, 0, [9]), group(3, 0, [2, 3, 4], [2, 3, 5])]
    assert for_growth(running, {running[0]: 4}, 0) == [running[2]]
    assert for_growth(running, {running[0]: 5}, 0) == [running[2], running[1]]


def test_a_newcomer_turns_out_only_strictly_worse_groups_and_only_if_that_lets_it_in() -> None:
    running = [group(1, 0, [1, 2]), group(2, 1, [3, 4]), group(3, 2, [5, 6])]
    newcomer = group(4, 0)
    assert for_priority(running, newcomer, 2, 0) == [running[2]]
    assert for_priority(running, newcomer, 3, 0) == [running[2], running[1]]
    assert for_priority(running, newcomer, 5, 0) == []
    assert for_priority(running, newcomer, 0, 2) == [running[2], running[1]]
    assert for_priority(running, newcomer, 0, 0) == []
    assert for_priority(running, group(5, -1), 5, 0) == [running[2], running[1], running[0]]
