"""What the admin server shows of a pool: plain structs, made from the core without changing it.

Prompt token ids are never in them: whoever watches memory has no need to read what users wrote.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import nsmallest
from itertools import islice
from typing import Literal

from msgspec import Struct

from memd.leases import Leases
from memd.pool import Pool
from memd.prefix import Node
from memd.tables import Table

State = Literal["null", "free", "cached", "used", "quarantined"]

MOST_HOLDERS = 64  # shown of one block
MOST_SCANNED = 16_384  # blocks looked at for one page, so that a rare state cannot hold the loop up
MOST_CELLS = 4096  # of a map
MOST_SAMPLES = 16  # blocks looked at per cell of a map


class PoolView(Struct, frozen=True):
    """One pool now. `counters` rise from registration."""

    name: str
    model: str
    dtype: str
    block_size: int  # token slots
    block_bytes: int
    total: int  # blocks, the null block not counted
    free: int
    cached: int
    used: int
    quarantined: int
    sequences: int
    slots_filled: float | None  # share of the used blocks' slots that hold data; None: none used
    sharing_saved: float | None  # share of blocks that would be needed more without sharing
    instance: str
    generation: int
    step: int  # the last one answered
    lease_age_ms: int  # since the last valid message
    counters: dict[str, int]


class BlockRow(Struct, frozen=True):
    """One block in a list."""

    id: int
    state: State
    refcount: int
    sealed: bool
    tenant: str | None  # None: not sealed


class Holder(Struct, frozen=True):
    seq: int
    index: int  # the block's logical number in that sequence


class BlockView(Struct, frozen=True):
    """One block, and who has it."""

    id: int
    state: State
    refcount: int
    pins: int
    generation: int  # how often this block was handed out
    sealed: bool
    filled: int  # token slots that hold data
    tenant: str | None
    parent: int | None  # the block before it in its prefix; None: the first, or not sealed
    children: int
    hash: str | None  # the first 16 hex digits
    holders: list[Holder]
    more_holders: int  # not shown


class SequenceRow(Struct, frozen=True):
    """One sequence in a list. `tokens` may lag by what fills its last block."""

    seq: int
    tenant: str
    tokens: int
    computed: int
    sealed: int  # leading blocks that are full and committed
    blocks: int
    shared: int  # of them, with more than one reference


class SequenceView(Struct, frozen=True):
    """One sequence with its block table."""

    seq: int
    tenant: str
    tokens: int
    computed: int
    room: int  # slots it may write without asking
    sealed: int
    table: list[int]
    shared: list[int]  # logical numbers of blocks with more than one reference
    kin: list[int]  # sequences forked from the same admission


class Page(Struct, frozen=True):
    """Part of a list; ask again with `after=next` for what follows, until `next` is null."""

    pool: str
    blocks: list[BlockRow] | None = None
    sequences: list[SequenceRow] | None = None
    next: int | None = None


class MapView(Struct, frozen=True):
    """A pool as a grid. Cell i stands for blocks 1 + i * per_cell and the `per_cell - 1` after it.

    Lists have one entry per cell: shares of its blocks in thousandths (what is missing to 1000 is free), and
    mean references of its used blocks in tenths. With `samples` below `per_cell`, shares are of that many
    evenly spaced blocks.
    """

    pool: str
    total: int
    per_cell: int
    samples: int
    used: list[int]
    cached: list[int]
    quarantined: list[int]
    refs: list[int]


def share_filled(pool: Pool) -> float | None:
    """Share of used blocks' token slots that hold data: the paper's memory efficiency (SOSP'23, fig. 2)."""
    slots = pool.counts().used * pool.block_size
    if not slots:
        return None
    # Only last blocks have empty slots. Kin may share one: then the longest of them counts, once.
    empty: dict[int, int] = {}
    for table in pool.sequences.values():
        if table.blocks:
            last = table.blocks[-1]
            slack = len(table.blocks) * pool.block_size - table.tokens
            empty[last] = min(slack, empty.get(last, slack))
    return 1 - sum(empty.values()) / slots


def share_saved(pool: Pool) -> float | None:
    """Share of table entries that sharing made free of cost (SOSP'23, fig. 15)."""
    entries = sum(len(table.blocks) for table in pool.sequences.values())
    if not entries:
        return None
    only_pinned = sum(pool.refs[block] == pins for block, pins in pool.pins.items())
    return 1 - (pool.counts().used - only_pinned) / entries


def pool_view(pool: Pool, leases: Leases, now: float) -> PoolView:
    counts = pool.counts()
    return PoolView(
        name=pool.name,
        model=pool.spec.model,
        dtype=pool.spec.dtype,
        block_size=pool.block_size,
        block_bytes=pool.spec.block_bytes,
        total=counts.total,
        free=counts.free,
        cached=counts.cached,
        used=counts.used,
        quarantined=counts.quarantined,
        sequences=len(pool.sequences),
        slots_filled=share_filled(pool),
        sharing_saved=share_saved(pool),
        instance=pool.instance,
        generation=pool.generation,
        step=pool.number,
        lease_age_ms=max(0, round((leases.length - leases.remaining(pool.generation, now)) * 1000)),
        counters=pool.counters.as_dict(),
    )


def _node(pool: Pool, block: int) -> Node | None:
    return pool.nodes[block] if 0 < block < len(pool.nodes) else None


def _refs(pool: Pool, block: int) -> int:
    return pool.refs[block] if block < len(pool.refs) else 0


def _row(pool: Pool, block: int) -> BlockRow:
    node = _node(pool, block)
    return BlockRow(
        block,
        pool.state_of(block),  # type: ignore[arg-type]
        _refs(pool, block),
        node is not None,
        None if node is None else node.root.tenant,
    )


def block_page(pool: Pool, state: State | None, after: int, limit: int) -> Page:
    """Up to `limit` blocks with ids above `after`; fewer, or none, when the state is rare."""
    rows: list[BlockRow] = []
    last = min(after + MOST_SCANNED, pool.total)
    block = after
    while block < last and len(rows) < limit:
        block += 1
        if state is None or pool.state_of(block) == state:
            rows.append(_row(pool, block))
    return Page(pool.name, blocks=rows, next=block if block < pool.total else None)


def block_view(pool: Pool, block: int) -> BlockView:
    """Takes time in proportion to all tables.

    Args:
        block: 0 to `pool.total`.
    """
    node = _node(pool, block)
    holding = pool.holders(block) if block else []
    holders = [
        Holder(seq, pool.sequences[seq].blocks.index(block)) for seq in holding[:MOST_HOLDERS]
    ]
    if node is not None:
        filled = pool.block_size
    else:
        filled = max((_filled(pool, pool.sequences[seq], block) for seq in holding), default=0)
    parent = None if node is None or node.parent is None else node.parent.block or None
    return BlockView(
        id=block,
        state=pool.state_of(block),  # type: ignore[arg-type]
        refcount=_refs(pool, block),
        pins=pool.pins.get(block, 0),
        generation=pool.grants[block] if block < len(pool.grants) else 0,
        sealed=node is not None,
        filled=filled,
        tenant=None if node is None else node.root.tenant,
        parent=parent,
        children=0 if node is None else sum(1 for _ in node.offspring()),
        hash=None if node is None else node.key.hex()[:16],
        holders=holders,
        more_holders=len(holding) - len(holders),
    )


def _filled(pool: Pool, table: Table, block: int) -> int:
    index = table.blocks.index(block)
    return max(0, min(pool.block_size, table.tokens - index * pool.block_size))


def sequence_page(pool: Pool, after: int, limit: int) -> Page:
    """Up to `limit` sequences with ids above `after`, in order."""
    ids = nsmallest(limit + 1, (seq for seq in pool.sequences if seq > after))
    rows = [
        SequenceRow(
            seq,
            table.tenant,
            table.tokens,
            table.computed,
            table.sealed,
            len(table.blocks),
            sum(pool.refs[block] > 1 for block in table.blocks),
        )
        for seq in ids[:limit]
        for table in (pool.sequences[seq],)
    ]
    return Page(pool.name, sequences=rows, next=ids[limit - 1] if len(ids) > limit else None)


def sequence_view(pool: Pool, seq: int) -> SequenceView | None:
    """None: there is no such sequence alive."""
    table = pool.sequences.get(seq)
    if table is None:
        return None
    return SequenceView(
        seq=seq,
        tenant=table.tenant,
        tokens=table.tokens,
        computed=table.computed,
        room=table.room(pool.block_size),
        sealed=table.sealed,
        table=table.blocks.copy(),
        shared=[index for index, block in enumerate(table.blocks) if pool.refs[block] > 1],
        kin=sorted(kin.seq for kin in table.kin if kin is not table),
    )


def map_cells(pool: Pool) -> Iterator[tuple[int, int, int, int]]:
    """Cells of `MapView`, one (used, cached, quarantined, refs) after the other, so that a caller can let
    other work go on between them."""
    refs, nodes, quarantine = pool.refs, pool.nodes, pool.quarantine
    per_cell = cell_size(pool)
    stride = max(1, per_cell // MOST_SAMPLES)
    for first in range(1, pool.total + 1, per_cell):
        blocks = range(first, min(first + per_cell, pool.total + 1), stride)
        granted = blocks[: max(0, -(-(len(refs) - first) // stride))]
        used = cached = quarantined = references = 0
        for block in granted:
            if refs[block]:
                used += 1
                references += refs[block]
            elif block in quarantine:
                quarantined += 1
            elif nodes[block] is not None:
                cached += 1
        looked = len(blocks)
        yield (
            round(1000 * used / looked),
            round(1000 * cached / looked),
            round(1000 * quarantined / looked),
            round(10 * references / used) if used else 0,
        )


def cell_size(pool: Pool) -> int:
    """Blocks one cell of the map stands for."""
    return -(-pool.total // MOST_CELLS)


def map_view(pool: Pool, cells: list[tuple[int, int, int, int]]) -> MapView:
    per_cell = cell_size(pool)
    columns = [list(islice(column, len(cells))) for column in zip(*cells, strict=True)]
    return MapView(
        pool.name,
        pool.total,
        per_cell,
        len(range(0, per_cell, max(1, per_cell // MOST_SAMPLES))),
        *columns,
    )
