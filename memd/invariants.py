"""Every rule a pool must keep, checked from scratch: slow, obvious, and run at the end of every test."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from memd.pool import Pool
from memd.prefix import TOKEN_BYTES, Node


class Broken(Exception):
    """Rules that do not hold.

    Attributes:
        found: one line each.
    """

    def __init__(self, found: list[str]) -> None:
        super().__init__("; ".join(found))
        self.found = found


def broken(pool: Pool) -> list[str]:
    """What is wrong with a pool, one line each; empty when all is well."""
    found: list[str] = []
    for rule in (_states, _references, _tables, _index, _chains, _accounts):
        found += (f"pool {pool.name}: {line}" for line in rule(pool))
    return found


def _states(pool: Pool) -> Iterator[str]:
    """Free, cached, used, quarantined are disjoint and sum to the pool; lists hold no block twice."""
    known = range(1, len(pool.refs))
    if not len(pool.refs) == len(pool.nodes) == len(pool.grants) <= pool.total + 1:
        yield f"columns have {len(pool.refs)}, {len(pool.nodes)}, {len(pool.grants)} entries"
    free = set(pool.free)
    if len(free) != len(pool.free):
        yield "the free list holds a block twice"
    cached = [block for lru in (pool.common, *pool.reserved.values()) for block in lru]
    used = {block for block in known if pool.refs[block] > 0}
    groups = [free, set(cached), used, set(pool.quarantine)]
    if sum(map(len, groups)) != len(known) or set().union(*groups) != set(known):
        yield (
            f"free {sorted(free)}, cached {sorted(cached)}, used {sorted(used)} and quarantined "
            f"{sorted(pool.quarantine)} do not partition blocks 1..{len(known)}"
        )
    counts = pool.counts()
    if counts.free + counts.cached + counts.used + counts.quarantined != counts.total:
        yield f"{counts} do not sum to the total"
    if counts.used != len(used):
        yield f"{counts.used} blocks are counted as used, {len(used)} are"
    for block in free:
        if pool.nodes[block] is not None:
            yield f"free block {block} is still sealed"
    for block in (*cached, *pool.quarantine):
        if pool.nodes[block] is None:
            yield f"block {block} waits to be hit but is not sealed"


def _references(pool: Pool) -> Iterator[str]:
    """A refcount is the occurrences in live tables plus pins."""
    expected: Counter[int] = Counter(pool.pins)
    for table in pool.sequences.values():
        expected.update(table.blocks)
    for block, refs in enumerate(pool.refs):
        if refs != expected[block]:
            yield f"block {block} has refcount {refs} but {expected[block]} references"
    if expected[0] or pool.refs[0] or pool.nodes[0] is not None or pool.grants[0]:
        yield "the null block is in use"
    if any(block >= len(pool.refs) for block in expected):
        yield f"a table names a block that was never granted, of {sorted(expected)}"


def _tables(pool: Pool) -> Iterator[str]:
    """Tables have the right length and are sealed as far as they say."""
    size = pool.block_size
    if pool.unsealed:
        yield f"{len(pool.unsealed)} tables wait to be sealed after the step is over"
    for change in pool.late:
        late = pool.sequences.get(change.seq)
        if late is None or late.blocks[change.index] != change.blocks[0]:
            yield f"a change to be told is not so: {change}"
    for seq, table in pool.sequences.items():
        if table.seq != seq:
            yield f"sequence {seq} is filed under the wrong id {table.seq}"
        if len(table.blocks) != -(-table.tokens // size):
            yield f"sequence {seq} has {len(table.blocks)} blocks for {table.tokens} tokens"
        if len(set(table.blocks)) != len(table.blocks):
            yield f"sequence {seq} names a block twice: {table.blocks}"
        if not table.computed <= min(table.tokens, len(table.known) // TOKEN_BYTES):
            yield f"sequence {seq} has computed {table.computed} of {table.tokens} tokens"
        if table.borrowed and not table.tokens % size:
            yield f"sequence {seq} borrows a whole block"
        if table.sealed != table.computed // size:
            yield f"sequence {seq} has looked at {table.sealed} blocks for {table.computed} tokens"
        if table.kin and table not in table.kin:
            yield f"sequence {seq} is not among its kin"
        for kin in table.kin:
            if pool.sequences.get(kin.seq) is not kin:
                yield f"sequence {seq} has dead kin {kin.seq}"
        yield from _own_chain(pool, seq)


def _own_chain(pool: Pool, seq: int) -> Iterator[str]:
    """The sealed blocks of a table are a chain from its tenant's root, with the tokens it was given."""
    table = pool.sequences[seq]
    width = pool.block_size * TOKEN_BYTES
    before: Node | None = table.root
    for i, block in enumerate(table.blocks):
        node = pool.nodes[block]
        if node is not None and node.parent is not before:
            yield f"sequence {seq} has block {block} at {i} without the prefix it was sealed with"
        if i < table.sealed and table.node is not None:
            if node is None:
                yield f"sequence {seq} has an unsealed block {block} at {i} of {table.sealed}"
            elif node.tokens != table.known[i * width : (i + 1) * width]:
                yield f"sequence {seq} has other tokens than its block {block} at {i}"
        before = node
    last = pool.nodes[table.blocks[table.sealed - 1]] if table.sealed else table.root
    if table.node is not None and table.node is not last:
        yield f"sequence {seq} continues from another node than its last sealed block's"
    if pool.index.roots.get(table.tenant) is not table.root:
        yield f"sequence {seq} has a root that its tenant has lost"


def _index(pool: Pool) -> Iterator[str]:
    """Hash, node and block name each other; keys are right; equal content is one node."""
    index = pool.index
    content: set[tuple[int, bytes]] = set()
    for block, node in enumerate(pool.nodes):
        if node is None:
            continue
        if node.block != block or index.by_key.get(node.key) is not node:
            yield f"block {block} is sealed but its hash leads elsewhere"
        if node.parent is None or node.key != index.key_of(node.parent, node.tokens):
            yield f"block {block} has a hash that is not of its content"
        if len(node.tokens) != pool.block_size * TOKEN_BYTES:
            yield f"block {block} is sealed with {len(node.tokens)} bytes of tokens"
        if (id(node.parent), node.tokens) in content:
            yield f"block {block} repeats the content of another sealed block"
        content.add((id(node.parent), node.tokens))
    for node in index.by_key.values():
        if pool.nodes[node.block] is not node:
            yield f"the index names block {node.block} for content it no longer has"


def _chains(pool: Pool) -> Iterator[str]:
    """A parent is indexed while a child is, referenced while a child is, and evicted after it."""
    index = pool.index
    # All children of all nodes at once: a root can have so many that one search per child would never end.
    offspring = {
        child
        for node in (*index.by_key.values(), *index.roots.values())
        for child in node.offspring()
    }
    for block, node in enumerate(pool.nodes):
        if node is None or node.parent is None:
            continue
        parent = node.parent
        if node not in offspring:
            yield f"block {block} is not among its parent's children"
        if node.root is not parent.root or node.root.lru is not pool.lru_of(node.root.tenant):
            yield f"block {block} belongs to two tenants"
        if parent.parent is None:
            if index.roots.get(node.root.tenant) is not parent:
                yield f"block {block} hangs from a root that is gone"
            continue
        if pool.nodes[parent.block] is not parent:
            yield f"block {block} outlives its parent {parent.block}"
        elif pool.refs[block] and not pool.refs[parent.block]:
            yield f"block {block} is referenced, its parent {parent.block} is not"
        elif block in node.root.lru and parent.block in node.root.lru:
            if node.root.lru[block] > node.root.lru[parent.block]:
                yield f"block {block} would be evicted after its parent {parent.block}"
        elif parent.block in node.root.lru:
            yield f"block {block} could be left behind by its parent {parent.block}"
    for node in (*index.by_key.values(), *index.roots.values()):
        for child in node.offspring():
            if child.parent is not node or pool.nodes[child.block] is not child:
                yield f"block {node.block} has a child {child.block} that is not sealed after it"
    for lru in (pool.common, *pool.reserved.values()):
        stamps = list(lru.values())
        if stamps != sorted(stamps):
            yield "an eviction list is out of order"


def _accounts(pool: Pool) -> Iterator[str]:
    """Roots live exactly as long as something hangs from them; pins are on sealed chains."""
    living = Counter(table.tenant for table in pool.sequences.values())
    for tenant, root in pool.index.roots.items():
        if root.tables != living[tenant] or root.tenant != tenant:
            yield f"tenant {tenant!r} has {living[tenant]} sequences, its root counts {root.tables}"
        if not root.tables and not root.children:
            yield f"tenant {tenant!r} has a root that nothing hangs from"
    for block, pins in pool.pins.items():
        node = pool.nodes[block]
        if pins <= 0 or node is None:
            yield f"block {block} has {pins} pins and is {pool.state_of(block)}"
        elif pins < sum(pool.pins.get(child.block, 0) for child in node.offspring()):
            yield f"block {block} has fewer pins than the blocks after it"
