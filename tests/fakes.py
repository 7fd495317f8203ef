"""Stand-ins for a device and for memd's process, exact enough to prove that block tables are right.

`FakeRunner` is a model whose next token is a hash of all tokens before it, read back through the block table:
a wrong table, copy or a block that was never written raises, or changes the text. `LocalMemory` is memd's own
core behind the executor's client interface.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from executor.memory import Fenced, Idle
from executor.plan import Draw, Drawn, Plan, Row
from executor.proposal import Wants
from memd.core import Memory
from wire.memory import PROTOCOL, Goodbye, Granted, PoolSpec, Register, Registered, Rejected, Step

VOCAB = 1000
END = 0  # the fake model's end-of-text id


class WrongTable(AssertionError):
    """A row's block table does not lead to the row's own tokens."""


def extend(history: int, token: int) -> int:
    """The hash of a history with one more token."""
    data = history.to_bytes(8, "little") + token.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def next_token(history: int, choice: int, end_every: int) -> int:
    """What follows: a hash of the history, so choices differ and one in `end_every` is the end."""
    value = extend(history, VOCAB + choice)
    if end_every and value % end_every == 0:
        return END
    return 1 + value // 1000 % (VOCAB - 1)


def oracle(prompt: list[int], choice: int, limit: int, end_every: int = 0) -> list[int]:
    """The text of one choice, without any scheduler."""
    history = 0
    for token in prompt:
        history = extend(history, token)
    output: list[int] = []
    while len(output) < limit:
        token = next_token(history, choice, end_every)
        output.append(token)
        if token == END:
            break
        history = extend(history, token)
    return output


class FakeRunner:
    """Runs plans on a table of (block, slot) -> (token, hash of the history up to it)."""

    def __init__(self, block_size: int, *, end_every: int = 0, deep: bool = True) -> None:
        self.block_size = block_size
        self.end_every = end_every
        self.deep = deep  # False: look at the last slot only, for measuring time
        self.kv: dict[tuple[int, int], tuple[int, int]] = {}
        self.plans: list[Plan] = []
        self.prepared = 0
        self.broken: Callable[[Plan], None] = lambda plan: None  # may raise, for tests of failures
        self.bad_draws: set[int] = set()  # choices whose logits are not numbers

    def prepare(self, plan: Plan) -> None:
        self.prepared += 1

    def run(self, plan: Plan) -> list[Drawn]:
        self.plans.append(plan)
        self.broken(plan)
        copied = [
            ((copy.target, slot), self.kv.get((copy.source, slot)))
            for copy in plan.copies
            for slot in range(self.block_size)
        ]
        for place, content in copied:
            if content is None:
                self.kv.pop(place, None)
            else:
                self.kv[place] = content
        # All rows are written before any is read, as on a device.
        ends = [self._write(row) for row in plan.rows]
        for row in plan.rows:
            self._check(row)
        return [
            self._draw(draw, end)
            for row, end in zip(plan.rows, ends, strict=True)
            for draw in row.draws
        ]

    def _draw(self, draw: Draw, history: int) -> Drawn:
        if draw.choice in self.bad_draws:
            return Drawn(draw.seq, -1)
        return Drawn(draw.seq, next_token(history, draw.choice, self.end_every))

    def _place(self, row: Row, position: int) -> tuple[int, int]:
        block = row.blocks[position // self.block_size]
        if block == 0:
            raise WrongTable(f"sequence {row.seq} names the null block at {position}")
        return block, position % self.block_size

    def _write(self, row: Row) -> int:
        history = 0
        if row.start:
            found = self.kv.get(self._place(row, row.start - 1))
            if found is None:
                raise WrongTable(f"sequence {row.seq}: slot {row.start - 1} was never written")
            history = found[1]
        for position, token in enumerate(row.tokens, row.start):
            history = extend(history, token)
            self.kv[self._place(row, position)] = token, history
        return history

    def _check(self, row: Row) -> None:
        """The table reads back the row's own history, from the first token to its last."""
        if not self.deep:
            return
        history, tokens = 0, []
        for position in range(row.start + len(row.tokens)):
            found = self.kv.get(self._place(row, position))
            if found is None:
                raise WrongTable(f"sequence {row.seq}: slot {position} was never written")
            history = extend(history, found[0])
            if found[1] != history:
                raise WrongTable(f"sequence {row.seq}: slot {position} is of another history")
            tokens.append(found[0])
        if tokens[row.start :] != row.tokens:
            raise WrongTable(f"sequence {row.seq}: its tokens were overwritten in the same step")
        for draw in row.draws:
            # Draws in lanes have no output: there the text that comes of it must be right.
            known = [*draw.prompt, *draw.output]
            whole = len(known) if draw.output != () else len(tokens)
            if tokens[: len(known)] != known or not whole == draw.position == len(tokens):
                raise WrongTable(f"sequence {row.seq}: the history is not the request's")


class LocalMemory:
    """memd's core in this process. `now` moves a little with each message, and as tests say."""

    def __init__(self, blocks: int, block_size: int, *, key: bytes = b"k" * 32) -> None:
        self.core = Memory(boot_id="b0", epoch=1, key=key)
        self.now = 0.0
        self.lease = 3.0
        self.waited_us = 0
        self.asked: list[Wants] = []  # every step's
        self._key = key
        self._spec = PoolSpec("test", "hash-of-kv", "none", block_size, blocks + 1, 1)
        self._registered: Registered | None = None
        self._number = 0
        self._reply: Granted | Rejected | None = None

    def register(self, idle: Idle) -> None:
        reply = self.core.handle(self.now, Register(PROTOCOL, "a" * 32, self._spec))
        assert isinstance(reply, Registered)
        self._registered = reply
        self._number = 0

    def ask(self, wants: Wants) -> None:
        assert self._registered is not None
        assert self._reply is None, "two steps asked and none answered"
        self.now += 0.01
        self._number += 1
        self.asked.append(wants)
        step = Step(
            "a" * 32,
            self._registered.generation,
            self._registered.epoch,
            self._number,
            wants.commits,
            wants.frees,
            wants.forks,
            wants.appends,
            wants.admits,
            wants.fills,
        )
        reply = self.core.handle(self.now, step)
        assert isinstance(reply, Granted | Rejected)
        self._reply = reply

    def hear(self, most_ms: int) -> Granted | None:
        if not isinstance(self._reply, Granted):
            return None
        reply, self._reply = self._reply, None
        return reply

    def answer(self, idle: Idle) -> Granted:
        reply, self._reply = self._reply, None
        assert reply is not None
        if isinstance(reply, Rejected):
            if reply.code.value not in ("fenced", "stale_step", "step_gap"):
                raise AssertionError(f"memd rejected a step: {reply.code}: {reply.message}")
            raise Fenced(reply.message)
        return reply

    def renew(self) -> None:
        pass

    def stale(self) -> bool:
        return False

    def close(self) -> None:
        if self._registered is not None:
            goodbye = Goodbye("a" * 32, self._registered.generation)
            self.core.handle(self.now, goodbye)
            self._registered = None

    def restart(self) -> None:
        """memd is killed and comes back, knowing nothing."""
        self.core = Memory(boot_id=f"b{self.core.epoch}", epoch=self.core.epoch + 1, key=self._key)

    def used(self) -> int:
        """Blocks that some sequence holds."""
        return self.core.pools["test"].counts().used
