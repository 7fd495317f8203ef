"""memd's core: `state, request -> state, reply`. No socket, no clock, no log, no randomness.

`Memory` decides who is speaking (instance, generation, epoch, step number, lease) and hands valid steps to
`memd/steps.py`. A message that cannot be obeyed is answered with `Rejected` and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from memd import invariants, snapshot, steps
from memd.journal import Journal
from memd.leases import Ended, Leases, Reason
from memd.pool import Pool
from wire.errors import Code, Refused
from wire.memory import (
    PROTOCOL,
    Goodbye,
    Granted,
    MemoryCodec,
    Register,
    Registered,
    Rejected,
    Reply,
    Request,
    Step,
    Usage,
)

MOST_POOLS = 64  # registered at once


class Memory:
    """All pools of one memd.

    A pool lives as long as its registration: when the lease ends, or the executor says goodbye or registers
    again, the pool goes with its tables, its index and its last reply, because its memory goes too.

    Args:
        boot_id: random per start.
        epoch: rises with every start.
        key: secret of the prefix hash, at most 64 bytes.
        lease_ms: how long a registration outlives its last valid message.
        reserves: tenant -> share of each pool's blocks that its cached prefixes keep against other tenants.
        hash_bits: a test hook: cut the prefix hash so that collisions happen.
        spare: a test hook: blocks each pool keeps free; by default a small share of it.
        journal_size: most inputs remembered.

    Raises:
        ValueError: a share below 0, or shares of 1 or more together, or hash_bits outside 1..256.
    """

    def __init__(
        self,
        *,
        boot_id: str,
        epoch: int,
        key: bytes,
        lease_ms: int = 3000,
        reserves: Mapping[str, float] | None = None,
        hash_bits: int = 256,
        spare: int = -1,
        journal_size: int = 10_000,
    ) -> None:
        shares = dict(reserves or {})
        if any(share < 0 for share in shares.values()) or sum(shares.values()) >= 1:
            raise ValueError(
                f"reserves {shares}: shares must be 0 or more and less than 1 together"
            )
        if not 1 <= hash_bits <= 256:
            raise ValueError(f"hash_bits {hash_bits}: must be 1 to 256")
        self.boot_id = boot_id
        self.epoch = epoch
        self.lease_ms = lease_ms
        self._key = key
        self._reserves = shares
        self._hash_bits = hash_bits
        self._spare = spare
        self._generation = 0  # of the last registration
        self._pools: dict[str, Pool] = {}
        self._by_generation: dict[int, Pool] = {}
        self.leases = Leases(lease_ms / 1000)
        self._ended: list[Ended] = []
        self._unsettled: Pool | None = None  # granted a step that is not finished
        self.journal = Journal(journal_size)
        self._encode = MemoryCodec().encode

    @property
    def pools(self) -> Mapping[str, Pool]:
        """By name, with every step finished."""
        self.settle()
        return MappingProxyType(self._pools)

    # ------------------------------------------------------------ messages

    def handle(self, now: float, request: Request, packed: bytes | None = None) -> Reply:
        """Answer one message, and finish what it began. Never raises for a request that was decoded."""
        reply = self.answer(now, request, packed)
        self.settle()
        return reply

    def settle(self) -> None:
        """Finish the step answered last. Whatever comes next does this first, so the state is the same
        function of the inputs whenever it is called; a server calls it when the answer has gone."""
        pool, self._unsettled = self._unsettled, None
        if pool is not None:
            steps.settle(pool)

    def answer(self, now: float, request: Request, packed: bytes | None = None) -> Reply:
        """The reply to one message; what no reply depends on is left to `settle`.

        A `Goodbye` is answered by a `Granted` of number 0.

        Args:
            now: seconds on any clock that never goes back.
            packed: the request as it came, to spare encoding it again for the journal.
        """
        if self._unsettled is not None:
            self.settle()
        self.journal.add(now, "request", packed or self._encode(request))
        match request:
            case Step():
                return self._step(now, request)
            case Register():
                return self._register(now, request)
            case Goodbye():
                return self._goodbye(now, request)

    def _reject(self, number: int, code: Code, message: str) -> Rejected:
        return Rejected(self.boot_id, self.epoch, number, code, message)

    def _register(self, now: float, request: Register) -> Reply:
        major, spec = request.protocol[0], request.pool
        if major != PROTOCOL[0]:
            return self._reject(
                0,
                Code.PROTOCOL,
                f"protocol {major}.{request.protocol[1]} is not understood; memd speaks "
                f"{PROTOCOL[0]}.{PROTOCOL[1]}: run the same release on both sides",
            )
        old = self._pools.get(spec.name)
        if old is not None and not self.leases.alive(old.generation, now):
            self._end(old, "lease")
            old = None
        if old is not None and old.instance != request.instance:
            left = self.leases.remaining(old.generation, now)
            return self._reject(
                0,
                Code.POOL_BUSY,
                f"pool {spec.name} is held by instance {old.instance} for another {left:.1f} s unless it "
                "renews; stop it, wait, or take another pool name",
            )
        if old is None and len(self._pools) >= MOST_POOLS:
            return self._reject(
                0, Code.OVERLOADED, f"{MOST_POOLS} pools are registered, which is the most; end one"
            )
        if old is not None:
            self._end(old, "replaced")
        self._generation += 1
        pool = Pool(
            spec,
            generation=self._generation,
            instance=request.instance,
            secret=self._key,
            reserves=self._reserves,
            hash_bits=self._hash_bits,
            spare=self._spare,
        )
        self._pools[spec.name] = self._by_generation[pool.generation] = pool
        self.leases.renew(pool.generation, now)
        return Registered(
            self.boot_id, self.epoch, request.instance, pool.generation, self.lease_ms
        )

    def _step(self, now: float, step: Step) -> Reply:
        pool = self._by_generation.get(step.generation)
        if pool is not None and not self.leases.alive(pool.generation, now):
            self._end(pool, "lease")
            pool = None
        if pool is None or pool.instance != step.instance or step.epoch != self.epoch:
            return self._reject(
                step.number,
                Code.FENCED,
                f"instance {step.instance} holds no lease of generation {step.generation} in epoch "
                f"{step.epoch} (memd's epoch is {self.epoch}); drop every block and register again",
            )
        if step.number != pool.number + 1:
            return self._out_of_order(now, pool, step.number)
        problem = steps.problem(pool, step)
        if problem is not None:
            return self._reject(step.number, *problem)
        self.leases.renew(pool.generation, now)
        changes, copies, admitted, refused = steps.apply(pool, step)
        self._unsettled = pool
        pool.number = step.number
        pool.reply = Granted(
            self.boot_id,
            self.epoch,
            step.number,
            steps.usage(pool),
            changes,
            copies,
            admitted,
            refused,
        )
        return pool.reply

    def _out_of_order(self, now: float, pool: Pool, number: int) -> Reply:
        if number == pool.number and pool.reply is not None:
            self.leases.renew(pool.generation, now)
            return pool.reply
        if number <= pool.number:
            return self._reject(
                number, Code.STALE, f"step {number} is over; the last one answered is {pool.number}"
            )
        return self._reject(
            number,
            Code.GAP,
            f"step {number} came after step {pool.number}: one was lost; register again",
        )

    def _goodbye(self, now: float, request: Goodbye) -> Reply:
        pool = self._by_generation.get(request.generation)
        if pool is not None and not self.leases.alive(pool.generation, now):
            self._end(pool, "lease")
            pool = None
        if pool is None or pool.instance != request.instance:
            return self._reject(
                0,
                Code.FENCED,
                f"instance {request.instance} holds no lease of generation {request.generation}; "
                "there is nothing to give back",
            )
        self._end(pool, "goodbye")
        return Granted(self.boot_id, self.epoch, 0, Usage(0, 0, 0, 0, 0, 0, 0))

    # ------------------------------------------------------------ time

    def tick(self, now: float) -> list[Ended]:
        """End expired leases; returns every registration that ended since the last tick, for any reason."""
        self.settle()
        expired = self.leases.expired(now)
        if expired:
            self.journal.add(now, "tick", b"")
        for generation in expired:
            self._end(self._by_generation[generation], "lease")
        ended, self._ended = self._ended, []
        return ended

    def _end(self, pool: Pool, reason: Reason) -> None:
        del self._pools[pool.name], self._by_generation[pool.generation]
        self.leases.end(pool.generation)
        self._ended.append(
            Ended(
                pool.name,
                pool.instance,
                pool.generation,
                reason,
                len(pool.sequences),
                pool.counts().used,
            )
        )

    # ------------------------------------------------------------ an operator's actions

    def pin(self, pool: str, block: int, now: float = 0.0) -> None:
        """Keep a sealed block and the prefix before it; the pin ends with `unpin` or with the pool.

        Raises:
            Refused: there is no such pool, or the block is not sealed.
        """
        if not self._named(pool).pin(block):
            raise Refused(
                Code.INVALID,
                f"block {block} of pool {pool} is not a sealed prefix block, so it cannot be pinned",
            )
        self.journal.add(now, "pin", f"{block} {pool}".encode())

    def unpin(self, pool: str, block: int, now: float = 0.0) -> None:
        """Undo one `pin` of the same block.

        Raises:
            Refused: there is no such pool, or the block has no pin of its own.
        """
        if not self._named(pool).unpin(block):
            raise Refused(Code.INVALID, f"block {block} of pool {pool} has no pin of its own")
        self.journal.add(now, "unpin", f"{block} {pool}".encode())

    def reset_cache(self, pool: str, now: float = 0.0) -> int:
        """Give up every cached prefix of an idle pool; returns how many blocks became free.

        Raises:
            Refused: there is no such pool, or sequences or pins use it.
        """
        held = self._named(pool)
        if held.sequences or held.pins:
            raise Refused(
                Code.POOL_BUSY,
                f"pool {pool} has {len(held.sequences)} live sequences and {len(held.pins)} pinned blocks; "
                "its cache can be reset when it has none",
            )
        self.journal.add(now, "reset", pool.encode())
        return held.reset_cache()

    def _named(self, pool: str) -> Pool:
        held = self.pools.get(pool)
        if held is None:
            raise Refused(
                Code.INVALID, f"no pool is named {pool}; there are: {sorted(self._pools)}"
            )
        return held

    # ------------------------------------------------------------ proof

    def check(self) -> None:
        """Verify every invariant of every pool; takes time in proportion to what they hold.

        Raises:
            Broken: with one line for each thing that is wrong.
        """
        self.settle()
        found = [line for pool in self._pools.values() for line in invariants.broken(pool)]
        if {pool.generation: pool for pool in self._pools.values()} != self._by_generation:
            found.append("pools by name and by generation differ")
        if found:
            raise invariants.Broken(found)

    def digest(self) -> bytes:
        """32 bytes that are equal exactly for equal states, eviction order and last replies included."""
        self.settle()
        return snapshot.digest(
            [
                self.boot_id,
                self.epoch,
                self._generation,
                [
                    [self.leases.deadline(pool.generation), snapshot.state(pool)]
                    for pool in self._pools.values()
                ],
            ]
        )
