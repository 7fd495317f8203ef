"""A test's way to talk to a `Memory`: short calls, and the full check after every message."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

from memd.core import Memory
from memd.pool import Pool
from wire.memory import (
    Admit,
    Append,
    Commit,
    Fork,
    Granted,
    PoolSpec,
    Register,
    Registered,
    Rejected,
    Reply,
    Step,
)

ME = "a" * 32
OTHER = "b" * 32
KEY = b"a key for tests"


def pack(tokens: Iterable[int]) -> bytes:
    """Token ids as they travel."""
    ids = list(tokens)
    return struct.pack(f"<{len(ids)}I", *ids)


def spec(num_blocks: int = 11, block_size: int = 4, name: str = "p") -> PoolSpec:
    return PoolSpec(name, "model", "float32", block_size, num_blocks, 1024)


def memory(**kwargs: Any) -> Memory:
    given: dict[str, Any] = {"boot_id": "boot", "epoch": 7, "key": KEY}
    return Memory(**(given | kwargs))


class Driver:
    """One executor with one pool.

    Attributes:
        memory: the core under test.
        generation, number: of the registration, and of the last step sent.
        now: seconds; tests move it.
    """

    def __init__(
        self,
        num_blocks: int = 11,
        block_size: int = 4,
        *,
        under: Memory | None = None,
        instance: str = ME,
        name: str = "p",
        **kwargs: Any,
    ) -> None:
        self.memory = under if under is not None else memory(**kwargs)
        self.instance = instance
        self.spec = spec(num_blocks, block_size, name)
        self.now = 0.0
        self.generation = 0
        self.number = 0
        self.register()

    @property
    def pool(self) -> Pool:
        return self.memory.pools[self.spec.name]

    def register(self) -> Registered:
        reply = self.memory.handle(self.now, Register((1, 0), self.instance, self.spec))
        assert isinstance(reply, Registered), reply
        self.generation, self.number = reply.generation, 0
        return reply

    def send(self, **parts: Any) -> Reply:
        """Send the next step; the number rises only when it is granted."""
        step = Step(self.instance, self.generation, self.memory.epoch, self.number + 1, **parts)
        reply = self.memory.handle(self.now, step)
        if isinstance(reply, Granted):
            self.number += 1
        self.memory.check()
        return reply

    def step(self, **parts: Any) -> Granted:
        reply = self.send(**parts)
        assert isinstance(reply, Granted), reply
        return reply

    def rejected(self, **parts: Any) -> Rejected:
        """Send a step that must be refused whole, and see that nothing changed."""
        before = self.memory.digest()
        reply = self.send(**parts)
        assert isinstance(reply, Rejected), reply
        assert self.memory.digest() == before
        return reply

    def admit(
        self, seq: int, tokens: Sequence[int], chunk: int = 1 << 20, **kwargs: Any
    ) -> Granted:
        return self.step(admits=[Admit(seq, pack(tokens), chunk, **kwargs)])

    def commit(self, seq: int, computed: int, tokens: Sequence[int] = ()) -> Granted:
        return self.step(commits=[Commit(seq, computed, pack(tokens))])

    def append(self, seq: int, upto: int) -> Granted:
        return self.step(appends=[Append(seq, upto)])

    def fork(self, parent: int, child: int, at: int) -> Granted:
        return self.step(forks=[Fork(parent, child, at)])

    def free(self, *seqs: int) -> Granted:
        return self.step(frees=list(seqs))

    def cached(self, tokens: Sequence[int], seq: int) -> list[int]:
        """Run a sequence of these tokens to its end; returns the blocks it had."""
        blocks = self.admit(seq, tokens).admitted[0].blocks
        self.commit(seq, len(tokens))
        blocks = list(self.pool.sequences[seq].blocks)
        self.free(seq)
        return blocks

    def table(self, seq: int) -> list[int]:
        return list(self.pool.sequences[seq].blocks)
