"""The rows and draws of a plan as flat arrays, as the native step reads them.

Some of it is done between two steps, while the device waits and no cache holds a line of it, so it is little
code: `array` and `struct` take a tenth of the time that numpy needs for so few numbers.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from msgspec import Struct

from executor.checks import check_range, check_span
from executor.plan import UNKNOWN, Draw, Drawn, Draws, Lanes, Members, Results, Row
from executor.sampler import is_plain, stream
from kernels.cpu import native
from wire.memory import NULL_BLOCK
from wire.sampling import Sampling

Ints: TypeAlias = "array[int]"  # of 32 bits, or of 64 for addresses

GREEDY, PICKED, HOST = range(3)  # who makes a draw: the greatest logit, the step, the sampler


class Table(Struct):
    """A block table in the step's form."""

    blocks: list[int]  # the row's own: tables are replaced, not changed
    ids: Ints
    address: int
    sampling: Sampling | None = None  # of the last draw behind it, replaced and not changed as well
    maker: int = HOST  # who makes such draws when no token is forbidden


class Batch(Struct):
    """The rows of one step, flat; those in lanes first, each with one token and one draw."""

    lanes: Sequence[int] = ()  # their sequences
    makers: Sequence[int] = ()  # who makes their draws: GREEDY or PICKED
    tokens: int = 0
    ahead: int = 0  # what starts and positions lack
    starts: Ints = array("i")  # [rows]
    counts: Ints = array("i")  # [rows]
    addresses: Ints = array("Q")  # [rows] of their tables
    held: tuple[object, ...] = ()  # what must stay as long as the batch: tables
    longest: int = 0  # positions of the longest sequence
    # Of each row with draws: flat index of its last token, and its row of logits, -1 if none is wanted.
    ends: Ints = array("i")
    kept: Ints = array("i")
    logits: int = 0  # rows of them
    packed: array[int] = array("b")  # `native.DRAW` of each draw the step makes
    positions: Ints = array("i")  # [those], of the tokens drawn
    draws: Sequence[tuple[int, int, Draw]] = ()  # of other rows: who draws, from which of `ends`

    def hosts(self) -> list[tuple[int, Draw]]:
        """Draws from logits that must be edited or told of, with their rows of logits."""
        return [(self.kept[index], draw) for maker, index, draw in self.draws if maker == HOST]

    def drawn(self, best: Ints, picked: Ints, sampled: list[Drawn]) -> Draws:
        """Results in the order of the draws.

        Args:
            best: [ends], the likeliest token of each.
            picked: [picks].
            sampled: [hosts].
        """
        if not self.draws and len(picked) in (0, len(self.lanes)):
            return Results(self.lanes, picked or best, [])
        picks, hosts = iter(picked), iter(sampled)
        tokens = array(
            "i",
            [
                token if maker == GREEDY else next(picks)
                for token, maker in zip(best, self.makers, strict=False)
            ],
        )
        others = [
            Drawn(draw.seq, best[index] if maker == GREEDY else next(picks))
            if maker != HOST
            else next(hosts)
            for maker, index, draw in self.draws
        ]
        return Results(self.lanes, tokens, others) if self.lanes else others


class _Known(Struct):
    """The lanes of the last step. What a batch has of it is replaced when it changes: a step may be running
    with that."""

    members: Members
    version: int  # of `Tables`
    tables: list[Table]
    addresses: Ints
    base: int  # the step that starts and positions are of; all below counts steps from there
    ends_at: Ints  # [lanes] steps before which there is room
    first: int  # before this step, somebody's position is negative
    until: int  # there is room for all before this step
    farthest: int  # greatest offset
    makers: list[int]
    starts: Ints
    counts: Ints
    ends: Ints
    kept: Ints
    positions: Ints
    packed: array[int]  # `native.DRAW` of each draw that the step makes


class Batches:
    """Makes them, after a check of every id that will index memory."""

    def __init__(self, block_size: int, num_blocks: int, context: int, vocab: int) -> None:
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._context = context
        self._vocab = vocab
        self._tables: dict[int, Table] = {}  # of other rows of the last step, by sequence
        self._known: _Known | None = None

    def of(self, rows: Sequence[Row], lanes: Lanes | None = None) -> Batch:
        """All but the token ids.

        Raises:
            ValueError: a block or position is out of range, or a table is too short.
        """
        batch = Batch() if lanes is None else self._of_lanes(lanes)
        if rows:
            self._add_rows(batch, rows)
        elif self._tables:
            self._tables = {}
        return batch

    def ids(self, rows: Sequence[Row], lanes: Lanes | None = None) -> Ints:
        """Token ids of all rows.

        Raises:
            ValueError: one is out of range.
        """
        ids = array("i")
        if lanes is not None:
            ids = lanes.tokens or array("i", [UNKNOWN]) * len(lanes)
        if rows:
            ids = ids + array("i", [token for row in rows for token in row.tokens])
        if ids and (min(ids) < 0 or max(ids) >= self._vocab):
            check_range("token", np.array(ids), 0, self._vocab)
        return ids

    def _of_lanes(self, lanes: Lanes) -> Batch:
        known = self._known
        if known is None or known.members is not lanes.members:
            known = self._known = self._know(lanes)
        elif known.version != lanes.tables.version:
            self._change(known, lanes)
        step = lanes.step - known.base
        if not known.first <= step < known.until:
            for row in lanes.rows():
                check_span(row, len(row.blocks), self._block_size, self._context)
        return Batch(
            lanes.members.names,
            known.makers,
            len(known.makers),
            step,
            known.starts,
            known.counts,
            known.addresses,
            (known.tables,),
            known.farthest + step + 1,
            known.ends,
            known.kept,
            len(known.positions),
            known.packed,
            known.positions,
        )

    def _add_rows(self, batch: Batch, rows: Sequence[Row]) -> None:
        size, context, known = self._block_size, self._context, self._tables
        starts, counts, ends, kept = [], [], array("i"), array("i")
        tables: list[Table] = []
        current: dict[int, Table] = {}
        draws = _Draws(batch)
        ahead, flat, longest, before = batch.ahead, batch.tokens, batch.longest, len(batch.ends)
        for row in rows:
            seq, start, blocks = row.seq, row.start, row.blocks
            count = len(row.tokens)
            end = start + count
            if not count or start < 0 or end > context or end > len(blocks) * size:
                check_span(row, len(blocks), size, context)
            table = known.get(seq)
            if table is None or table.blocks is not blocks:
                table = self._table(blocks)
            current[seq] = table
            tables.append(table)
            starts.append(start - ahead)
            counts.append(count)
            flat += count
            if end > longest:
                longest = end
            if row.draws:
                kept.append(draws.add(before + len(ends), row.draws, table))
                ends.append(flat - 1)
        batch.tokens, batch.longest = flat, longest
        batch.starts = batch.starts + array("i", starts)
        batch.counts = batch.counts + array("i", counts)
        batch.addresses = batch.addresses + array("Q", [table.address for table in tables])
        batch.ends, batch.kept = batch.ends + ends, batch.kept + kept
        batch.held = (*batch.held, *tables)
        draws.put()
        self._tables = current

    def _know(self, lanes: Lanes) -> _Known:
        members, before, shown = lanes.members, self._known, lanes.tables.blocks
        made = dict(zip(before.members.names, before.tables, strict=True)) if before else {}
        tables = []
        for name, blocks in zip(members.names, shown, strict=True):
            table = made.get(name) or self._tables.get(name)
            tables.append(table if table and table.blocks is blocks else self._table(blocks))
        base = lanes.step
        offsets = [offset + base for offset in members.offsets]
        makers = [_maker(sampling) for sampling in members.samplings]
        picks = [place for place, maker in enumerate(makers) if maker == PICKED]
        kept = array("i", [-1] * len(makers))
        for row, place in enumerate(picks):
            kept[place] = row
        packed = [
            _packed(row, members.samplings[place], members.choices[place])
            for row, place in enumerate(picks)
        ]
        ends_at = array(
            "i",
            [self._room(blocks) - offset for blocks, offset in zip(shown, offsets, strict=True)],
        )
        return _Known(
            members=members,
            version=lanes.tables.version,
            tables=tables,
            addresses=array("Q", [table.address for table in tables]),
            base=base,
            ends_at=ends_at,
            first=-min(offsets),
            until=min(ends_at),
            farthest=max(offsets),
            makers=makers,
            starts=array("i", offsets),
            counts=array("i", [1] * len(makers)),
            ends=array("i", range(len(makers))),
            kept=kept,
            positions=array("i", [offsets[place] + 1 for place in picks]),
            packed=array("b", b"".join(packed)),
        )

    def _change(self, known: _Known, lanes: Lanes) -> None:
        """Some tables are other ones."""
        shown, offsets, ends_at = lanes.tables, known.starts, known.ends_at
        changed: Sequence[int] = shown.changed
        if shown.version != known.version + 1:
            changed = range(len(offsets))
        known.addresses = addresses = known.addresses[:]
        known.tables = tables = known.tables[:]
        for place in changed:
            blocks = shown.blocks[place]
            if tables[place].blocks is not blocks:
                tables[place] = table = self._table(blocks)
                addresses[place] = table.address
                ends_at[place] = self._room(blocks) - offsets[place]
        known.version, known.until = shown.version, min(ends_at)

    def _room(self, blocks: list[int]) -> int:
        """Positions it has."""
        return min(len(blocks) * self._block_size, self._context)

    def _table(self, blocks: list[int]) -> Table:
        if min(blocks) <= NULL_BLOCK or max(blocks) >= self._num_blocks:
            check_range("block", np.array(blocks), NULL_BLOCK + 1, self._num_blocks)
        ids = array("i", blocks)
        return Table(blocks, ids, ids.buffer_info()[0])


class _Draws:
    """Draws of rows, added to those of a batch."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._draws: list[tuple[int, int, Draw]] = []
        self._packed: list[bytes] = []
        self._positions: list[int] = []
        self._logits = batch.logits

    def add(self, index: int, draws: Sequence[Draw], table: Table) -> int:
        """Those of a row, the one at `index` of all with draws; returns its row of logits, -1 if none is
        wanted. Sampling is looked at once, and not in every step."""
        row = -1
        for draw in draws:
            if draw.sampling is not table.sampling:
                table.sampling, table.maker = draw.sampling, _maker(draw.sampling)
            maker = HOST if draw.forbidden else table.maker
            if maker != GREEDY and row < 0:
                row, self._logits = self._logits, self._logits + 1
            if maker == PICKED:
                self._packed.append(_packed(row, draw.sampling, draw.choice))
                self._positions.append(draw.position - self._batch.ahead)
            self._draws.append((maker, index, draw))
        return row

    def put(self) -> None:
        """All there were."""
        batch = self._batch
        batch.logits = self._logits
        batch.packed = batch.packed + array("b", b"".join(self._packed))
        batch.positions = batch.positions + array("i", self._positions)
        batch.draws = self._draws


def _maker(sampling: Sampling) -> int:
    if not is_plain(sampling):
        return HOST
    return GREEDY if sampling.temperature <= 0 else PICKED


def _packed(row: int, sampling: Sampling, choice: int) -> bytes:
    """A draw as the step reads it, from this row of logits."""
    return native.pack_draw(
        row,
        sampling.top_k,
        sampling.temperature,
        sampling.top_p,
        sampling.min_p,
        stream(sampling.seed, choice),
    )
