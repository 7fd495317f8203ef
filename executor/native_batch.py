"""The rows and draws of a plan as flat arrays, as the native step reads them.

Some of it is done between two steps, while the device waits and no cache holds a line of it, so it is little
code: `array` and `struct` take a tenth of the time that numpy needs for so few numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from executor.checks import check_range, check_span
from executor.plan import Draw, Drawn, Row
from executor.sampler import is_plain, uniform
from kernels.cpu import native
from wire.memory import NULL_BLOCK
from wire.sampling import Sampling

Ints: TypeAlias = "array[int]"  # of 32 bits, or of 64 for addresses

GREEDY, PICKED, HOST = range(3)  # who makes a draw: the greatest logit, the step, the sampler


def room_for(count: int) -> Ints:
    """[count] of 32 bits, for the step to fill."""
    return array("i", bytes(4 * count))


def address(numbers: array[int] | array[float]) -> int:
    """Where its first number is; it must neither grow nor go away."""
    return numbers.buffer_info()[0]


@dataclass(slots=True)
class Table:
    """A block table in the step's form."""

    blocks: list[int]  # the row's own: tables are replaced, not changed
    ids: Ints
    address: int
    sampling: Sampling | None = None  # of the last draw behind it, replaced and not changed as well
    maker: int = HOST  # who makes such draws when no token is forbidden


@dataclass(slots=True)
class Batch:
    """The rows of one step, flat."""

    tokens: int = 0
    starts: list[int] = field(default_factory=list)  # [rows]
    counts: list[int] = field(default_factory=list)  # [rows]
    addresses: list[int] = field(default_factory=list)  # [rows] of their tables
    tables: list[Table] = field(
        default_factory=list
    )  # [rows], which must stay as long as the batch
    longest: int = 0  # positions of the longest sequence
    ends: list[int] = field(
        default_factory=list
    )  # of each row with draws: flat index of its last token
    kept: list[int] = field(default_factory=list)  # [ends]: its row of logits, -1 if none is wanted
    logits: int = 0  # rows of them
    draws: list[tuple[int, int, Draw]] = field(
        default_factory=list
    )  # who draws, from which of `ends`

    def picks(self) -> list[tuple[int, Draw]]:
        """Draws the step makes, with their rows of logits."""
        return self._made_by(PICKED)

    def hosts(self) -> list[tuple[int, Draw]]:
        """Draws from logits that must be edited or told of, with their rows of logits."""
        return self._made_by(HOST)

    def drawn(self, best: Ints, picked: Ints, sampled: Sequence[Drawn]) -> list[Drawn]:
        """Results in the order of the draws.

        Args:
            best: [ends], the likeliest token of each.
            picked: [picks].
            sampled: [hosts].
        """
        picks, hosts = iter(picked), iter(sampled)
        return [
            Drawn(draw.seq, best[index] if maker == GREEDY else next(picks))
            if maker != HOST
            else next(hosts)
            for maker, index, draw in self.draws
        ]

    def _made_by(self, wanted: int) -> list[tuple[int, Draw]]:
        kept = self.kept
        return [(kept[index], draw) for maker, index, draw in self.draws if maker == wanted]


class Batches:
    """Makes them, after a check of every id that will index memory."""

    def __init__(self, block_size: int, num_blocks: int, context: int, vocab: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._context = context
        self._vocab = vocab
        self._tables: dict[int, Table] = {}  # of the last step, by sequence

    def of(self, rows: Sequence[Row]) -> Batch:
        """All but the token ids.

        Raises:
            ValueError: a block or position is out of range, or a table is too short.
        """
        size, context, known = self._block_size, self._context, self._tables
        batch = Batch()
        starts, counts, tables = batch.starts, batch.counts, batch.tables
        current: dict[int, Table] = {}
        flat = longest = 0
        for row in rows:
            seq, start, blocks, draws = row.seq, row.start, row.blocks, row.draws
            count = len(row.tokens)
            end = start + count
            if not count or start < 0 or end > context or end > len(blocks) * size:
                check_span(row, len(blocks), size, context)
            table = known.get(seq)
            if table is None or table.blocks is not blocks:
                table = self._table(blocks)
            current[seq] = table
            tables.append(table)
            starts.append(start)
            counts.append(count)
            flat += count
            if end > longest:
                longest = end
            if draws:
                _add_draws(batch, flat - 1, draws, table)
        batch.tokens, batch.longest = flat, longest
        batch.addresses = [table.address for table in tables]
        self._tables = current
        return batch

    def ids(self, rows: Sequence[Row]) -> Ints:
        """Token ids of all rows.

        Raises:
            ValueError: one is out of range.
        """
        ids = [token for row in rows for token in row.tokens]
        if ids and (min(ids) < 0 or max(ids) >= self._vocab):
            check_range("token", np.array(ids), 0, self._vocab)
        return array("i", ids)

    def _table(self, blocks: list[int]) -> Table:
        if min(blocks) <= NULL_BLOCK or max(blocks) >= self._num_blocks:
            check_range("block", np.array(blocks), NULL_BLOCK + 1, self._num_blocks)
        ids = array("i", blocks)
        return Table(blocks, ids, address(ids))


def _add_draws(batch: Batch, end: int, draws: Sequence[Draw], table: Table) -> None:
    """Those of a row whose last token is at `end`. Sampling is looked at once, and not in every step."""
    row = -1
    for draw in draws:
        if draw.sampling is not table.sampling:
            table.sampling, table.maker = draw.sampling, _maker(draw.sampling)
        maker = HOST if draw.forbidden else table.maker
        if maker != GREEDY and row < 0:
            row, batch.logits = batch.logits, batch.logits + 1
        batch.draws.append((maker, len(batch.ends), draw))
    batch.ends.append(end)
    batch.kept.append(row)


def _maker(sampling: Sampling) -> int:
    if not is_plain(sampling):
        return HOST
    return GREEDY if sampling.temperature <= 0 else PICKED


def pack_draws(draws: Sequence[tuple[int, Draw]]) -> bytes:
    """Draws as the step reads them, [draws] of `native.DRAW`."""
    return b"".join([_packed(row, draw) for row, draw in draws])


def _packed(row: int, draw: Draw) -> bytes:
    sampling = draw.sampling
    point = uniform(sampling.seed, draw.choice, draw.position)
    return native.pack_draw(
        row, sampling.top_k, sampling.temperature, sampling.top_p, sampling.min_p, point
    )
