"""Who may enter, as a memory client of the executor's engine: memd's core, alone or behind a buddy allocator.

`Paged` is the product. `Contiguous` is what the paper compares with: its three Orcas reserve a contiguous
region for the whole life of a request before it may start. Both run the same engine, the same scheduler
and the same kernels on memd's block tables, so whatever differs comes from the memory policy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum

import msgspec
from msgspec import Struct

from bench.paper.buddy import Buddy
from bench.paper.workload import LONGEST, Request, pow2
from executor.memory import Idle
from executor.proposal import Wants
from executor.request import Group
from memd.core import Memory
from wire.errors import Code
from wire.memory import (
    PROTOCOL,
    Admit,
    Goodbye,
    Granted,
    PoolSpec,
    Refusal,
    Register,
    Registered,
    Step,
    Usage,
)

INSTANCE = "a" * 32
POOL = "paper"
LEASE = 3600.0  # seconds: there is nobody to lose it to


class Policy(StrEnum):
    """The paper's names."""

    PAGED = "paged"
    ORACLE = "oracle"  # reserves what the request will really use, which no real system knows
    POW2 = "pow2"  # reserves the prompt and the least power of two that holds the output
    MAX = "max"  # reserves the model's longest sequence


def reserved(policy: Policy, request: Request, longest: int = LONGEST) -> int:
    """Contiguous slots a policy asks for, before the allocator rounds.

    Raises:
        ValueError: the policy does not reserve.
    """
    match policy:
        case Policy.ORACLE:
            return request.length
        case Policy.POW2:
            return min(longest, request.prompt + pow2(request.output))
        case Policy.MAX:
            return longest
        case Policy.PAGED:
            raise ValueError("paged memory is not reserved")


class Split(Struct, frozen=True):
    """What the slots of a pool are used for, as the paper's Fig. 2 divides them; sums to the pool."""

    states: int  # hold keys and values of tokens
    reserved: int  # will hold tokens of requests that run now
    internal: int  # granted to requests that will never use them
    external: int  # neither, and lost to rounding by the allocator

    @property
    def slots(self) -> int:
        """All of them."""
        return self.states + self.reserved + self.internal + self.external


class Paged:
    """memd's core in this process, behind the client interface of the engine."""

    def __init__(
        self,
        blocks: int,
        block_size: int,
        clock: Callable[[], float],
        *,
        reuse: bool = True,
        block_bytes: int = 1,
    ) -> None:
        """
        Args:
            blocks: that can be granted.
            clock: in seconds; memd is told it.
            reuse: whether prompts may find cached prefixes.
        """
        self.core = Memory(
            boot_id="b", epoch=1, key=b"k" * 32, lease_ms=int(1000 * LEASE), journal_size=1
        )
        self.slots = blocks * block_size
        self.waited_us = 0
        self._size = block_size
        self._clock = clock
        self._reuse = reuse
        self._spec = PoolSpec(POOL, "paper", "none", block_size, blocks + 1, block_bytes)
        self._generation = 0
        self._number = 0
        self._reply: Granted | None = None

    @property
    def lease(self) -> float:
        return LEASE

    def register(self, idle: Idle) -> None:
        reply = self.core.handle(self._clock(), Register(PROTOCOL, INSTANCE, self._spec))
        if not isinstance(reply, Registered):
            raise RuntimeError(f"memd's core did not register the pool: {reply}")
        self._generation, self._number = reply.generation, 0

    def ask(self, wants: Wants) -> None:
        self._reply = self._step(wants)

    def hear(self, most_ms: int) -> Granted | None:
        """Never: so one thing is done after the other, and a simulated run is the same each time."""
        return None

    def answer(self, idle: Idle) -> Granted:
        reply, self._reply = self._reply, None
        if reply is None:
            raise RuntimeError("an answer was awaited and no step was asked")
        return reply

    def renew(self) -> None:
        pass

    def stale(self) -> bool:
        return False

    def close(self) -> None:
        self.core.handle(self._clock(), Goodbye(INSTANCE, self._generation))

    def split(self, running: list[Group]) -> Split:
        """What the pool holds; blocks that are free or only cached are free for others, so external."""
        used = self.core.pools[POOL].counts().used * self._size
        states = sum(seq.computed for group in running for seq in group.live)
        states = min(states, used)  # a request that ended is freed one step later
        return Split(states, 0, used - states, self.slots - used)

    def _step(self, wants: Wants) -> Granted:
        admits = wants.admits
        if not self._reuse:
            admits = [msgspec.structs.replace(admit, reuse=False) for admit in admits]
        self._number += 1
        reply = self.core.handle(
            self._clock(),
            Step(
                INSTANCE,
                self._generation,
                1,
                self._number,
                wants.commits,
                wants.frees,
                wants.forks,
                wants.appends,
                admits,
                wants.fills,
            ),
        )
        if not isinstance(reply, Granted):
            raise RuntimeError(f"memd's core refused step {self._number}: {reply}")
        return reply


class Contiguous(Paged):
    """A request is admitted when a buddy allocator has a region for all it reserves, first come first served.

    Beneath is memd's core with room for every request the allocator can admit, so that it never refuses.
    """

    def __init__(
        self,
        policy: Policy,
        slots: int,
        requests: Mapping[int, Request],
        block_size: int,
        sequences: int,
        clock: Callable[[], float],
        *,
        longest: int = LONGEST,
    ) -> None:
        """
        Args:
            slots: of the pool that is shared out.
            requests: by number.
            sequences: most that run at once.
            longest: the model's longest sequence, which `Policy.MAX` reserves.
        """
        super().__init__(
            blocks_beneath(slots, block_size, sequences), block_size, clock, reuse=False
        )
        self.slots = slots
        self.buddy = Buddy(slots)
        self._policy = policy
        self._requests = requests
        self._longest = longest
        self._regions: dict[int, tuple[int, Request]] = {}  # sequence -> start, whose
        self._given_back = 0

    def ask(self, wants: Wants) -> None:
        for seq in wants.frees:
            if region := self._regions.pop(seq, None):
                self.buddy.free(region[0])
                self._given_back += 1
        entering = self._enter(wants.admits)
        refused = [
            Refusal(admit.seq, Code.NO_BLOCKS if index == 0 else Code.BEHIND, 1, 0)
            for index, admit in enumerate(wants.admits[entering:])
        ]
        granted = self._step(msgspec.structs.replace(wants, admits=wants.admits[:entering]))
        # The scheduler asks again for the first in the queue once more blocks are free than when it was
        # refused. Here that must be: once a region has been given back.
        usage = granted.usage
        shown = Usage(usage.total, self._given_back, 0, usage.used, 0, 0, 0)
        self._reply = msgspec.structs.replace(
            granted, usage=shown, refused=granted.refused + refused
        )

    def _enter(self, admits: list[Admit]) -> int:
        """Take regions in order, until one is not to be had; how many were."""
        for index, admit in enumerate(admits):
            request = self._requests[int.from_bytes(admit.tokens[-4:], "little")]
            start = self.buddy.allocate(reserved(self._policy, request, self._longest))
            if start is None:
                return index
            self._regions[admit.seq] = (start, request)
        return len(admits)

    def split(self, running: list[Group]) -> Split:
        """Regions of requests that run; rounding to powers of two counts as external, as in the paper."""
        held = {seq.id: seq.computed for group in running for seq in group.live}
        states = future = internal = 0
        for seq, (_, request) in self._regions.items():
            done = held.get(seq, request.length)
            states += done
            future += request.length - done
            internal += reserved(self._policy, request, self._longest) - request.length
        return Split(states, future, internal, self.slots - states - future - internal)


def blocks_beneath(slots: int, block_size: int, sequences: int) -> int:
    """Blocks that hold whatever contiguous regions of `slots` can: every last block may be partly empty."""
    return -(-slots // block_size) + sequences


def client(
    policy: Policy,
    slots: int,
    requests: Mapping[int, Request],
    clock: Callable[[], float],
    *,
    block_size: int,
    sequences: int,
    longest: int = LONGEST,
    reuse: bool = True,
) -> tuple[Paged, int]:
    """The memory of a policy, and the blocks its scheduler may count on."""
    if policy is Policy.PAGED:
        blocks = slots // block_size
        return Paged(blocks, block_size, clock, reuse=reuse), blocks
    memory = Contiguous(policy, slots, requests, block_size, sequences, clock, longest=longest)
    return memory, blocks_beneath(slots, block_size, sequences)
