"""Block tables: what a sequence's commit, free, fork, append and admit do to a pool.

A table of t tokens names ceil(t / block size) blocks. Blocks that are shared (by a fork or a prefix hit) or
sealed are immutable; a sequence that wants to write into one gets a private copy first (copy-on-write,
Kwon et al., SOSP'23, section 4.3). `tokens` is the count last asked for or reported: a sequence that fills
its own last block says nothing, so the true count may be higher, up to the end of that block.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memd.prefix import TOKEN_BYTES, Hit, Lru, Node, Root
from wire.errors import Code
from wire.memory import Admit, Admitted, Append, Change, Commit, Copy, Fork, Refusal

if TYPE_CHECKING:
    from memd.pool import Pool


@dataclass(slots=True, eq=False)
class Table:
    """One live sequence.

    Attributes:
        root: its tenant's.
        blocks: physical ids by logical number.
        tokens: slots in use, as far as memd was told.
        computed: tokens whose KV is written.
        known: ids of its first tokens, packed; may run ahead of `computed`, or lag `tokens`.
        sealed: leading blocks that were full at a commit.
        node: content of the last of those (the root when there is none); None when one of them could not be
            indexed, and then nothing after it can be.
        borrowed: the last block is partly another's, from a fork: nothing may be written before an append.
        lent: a fork's child borrowed the last block, and how much of it is in use is not quite known.
        kin: tables that descend from one admission by forks; only they share unsealed blocks.
    """

    seq: int
    root: Root
    blocks: list[int]
    tokens: int
    known: bytearray
    node: Node | None
    computed: int = 0
    sealed: int = 0
    borrowed: bool = False
    lent: bool = False
    kin: list[Table] = field(default_factory=list)

    @property
    def tenant(self) -> str:
        return self.root.tenant

    def room(self, block_size: int) -> int:
        """Slots it may write without asking."""
        return self.tokens if self.borrowed else len(self.blocks) * block_size


def commit(pool: Pool, item: Commit) -> None:
    """KV of the first `computed` tokens is written. Blocks that are full now wait in `pool.unsealed`."""
    table = pool.sequences[item.seq]
    if item.tokens:
        table.known += item.tokens
    computed = table.computed = item.computed
    if computed > table.tokens:
        table.tokens = computed
    full = computed // pool.block_size
    if table.sealed < full:
        pool.unsealed.append((table, full, item.tokens))


def seal(pool: Pool, changes: list[Change]) -> None:
    """Seal what waits for it, and merge what is sealed elsewhere."""
    for table, full, sent in pool.unsealed:
        _seal(pool, table, full, sent, changes)
    pool.unsealed.clear()


def _seal(pool: Pool, table: Table, full: int, sent: bytes, changes: list[Change]) -> None:
    """Index the table's blocks up to logical number `full`; `sent` are the ids that came last.

    Invariant kept: a sealed block's parent is sealed too and stands before it in every table that names it.
    """
    width = pool.block_size * TOKEN_BYTES
    index, nodes, blocks, known = pool.index, pool.nodes, table.blocks, table.known
    node = table.node
    for i in range(table.sealed, full):
        if node is None:
            break
        if len(sent) == width and len(known) == (i + 1) * width:
            tokens = sent  # a commit of exactly one block: spare the copies
        else:
            tokens = bytes(known[i * width : (i + 1) * width])
        block = blocks[i]
        sealed = nodes[block]
        if sealed is not None:
            # Shared with kin that committed first. Other tokens than theirs in one physical block cannot
            # both be true; believe the first, and index nothing on the word of the second.
            node = sealed if sealed.parent is node and sealed.tokens == tokens else None
            continue
        key = index.key_of(node, tokens)
        other = index.by_key.get(key)
        if other is None:
            node = nodes[block] = index.add(node, tokens, key, block)
            pool.counters.seals += 1
        elif other.parent is node and other.tokens == tokens:
            _merge(pool, table, i, other, changes)
            node = other
        else:
            node = None  # the hash is taken by other content: this chain stays private from here on
    table.sealed = full
    table.node = node


def _merge(pool: Pool, table: Table, i: int, node: Node, changes: list[Change]) -> None:
    """Put the sealed block in the place of an equal one, in every table that shares the equal one.

    If kin kept it, they could hold a later block whose sealed parent they do not hold.
    """
    block = table.blocks[i]
    sharers = [table]
    if pool.refs[block] > 1:
        sharers = [kin for kin in table.kin if len(kin.blocks) > i and kin.blocks[i] == block]
    for sharer in sharers:
        pool.take(node)
        sharer.blocks[i] = node.block
        pool.release(block)
        changes.append(Change(sharer.seq, i, [node.block]))
    pool.counters.merges += 1


def free(pool: Pool, seq: int) -> None:
    """Drop a sequence, deepest block first. One that is gone already is no error."""
    table = pool.sequences.pop(seq, None)
    if table is None:
        return
    pool.release_all(table.blocks)
    if table.kin:
        table.kin.remove(table)
    table.root.tables -= 1
    pool.index.drop_root_if_unused(table.root)


def fork(pool: Pool, item: Fork, changes: list[Change]) -> None:
    """A child that shares the parent's first `at` tokens. Takes no block.

    The child's whole table goes into the reply, because the parent's may change before and after in one step.
    Only a last block can be made private again: an executor that was granted blocks past the one it is
    filling, and left them empty, must not fork inside the one it is filling.
    """
    parent = pool.sequences[item.parent]
    at, size = item.at, pool.block_size
    blocks = parent.blocks[: -(-at // size)]
    for block in blocks:
        pool.refs[block] += 1
    full = at // size
    if full >= parent.sealed:
        sealed, node = parent.sealed, parent.node
    else:
        sealed, node = full, pool.nodes[blocks[full - 1]] if full else parent.root
    if not parent.kin:
        parent.kin.append(parent)
    parent.tokens = max(parent.tokens, at)
    if at % size and len(blocks) == len(parent.blocks):
        parent.lent = True
    parent.root.tables += 1
    child = Table(
        seq=item.child,
        root=parent.root,
        blocks=blocks,
        tokens=at,
        known=parent.known[: at * TOKEN_BYTES],
        node=node,
        computed=min(parent.computed, at),
        sealed=sealed,
        borrowed=at % size != 0,
        kin=parent.kin,
    )
    parent.kin.append(child)
    pool.sequences[item.child] = child
    if blocks:
        changes.append(Change(item.child, 0, blocks.copy()))


def append(pool: Pool, item: Append, changes: list[Change], copies: list[Copy]) -> Refusal | None:
    """Make slots up to `upto` writable, or say why not and change nothing."""
    table = pool.sequences[item.seq]
    upto, blocks, size = item.upto, table.blocks, pool.block_size
    have = len(blocks)
    if upto <= table.computed or upto <= (have - 1) * size:
        return None
    new = -(-upto // size) - have
    copied = 0
    # The last block is written to when it is not full. It may be less full than was asked for, which shows
    # when less is asked now; when in doubt after a fork, take it as not full.
    partial = table.tokens % size or upto <= table.tokens or table.lent
    if have and partial and table.computed < have * size:
        last = blocks[-1]
        if pool.refs[last] > 1 or pool.nodes[last] is not None:
            copied = 1
    need = new + copied
    if need > 0:
        lru = table.root.lru
        # The first test is nearly always enough: anyone may evict from the common list.
        at_hand = len(pool.free) + len(pool.common)
        if need > at_hand and need > (available := pool.available(lru)):
            never = have + new > pool.most_for(lru)
            return Refusal(item.seq, Code.NEVER_FITS if never else Code.NO_BLOCKS, need, available)
        if copied:
            target = pool.grant(lru)
            copies.append(Copy(last, target))
            blocks[-1] = target
            pool.release_source(last)
            pool.counters.copies += 1
        for _ in range(new):
            blocks.append(pool.grant(lru))
        changes.append(Change(item.seq, have - copied, blocks[have - copied :]))
    if upto > table.tokens:
        table.tokens = upto
    table.borrowed = table.lent = False
    return None


@dataclass(slots=True)
class Plan:
    """What one admission would take; made without changing anything."""

    item: Admit
    hit: Hit
    tokens: int  # slots to be made writable, those of the hit included
    new: int  # blocks to grant


def plan_admit(pool: Pool, item: Admit, inside: bool) -> Plan:
    """Look up a prompt's prefix and count blocks; `inside` allows a hit that ends inside a block."""
    hit = pool.index.longest(item.tenant, item.tokens) if item.reuse else Hit([], None, 0)
    if not inside and hit.source is not None:
        hit = Hit(hit.nodes, None, len(hit.nodes) * pool.block_size)
    tokens = min(hit.computed + item.chunk, len(item.tokens) // TOKEN_BYTES)
    return Plan(item, hit, tokens, -(-tokens // pool.block_size) - len(hit.nodes))


def lacking(pool: Pool, plans: list[Plan], lru: Lru) -> tuple[int, int]:
    """(blocks the plans take, blocks that can be granted once all their hits are taken)."""
    need = sum(plan.new for plan in plans)
    # Cached blocks that are hit, or copied from, can not be evicted for these same plans.
    kept: set[int] = set()
    for plan in plans:
        for node in (*plan.hit.nodes, plan.hit.source):
            if node is not None and node.block in lru:
                kept.add(node.block)
    return need, pool.available(lru) - len(kept)


def admit(pool: Pool, plans: list[Plan], copies: list[Copy]) -> list[Admitted]:
    """Carry out plans that fit: take every hit of all of them before anything is evicted."""
    for plan in plans:
        for node in plan.hit.nodes:
            pool.take(node)
    for plan in plans:
        if plan.hit.source is not None:
            pool.protect(plan.hit.source)
    return [_admit(pool, plan, copies) for plan in plans]


def _admit(pool: Pool, plan: Plan, copies: list[Copy]) -> Admitted:
    item, hit = plan.item, plan.hit
    root = pool.index.root(item.tenant, pool.lru_of(item.tenant))
    root.tables += 1
    blocks = [node.block for node in hit.nodes]
    for _ in range(plan.new):
        blocks.append(pool.grant(root.lru))
    if hit.source is not None:
        copies.append(Copy(hit.source.block, blocks[len(hit.nodes)]))
        pool.counters.copies += 1
    pool.sequences[item.seq] = Table(
        seq=item.seq,
        root=root,
        blocks=blocks,
        tokens=plan.tokens,
        known=bytearray(item.tokens),
        node=hit.nodes[-1] if hit.nodes else root,
        computed=hit.computed,
        sealed=len(hit.nodes),
    )
    if item.reuse:
        pool.counters.queries += len(item.tokens) // TOKEN_BYTES
        pool.counters.hits += hit.computed
    return Admitted(item.seq, hit.computed, blocks.copy())
