"""Which row of the device's block tables each sequence has, and what must be written there for a step.

The device keeps every table it has seen. Here is the same on the host, so that a step sends only entries that
differ: a block appended, a shared one replaced by a copy, two equal ones merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from executor.checks import check_range
from executor.plan import Row
from wire.memory import NULL_BLOCK

Ids = NDArray[np.int64]

EMPTY = 0  # a seat whose table is null blocks alone, for rows that pad a batch


@dataclass(slots=True)
class _Seat:
    index: int
    blocks: list[int]  # as the device has them
    used: int  # the last step with a row of it


@dataclass(slots=True, frozen=True)
class Seating:
    """Where the rows of one step sit, and the entries to write first."""

    seats: Ids  # [rows]
    places: Ids  # [changes], seat * width + index
    entries: Ids  # [changes], block ids


class Seats:
    """Seats are kept until others need them: a sequence that pauses finds its table as it left it."""

    def __init__(self, count: int, width: int, num_blocks: int) -> None:
        """
        Args:
            count: sequences in one step, at most.
            width: blocks of one table, at most.
            num_blocks: of the pool, the null block included.
        """
        self.count = count
        self.width = width
        self._num_blocks = num_blocks
        self._seats: dict[int, _Seat] = {}
        self._free = list(range(count, EMPTY, -1))
        self._step = 0

    def place(self, rows: Sequence[Row]) -> Seating:
        """Seat the sequences of one step.

        What is returned must be written to the device, or `forget` be called. Nothing has changed when it
        raises.

        Raises:
            ValueError: a block id is out of range, or there are more rows or blocks than there is room for.
        """
        if len(rows) > self.count:
            raise ValueError(f"{len(rows)} sequences in one step; there is room for {self.count}")
        changed = [
            (row, known, self._difference(row, known))
            for row in rows
            if (known := self._seats.get(row.seq)) is None or known.blocks != row.blocks
        ]
        self._step += 1
        for row in rows:
            if (seat := self._seats.get(row.seq)) is not None:
                seat.used = self._step
        places, entries = [], []
        for row, known, (indices, blocks) in changed:
            if known is None:
                known = self._seats[row.seq] = _Seat(self._take(), [], self._step)
            known.blocks = row.blocks.copy()
            places.append(known.index * self.width + indices)
            entries.append(blocks)
        seats = np.array([self._seats[row.seq].index for row in rows], np.int64)
        return Seating(seats, _joined(places), _joined(entries))

    def forget(self) -> None:
        """What the device holds is not known any more: all tables are written anew."""
        self._seats.clear()
        self._free = list(range(self.count, EMPTY, -1))

    def _difference(self, row: Row, known: _Seat | None) -> tuple[Ids, Ids]:
        """Indices of the row's table that the device has not, and the blocks there."""
        if len(row.blocks) > self.width:
            raise ValueError(
                f"sequence {row.seq}: a table of {len(row.blocks)} blocks; the most is {self.width}"
            )
        blocks = np.array(row.blocks, np.int64)
        indices = np.arange(len(blocks))
        if known is not None:
            shared = min(len(blocks), len(known.blocks))
            old = np.array(known.blocks[:shared], np.int64)
            indices = np.concatenate(
                (np.flatnonzero(blocks[:shared] != old), np.arange(shared, len(blocks)))
            )
        if len(indices):
            check_range("block", blocks[indices], NULL_BLOCK + 1, self._num_blocks)
        return indices, blocks[indices]

    def _take(self) -> int:
        """A free seat; those that have no row in this step are cleared when there is none."""
        if not self._free:
            gone = [seq for seq, seat in self._seats.items() if seat.used < self._step]
            self._free = [self._seats.pop(seq).index for seq in gone]
        return self._free.pop()


def _joined(parts: list[Ids]) -> Ids:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
