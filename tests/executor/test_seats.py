"""Tables on the device follow the plans, and only what differs is sent."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from executor.plan import Row
from executor.seats import EMPTY, Seating, Seats

BLOCKS, WIDTH = 100, 8


class Device:
    """What a device would hold if it wrote what it is sent."""

    def __init__(self, count: int = 4) -> None:
        self.seats = Seats(count, WIDTH, BLOCKS)
        self.tables = np.zeros((count + 1, WIDTH), np.int64)

    def step(self, *tables: tuple[int, list[int]]) -> Seating:
        rows = [Row(seq, 0, [1], blocks) for seq, blocks in tables]
        seating = self.seats.place(rows)
        self.tables.reshape(-1)[seating.places] = seating.entries
        assert len(set(seating.places.tolist())) == len(seating.places)
        for seat, row in zip(seating.seats.tolist(), rows, strict=True):
            assert self.tables[seat, : len(row.blocks)].tolist() == row.blocks
        assert not self.tables[EMPTY].any()
        return seating


def test_a_table_that_stays_as_it_was_sends_nothing() -> None:
    device = Device()
    assert device.step((7, [3, 4])).entries.tolist() == [3, 4]
    assert len(device.step((7, [3, 4])).places) == 0


@pytest.mark.parametrize(
    ("after", "sent"),
    [([3, 4, 5, 9], [9]), ([3, 4, 8], [8]), ([3, 6, 5], [6]), ([3], []), ([1, 4, 5, 2], [1, 2])],
    ids=["appended", "copied on write", "merged", "shrunk", "merged and appended"],
)
def test_only_entries_that_differ_are_sent(after: list[int], sent: list[int]) -> None:
    device = Device()
    device.step((7, [3, 4, 5]))
    assert device.step((7, after)).entries.tolist() == sent


def test_a_sequence_that_sits_out_a_step_finds_its_table_as_it_left_it() -> None:
    device = Device()
    device.step((1, [1, 2]), (2, [3]))
    device.step((2, [3]))
    assert len(device.step((1, [1, 2]), (2, [3])).places) == 0


def test_the_seat_of_a_preempted_sequence_goes_to_another_and_its_return_is_written_anew() -> None:
    device = Device(count=2)
    device.step((1, [1, 2]), (2, [3, 4]))
    device.step((1, [1, 2]), (3, [4, 3]))  # 2 is gone; 3 has its blocks in another order
    back = device.step((1, [1, 2]), (9, [5, 6]))  # 2 again, as memd knows it: under another id
    assert back.entries.tolist() == [5, 6]


def test_a_shrunk_table_that_grows_again_sends_what_it_grew_by() -> None:
    device = Device()
    device.step((1, [1, 2, 3]))
    device.step((1, [1]))
    assert device.step((1, [1, 2, 3])).entries.tolist() == [2, 3]


def test_what_is_forgotten_is_written_whole() -> None:
    device = Device()
    device.step((1, [1, 2, 3]))
    device.seats.forget()
    assert device.step((1, [1, 2, 3])).entries.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ([(5, [1]), (1, [0])], "block 0 is out of range"),
        ([(5, [1]), (1, [BLOCKS])], f"block {BLOCKS} is out of range"),
        ([(5, list(range(1, WIDTH + 2)))], "a table of 9 blocks; the most is 8"),
        ([(seq, [1]) for seq in range(5)], "5 sequences in one step; there is room for 4"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    tables: list[tuple[int, list[int]]], said: str
) -> None:
    device = Device()
    device.step((1, [7, 8]))
    with pytest.raises(ValueError, match=said):
        device.step(*tables)
    assert len(device.step((1, [7, 8])).places) == 0
    device.step((2, [1]), (3, [2]), (4, [3]), (1, [7, 8]))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5))
def test_tables_on_the_device_are_those_of_the_plan_whatever_comes_and_goes(
    seed: int, count: int
) -> None:
    chance = random.Random(seed)
    device, tables, fresh = Device(count), dict[int, list[int]](), iter(range(10**6))
    for _ in range(40):
        for seq in [seq for seq in tables if chance.random() < 0.2]:
            del tables[seq]
        while len(tables) < count and chance.random() < 0.7:
            tables[next(fresh)] = chance.sample(range(1, BLOCKS), chance.randint(1, WIDTH))
        for table in tables.values():
            if len(table) < WIDTH and chance.random() < 0.3:
                table.append(chance.randrange(1, BLOCKS))
            if chance.random() < 0.2:
                table[chance.randrange(len(table))] = chance.randrange(1, BLOCKS)
        step = [(seq, list(table)) for seq, table in tables.items() if chance.random() < 0.8]
        chance.shuffle(step)
        device.step(*step)
