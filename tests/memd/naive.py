"""A naive executor with a device that remembers: the oracle of memd's tests.

The "KV" of a position is a hash of the tenant and of every token up to it, so a slot that was not written, is
stale, or belongs to another prefix never looks right. The device applies the copies and writes that a real
one would, in its order; after every message each live sequence must read its own prefix through its table,
and each sealed block must still hold the content it is indexed under. Tables are mirrored from the replies
alone, as an executor would, and must equal memd's once the merges are added that the next reply will tell;
until then both must be right, because the device still works by the old one.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from typing import Any

from memd.pool import Pool
from memd.prefix import MOST_SIBLINGS, Node
from tests.memd.driver import Driver, pack
from wire.memory import Admit, Append, Commit, Fork, Granted, Rejected


class Wrong(AssertionError):
    """memd granted something that makes a sequence read or write what it must not."""


def must(condition: bool, message: str, *args: object) -> None:
    if not condition:
        raise Wrong(message % args)


@dataclass(slots=True, eq=False)
class Sequence:
    """What the executor knows of one sequence."""

    id: int
    tenant: str
    tokens: list[int]
    written: int = 0  # positions whose KV the device holds
    committed: int = 0  # of those, told to memd
    sent: int = 0  # token ids memd knows
    room: int = 0  # slots writable without asking
    blocks: list[int] = field(default_factory=list)
    kvs: list[int] = field(default_factory=list)

    def kv(self, position: int) -> int:
        """The right KV of a position."""
        while len(self.kvs) <= position:
            before = self.kvs[-1] if self.kvs else zlib.crc32(self.tenant.encode())
            self.kvs.append(hash((before, self.tokens[len(self.kvs)])))
        return self.kvs[position]


@dataclass(slots=True)
class Queue:
    """The parts of the next step, and what the executor will write once it is granted."""

    commits: dict[int, Commit] = field(default_factory=dict)
    frees: dict[int, None] = field(default_factory=dict)
    forks: list[Fork] = field(default_factory=list)
    appends: dict[int, Append] = field(default_factory=dict)
    admits: list[Admit] = field(default_factory=list)
    fills: dict[int, int] = field(default_factory=dict)
    use: dict[int, int] = field(default_factory=dict)  # sequence -> tokens after the step's writes

    def parts(self) -> dict[str, Any]:
        return {
            "commits": list(self.commits.values()),
            "frees": list(self.frees),
            "forks": list(self.forks),
            "appends": list(self.appends.values()),
            "admits": list(self.admits),
            "fills": b"".join(struct.pack("<QQ", *pair) for pair in self.fills.items()),
        }

    def size(self) -> int:
        return (
            len(self.commits)
            + len(self.frees)
            + len(self.forks)
            + len(self.appends)
            + len(self.admits)
            + len(self.fills)
        )


class Naive:
    """An executor on one pool, and the judge of every reply."""

    def __init__(self, driver: Driver, *, exact_hash: bool = True) -> None:
        self.driver = driver
        self.exact_hash = exact_hash  # whether distinct content surely has distinct hashes
        self.ids = 0
        self.operations = 0
        self.pins: list[int] = []
        self.forget()

    def forget(self) -> None:
        """A new registration: nothing of the old one is left."""
        self.seqs: dict[int, Sequence] = {}
        self.device: dict[int, list[int | None]] = {}
        self.queue = Queue()
        self.prompts: dict[int, list[int]] = {}  # of queued admissions
        self.child_tokens: dict[int, int] = {}  # first token after a queued fork
        self.pins.clear()
        self.last: Granted | None = None

    @property
    def pool(self) -> Pool:
        return self.driver.pool

    @property
    def block_size(self) -> int:
        return self.driver.spec.block_size

    # ------------------------------------------------------------ parts of the next step

    def choose(self, index: int) -> Sequence | None:
        """A live sequence that the queue does not free."""
        alive = [seq for seq in self.seqs.values() if seq.id not in self.queue.frees]
        return alive[index % len(alive)] if alive else None

    def new_id(self) -> int:
        self.ids += 1
        return self.ids

    def commit(self, seq: Sequence, computed: int, extra: int) -> None:
        """Commit up to `computed`, sending `extra` ids more than needed."""
        if seq.id in self.queue.commits:
            return
        computed = max(seq.committed, min(computed, seq.written))
        upto = min(len(seq.tokens), max(computed, seq.sent) + extra)
        capacity = self.pool.total * self.block_size
        upto = max(seq.sent, min(upto, capacity))
        ids = pack(seq.tokens[seq.sent : upto])
        self.queue.commits[seq.id] = Commit(seq.id, computed, ids)

    def free(self, seq: Sequence) -> None:
        if seq.id in self.queue.appends or any(fork.parent == seq.id for fork in self.queue.forks):
            return
        self.queue.frees[seq.id] = None

    def fork(self, parent: Sequence, at: int) -> int:
        """Fork at `at`; where blocks were granted past a partial one and left empty, at a block's edge."""
        size = self.block_size
        at = min(at, parent.written)
        if -(-parent.written // size) < len(parent.blocks):
            at = min(at, parent.written // size * size)
        child = self.new_id()
        self.queue.forks.append(Fork(parent.id, child, at))
        return child

    def append(self, seq: Sequence, tokens: list[int], used: int) -> None:
        """Ask for slots for `tokens` after what is written; write only `used` of them when granted."""
        if seq.id in self.queue.appends or seq.id in self.queue.frees:
            return
        missing = seq.written + len(tokens) - len(seq.tokens)
        if missing > 0:
            seq.tokens += tokens[-missing:]
        self.queue.appends[seq.id] = Append(seq.id, seq.written + len(tokens))
        self.queue.use[seq.id] = seq.written + min(used, len(tokens))

    def append_to_child(self, child: int, at: int, token: int) -> None:
        """Ask for one slot for a sequence that the same step forks."""
        self.queue.appends[child] = Append(child, at + 1)
        self.queue.use[child] = at + 1
        self.child_tokens[child] = token

    def admit(
        self, tokens: list[int], chunk: int, tenant: str = "", group: int = 0, reuse: bool = True
    ) -> int:
        seq = self.new_id()
        self.queue.admits.append(Admit(seq, pack(tokens), chunk, tenant, group, reuse))
        self.prompts[seq] = tokens
        return seq

    def fill(self, seq: Sequence) -> None:
        self.queue.fills[seq.id] = seq.written

    def write(self, seq: Sequence, tokens: list[int]) -> None:
        """Decode inside the sequence's own room, which needs no message."""
        if seq.id in self.queue.appends:
            return
        for token in tokens:
            if seq.written >= seq.room:
                break
            if seq.written == len(seq.tokens):
                seq.tokens.append(token)
            self._write(seq, seq.written + 1)
            self.operations += 1

    # ------------------------------------------------------------ the device

    def _write(self, seq: Sequence, upto: int) -> None:
        owners: dict[int, int] = {}
        for other in self.seqs.values():
            for block in other.blocks:
                owners[block] = owners.get(block, 0) + 1
        for position in range(seq.written, upto):
            block = seq.blocks[position // self.block_size]
            must(block != 0, "sequence %s writes to the null block", seq.id)
            must(
                owners[block] == 1, "sequence %s writes to block %s, which is shared", seq.id, block
            )
            must(self.pool.nodes[block] is None, "sequence %s writes to sealed %s", seq.id, block)
            slots = self.device.setdefault(block, [None] * self.block_size)
            slots[position % self.block_size] = seq.kv(position)
        seq.written = max(seq.written, upto)

    # ------------------------------------------------------------ sending, and judging the reply

    def send(self) -> Granted:
        """Send the queue as one step, do what the reply grants, and verify everything."""
        queue, self.queue = self.queue, Queue()
        pool = self.pool
        grants = list(pool.grants)
        cached_before = {
            block: (stamp, pool.nodes[block])
            for lru in (pool.common, *pool.reserved.values())
            for block, stamp in lru.items()
        }
        best = self._best_hit(queue)
        before = {seq.id: list(seq.blocks) for seq in self.seqs.values()}
        reply = self.driver.step(**queue.parts())
        self.operations += max(1, queue.size())
        self.last = reply
        refused = {refusal.seq for refusal in reply.refused}

        for commit in queue.commits.values():
            seq = self.seqs[commit.seq]
            seq.committed = commit.computed
            seq.sent += len(commit.tokens) // 4
        self._fork(queue)
        self.take(reply)
        for seq_id in queue.frees:
            del self.seqs[seq_id]
        self._admit(queue, reply, best)
        for seq_id in refused & before.keys():
            kept = self.seqs[seq_id].blocks
            must(len(kept) == len(before[seq_id]), "a refused append changed %s", kept)

        granted = {
            block
            for block in range(1, len(pool.grants))
            if pool.grants[block] != (grants[block] if block < len(grants) else 0)
        }
        for block in granted:
            rise = pool.grants[block] - (grants[block] if block < len(grants) else 0)
            must(rise == 1, "block %s was handed out %s times in one step", block, rise)
            self.device[block] = [None] * self.block_size  # its old content is anybody's guess
        self._copy(reply, granted)
        for append in queue.appends.values():
            if append.seq not in refused:
                seq = self.seqs[append.seq]
                seq.room = len(seq.blocks) * self.block_size
                self._write(seq, queue.use[append.seq])
        for admitted in reply.admitted:
            self._write(self.seqs[admitted.seq], self.seqs[admitted.seq].room)
            self.seqs[admitted.seq].room = len(admitted.blocks) * self.block_size
        self._judge_evictions(cached_before)
        self.verify()
        return reply

    def take(self, reply: Granted) -> None:
        """Apply what a reply says of tables: merges found after the last one too."""
        for change in reply.changes:
            table = self.seqs[change.seq].blocks
            must(change.index <= len(table), "change %s leaves a hole in %s", change, table)
            table[change.index : change.index + len(change.blocks)] = change.blocks

    def _fork(self, queue: Queue) -> None:
        for fork in queue.forks:
            parent = self.seqs[fork.parent]
            tokens = parent.tokens[: fork.at]
            if fork.child in self.child_tokens:
                tokens.append(self.child_tokens.pop(fork.child))
            self.seqs[fork.child] = Sequence(
                fork.child,
                parent.tenant,
                tokens,
                written=fork.at,
                committed=min(parent.committed, fork.at),
                sent=min(parent.sent, fork.at),
                room=-(-fork.at // self.block_size) * self.block_size,
            )
            if fork.at % self.block_size:
                self.seqs[fork.child].room = fork.at
                if fork.at > (len(parent.blocks) - 1) * self.block_size:
                    parent.room = parent.written

    def _admit(self, queue: Queue, reply: Granted, best: int | None) -> None:
        done = {admitted.seq: admitted for admitted in reply.admitted}
        refused = {refusal.seq for refusal in reply.refused}
        groups: dict[int, set[bool]] = {}
        for item in queue.admits:
            tokens = self.prompts.pop(item.seq)
            must((item.seq in done) != (item.seq in refused), "%s is not decided", item.seq)
            if item.group:
                groups.setdefault(item.group, set()).add(item.seq in done)
            if item.seq not in done:
                continue
            admitted = done[item.seq]
            must(admitted.computed < len(tokens), "all %s tokens were hit", len(tokens))
            must(item.reuse or not admitted.computed, "a hit nobody wanted: %s", admitted)
            slots = min(admitted.computed + item.chunk, len(tokens))
            must(len(admitted.blocks) == -(-slots // self.block_size), "%s for %s", admitted, slots)
            if best is not None:
                whole = best // self.block_size * self.block_size
                must(admitted.computed in (best, whole), "hit %s of %s", admitted.computed, best)
            self.seqs[item.seq] = Sequence(
                item.seq,
                item.tenant,
                tokens,
                written=admitted.computed,
                committed=admitted.computed,
                sent=len(tokens),
                room=slots,
                blocks=list(admitted.blocks),
            )
        for group, outcomes in groups.items():
            must(len(outcomes) == 1, "group %s was admitted in part", group)

    def _copy(self, reply: Granted, granted: set[int]) -> None:
        sources = {copy.source for copy in reply.copies}
        targets = [copy.target for copy in reply.copies]
        must(len(set(targets)) == len(targets), "a block is copied to twice: %s", reply.copies)
        must(not sources & set(targets), "a copy's target is a source: %s", reply.copies)
        must(not sources & granted, "a source was handed out in its own step: %s", reply.copies)
        must(set(targets) <= granted, "a copy goes to a block in use: %s", reply.copies)
        for copy in reply.copies:
            self.device[copy.target] = list(self.device[copy.source])

    def _judge_evictions(self, before: dict[int, tuple[int, Node | None]]) -> None:
        """Whoever stayed cached was cached later than whoever was evicted."""
        pool = self.pool
        if pool.reserved:
            return
        evicted = [
            stamp for block, (stamp, node) in before.items() if pool.nodes[block] is not node
        ]
        stayed = [stamp for block, (stamp, _) in before.items() if pool.common.get(block) == stamp]
        if evicted and stayed:
            must(max(evicted) < min(stayed), "a younger block was evicted before an older one")

    def _best_hit(self, queue: Queue) -> int | None:
        """What a lone admission should hit by comparing it with every sealed prefix; None: cannot say."""
        if queue.commits or queue.appends or len(queue.admits) != 1 or not self.exact_hash:
            return None
        item = queue.admits[0]
        if not item.reuse:
            return None
        prompt = self.prompts[item.seq][:-1]
        best = 0
        for node in self.pool.nodes:
            if node is None or node.parent is None or node.root.tenant != item.tenant:
                continue
            if len(list(node.parent.offspring())) > MOST_SIBLINGS:
                return None  # the scan is bounded
            path = path_of(node)
            shared = 0
            while shared < min(len(path), len(prompt)) and path[shared] == prompt[shared]:
                shared += 1
            best = max(best, shared)
        return best

    # ------------------------------------------------------------ the state between messages

    def verify(self) -> None:
        pool = self.pool
        must(pool.sequences.keys() == self.seqs.keys(), "other sequences are alive")
        for seq in self.seqs.values():
            table = pool.sequences[seq.id]
            told = list(seq.blocks)
            for change in pool.late:
                if change.seq == seq.id:
                    told[change.index : change.index + len(change.blocks)] = change.blocks
            must(table.blocks == told, "%s: memd %s, we %s", seq.id, table.blocks, told)
            for blocks in (seq.blocks, told):
                for position in range(seq.written):
                    found = self.device[blocks[position // self.block_size]][
                        position % self.block_size
                    ]
                    must(found == seq.kv(position), "sequence %s misreads %s", seq.id, position)
            if self.exact_hash:
                for block in told[: seq.committed // self.block_size]:
                    must(pool.nodes[block] is not None, "%s is committed, not sealed", block)
        for block, node in enumerate(pool.nodes):
            if node is not None:
                content = Sequence(0, node.root.tenant, path_of(node))
                start = len(content.tokens) - self.block_size
                for slot in range(self.block_size):
                    found = self.device[block][slot]
                    must(found == content.kv(start + slot), "sealed block %s changed", block)

    def pin(self, index: int) -> None:
        sealed = [block for block, node in enumerate(self.pool.nodes) if node is not None]
        if sealed:
            block = sealed[index % len(sealed)]
            self.driver.memory.pin(self.driver.spec.name, block, self.driver.now)
            self.pins.append(block)
            self.operations += 1
            self.driver.memory.check()

    def unpin(self, index: int) -> None:
        if self.pins:
            block = self.pins.pop(index % len(self.pins))
            self.driver.memory.unpin(self.driver.spec.name, block, self.driver.now)
            self.operations += 1
            self.driver.memory.check()

    def refused(self, **bad: Any) -> Rejected:
        """Send the queue with something bad in it: refused whole, and nothing has changed."""
        parts = self.queue.parts()
        for name, value in bad.items():
            parts[name] = parts[name] + value
        self.operations += 1
        return self.driver.rejected(**parts)


def path_of(node: Node) -> list[int]:
    """All tokens from the tenant's root to the end of this node."""
    path: list[int] = []
    at: Node | None = node
    while at is not None:
        path[:0] = struct.unpack(f"<{len(at.tokens) // 4}I", at.tokens)
        at = at.parent
    return path
