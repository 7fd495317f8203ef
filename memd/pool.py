"""One pool's physical blocks: who may have them, how often they are referenced, which go first.

A block is *free*, *used* (refcount above 0), *cached* (refcount 0, sealed and indexed) or *quarantined*
(refcount 0, but the source of a copy of the step just granted, so not to be handed out before the next).
Block 0 is the null block and is never any of these. Columns grow with the highest block ever granted, so a
pool of a million blocks costs nothing to register, and nothing here takes time in proportion to the pool.

A block is *sealed* exactly while it has a node in the prefix index. References go to a chain's blocks as a
whole, and a chain's tail is released before its head, so a node's parent is always referenced while the node
is, and always younger in the eviction order: children never outlive parents.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from memd.prefix import Lru, Node, PrefixIndex
from memd.tables import Table
from wire.memory import Change, Granted, PoolSpec

MOST_SPARE = 64  # blocks kept free, where the pool is large enough
SPARE_SHARE = 256  # one block in so many


@dataclass(slots=True)
class Counts:
    """Blocks by state, the null block not counted: free + cached + used + quarantined == total."""

    total: int
    free: int
    cached: int
    used: int
    quarantined: int


@dataclass(slots=True)
class Counters:
    """What has happened since registration."""

    steps: int = 0
    hits: int = 0  # prompt tokens found in the prefix index
    queries: int = 0  # prompt tokens looked up
    copies: int = 0  # block copies ordered: copy-on-write and hits inside a block
    evictions: int = 0  # cached blocks whose content was given up
    merges: int = 0  # blocks given back because an equal one was sealed already
    seals: int = 0  # blocks indexed
    refusals: int = 0  # appends and admits that lacked blocks, those behind them included

    def as_dict(self) -> dict[str, int]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Pool:
    """Blocks, sequences and prefix index of one registration; it dies with its lease.

    Attributes (read them, change them through methods only):
        name, spec, generation, instance: identity.
        refs, nodes, grants: per block, as far as blocks were ever granted: references, content identity (None
            while not sealed), and how often the block was granted (its own generation).
        spare: blocks that are kept free after every step, as far as cached ones can be given up for it.
        quarantine: blocks that are cached again when the next step begins.
        pins: block -> pins that reference it.
        sequences: live block tables by sequence id.
        unsealed: tables whose commit filled blocks up to a logical number with the ids sent; empty between
            two steps.
        late: changes of the last step that were made after its reply; the next one tells them first.
        counters: events so far.
        number, reply: the last step answered, and the answer.
        highest: the highest sequence id a granted step has named.
    """

    def __init__(
        self,
        spec: PoolSpec,
        *,
        generation: int,
        instance: str,
        secret: bytes,
        reserves: Mapping[str, float],
        hash_bits: int = 256,
        spare: int = -1,
    ) -> None:
        self.name = spec.name
        self.spec = spec
        self.generation = generation
        self.instance = instance
        self.block_size = spec.block_size
        self.total = spec.num_blocks - 1  # without the null block
        self.refs: list[int] = [0]
        self.nodes: list[Node | None] = [None]
        self.grants: list[int] = [0]
        self.spare = spare if spare >= 0 else min(MOST_SPARE, self.total // SPARE_SHARE)
        self.free: list[int] = []  # a stack; blocks never granted yet are not in it
        self.quarantine: dict[int, None] = {}
        self.pins: dict[int, int] = {}
        self.reserves = {tenant: int(share * self.total) for tenant, share in reserves.items()}
        self.common: Lru = OrderedDict()  # cached blocks of tenants without a reserve
        self.reserved: dict[str, Lru] = {tenant: OrderedDict() for tenant in self.reserves}
        self._stamp = 0
        salt = "\0".join((spec.model, spec.dtype, str(spec.block_size))).encode()
        self.index = PrefixIndex(secret, salt, spec.block_size, hash_bits)
        self.sequences: dict[int, Table] = {}
        self.unsealed: list[tuple[Table, int, bytes]] = []
        self.late: list[Change] = []
        self.counters = Counters()
        self.number = 0
        self.reply: Granted | None = None
        self.highest = 0

    # ------------------------------------------------------------ how much there is

    def cached_blocks(self) -> int:
        cached = len(self.common)
        for lru in self.reserved.values():
            cached += len(lru)
        return cached

    def free_blocks(self) -> int:
        return len(self.free) + self.total + 1 - len(self.refs)

    def counts(self) -> Counts:
        free, cached, quarantined = self.free_blocks(), self.cached_blocks(), len(self.quarantine)
        used = self.total - free - cached - quarantined
        return Counts(self.total, free, cached, used, quarantined)

    def lru_of(self, tenant: str) -> Lru:
        """Where a tenant's blocks wait while nobody references them."""
        return self.reserved.get(tenant, self.common)

    def available(self, lru: Lru) -> int:
        """Blocks that could be granted now to a tenant whose cached blocks are in `lru`."""
        blocks = self.free_blocks() + len(self.common)
        for tenant, other in self.reserved.items():
            blocks += len(other) if other is lru else max(0, len(other) - self.reserves[tenant])
        return blocks

    def most_for(self, lru: Lru) -> int:
        """Blocks that tenant could ever get: the pool without what is kept for others."""
        kept = sum(self.reserves[name] for name, other in self.reserved.items() if other is not lru)
        return self.total - kept

    # ------------------------------------------------------------ references

    def grant(self, lru: Lru) -> int:
        """A block with one reference for a tenant; the caller has looked at `available`."""
        if self.free:
            block = self.free.pop()
        elif len(self.refs) <= self.total:
            block = len(self.refs)
            self.refs.append(1)
            self.nodes.append(None)
            self.grants.append(1)
            return block
        else:
            block = self._evict(lru)
        self.refs[block] = 1
        self.grants[block] += 1
        return block

    def _evict(self, own: Lru) -> int:
        """Give up the content of the block cached longest among those this tenant may take."""
        lru = self.common
        if self.reserved:
            oldest = -1
            for tenant, other in (("", self.common), *self.reserved.items()):
                if not other or (
                    other is not own
                    and other is not self.common
                    and len(other) <= self.reserves[tenant]
                ):
                    continue
                stamp = next(iter(other.values()))
                if oldest < 0 or stamp < oldest:
                    oldest, lru = stamp, other
        block, _ = lru.popitem(last=False)
        node = self.nodes[block]
        assert node is not None  # cached blocks are sealed
        self.index.remove(node)
        self.nodes[block] = None
        self.counters.evictions += 1
        return block

    def top_up(self) -> None:
        """Give up cached blocks that anyone may take until `spare` are free: a grant then need not evict."""
        missing = self.spare - self.free_blocks()
        if missing > 0:
            for _ in range(min(missing, self.available(self.common) - self.free_blocks())):
                self.free.append(self._evict(self.common))

    def take(self, node: Node) -> None:
        """Reference a sealed block."""
        block = node.block
        refs = self.refs[block]
        self.refs[block] = refs + 1
        if not refs and node.root.lru.pop(block, None) is None:
            del self.quarantine[block]

    def release(self, block: int) -> None:
        """Drop one reference; the last one makes a sealed block cached and another one free."""
        self.release_all((block,))

    def release_all(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each, the last first, so that a chain's tail is evicted before its head."""
        refs, nodes, stamp = self.refs, self.nodes, self._stamp
        for block in reversed(blocks):
            left = refs[block] - 1
            refs[block] = left
            if not left:
                node = nodes[block]
                if node is None:
                    self.free.append(block)
                else:
                    stamp += 1
                    node.root.lru[block] = stamp
        self._stamp = stamp

    def release_source(self, block: int) -> None:
        """Drop one reference of a block that this step copies from: it must not be handed out yet."""
        self.release(block)
        node = self.nodes[block]
        if node is not None:
            self.protect(node)

    def protect(self, node: Node) -> None:
        """Keep a cached block from being handed out before the next step."""
        if node.root.lru.pop(node.block, None) is not None:
            self.quarantine[node.block] = None

    def end_quarantine(self) -> None:
        """A new step begins: the copies of the last one are before it in the device's order."""
        for block in self.quarantine:
            node = self.nodes[block]
            assert node is not None  # only sealed blocks are quarantined
            self._stamp += 1
            node.root.lru[block] = self._stamp
        self.quarantine.clear()

    # ------------------------------------------------------------ pins and reset

    def pin(self, block: int) -> bool:
        """Reference a sealed block and the prefix before it; False when the block is not sealed."""
        node = self.nodes[block] if 0 < block < len(self.nodes) else None
        if node is None:
            return False
        while node is not None and node.parent is not None:
            self.take(node)
            self.pins[node.block] = self.pins.get(node.block, 0) + 1
            node = node.parent
        return True

    def unpin(self, block: int) -> bool:
        """Undo one `pin` of this very block; False when it has none."""
        if not self._pinned_itself(block):
            return False
        node = self.nodes[block]
        while node is not None and node.parent is not None:
            self.release(node.block)
            self.pins[node.block] -= 1
            if not self.pins[node.block]:
                del self.pins[node.block]
            node = node.parent
        return True

    def _pinned_itself(self, block: int) -> bool:
        """Whether a pin names this block, and not only a block after it."""
        pins = self.pins.get(block, 0)
        node = self.nodes[block] if pins else None
        return node is not None and pins > sum(
            self.pins.get(child.block, 0) for child in node.offspring()
        )

    def reset_cache(self) -> int:
        """Give up the content of every cached block; returns how many there were."""
        dropped = 0
        for lru in (self.common, *self.reserved.values()):
            while lru:
                block, _ = lru.popitem(last=False)
                node = self.nodes[block]
                assert node is not None
                self.index.remove(node)
                self.nodes[block] = None
                self.free.append(block)
                dropped += 1
        self.counters.evictions += dropped
        return dropped

    # ------------------------------------------------------------ for people

    def state_of(self, block: int) -> str:
        """`null`, `free`, `cached`, `used` or `quarantined`."""
        if block == 0:
            return "null"
        if block >= len(self.refs):
            return "free"
        if self.refs[block]:
            return "used"
        if block in self.quarantine:
            return "quarantined"
        return "free" if self.nodes[block] is None else "cached"

    def holders(self, block: int) -> list[int]:
        """Ids of the sequences whose tables name the block; takes time in proportion to all tables."""
        return [seq for seq, table in self.sequences.items() if block in table.blocks]
