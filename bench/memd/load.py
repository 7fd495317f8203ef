"""An executor without a model: the messages a real one would send, for pools full of cached prefixes."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field

from wire.memory import (
    Admit,
    Append,
    Commit,
    Fork,
    Granted,
    PoolSpec,
    Register,
    Registered,
    Reply,
    Request,
    Step,
)

BLOCK = 16
START = 32  # tokens of a decoding sequence's prompt, at least
PROMPT = 161  # tokens of a prompt that is admitted: ShareGPT's mean
FILLER = 8192  # tokens of the prompts that fill the pool

Ask = Callable[[Request], Reply]


@dataclass
class Driver:
    """An executor without a model: it says what a real one would, and believes every answer."""

    ask: Ask
    blocks: int
    instance: str = field(default_factory=lambda: uuid.uuid4().hex)
    generation: int = 0
    epoch: int = 0
    number: int = 0
    next_seq: int = 1
    lengths: dict[int, int] = field(default_factory=dict)

    def register(self) -> None:
        spec = PoolSpec(f"pool-{self.blocks}", "bench", "bfloat16", BLOCK, self.blocks, 368_640)
        reply = self.ask(Register((1, 0), self.instance, spec))
        if not isinstance(reply, Registered):
            raise SystemExit(f"memd refused to register: {reply}")
        self.generation, self.epoch = reply.generation, reply.epoch

    def step(
        self,
        commits: list[Commit] | None = None,
        frees: list[int] | None = None,
        forks: list[Fork] | None = None,
        admits: list[Admit] | None = None,
    ) -> Granted:
        return self.send(self.message(commits, frees, forks, admits))

    def message(
        self,
        commits: list[Commit] | None = None,
        frees: list[int] | None = None,
        forks: list[Fork] | None = None,
        admits: list[Admit] | None = None,
        appends: list[Append] | None = None,
    ) -> Step:
        self.number += 1
        return Step(
            instance=self.instance,
            generation=self.generation,
            epoch=self.epoch,
            number=self.number,
            commits=commits or [],
            frees=frees or [],
            forks=forks or [],
            appends=appends or [],
            admits=admits or [],
        )

    def send(self, step: Step) -> Granted:
        reply = self.ask(step)
        if not isinstance(reply, Granted) or reply.refused:
            raise SystemExit(f"memd did not grant step {step.number}: {reply}")
        return reply

    def fill(self) -> None:
        """Leave every block cached, as in a daemon that has served for a while."""
        left = self.blocks - 1
        while left:
            tokens = min(FILLER, left * BLOCK)
            seq, ids = self.next_seq, _ids(self.next_seq, tokens)
            self.next_seq += 1
            self.step(admits=[Admit(seq, ids, tokens)])
            self.step(commits=[Commit(seq, tokens)], frees=[seq])
            left -= tokens // BLOCK

    def begin(self, count: int) -> None:
        """End what runs, and start `count` sequences whose blocks fill at different steps."""
        self.step(frees=list(self.lengths))
        self.lengths = {}
        for first in range(0, count, 256):
            admits = []
            for index in range(first, min(first + 256, count)):
                seq, length = self.next_seq, START + index % BLOCK
                self.next_seq += 1
                self.lengths[seq] = length
                admits.append(Admit(seq, _ids(seq, length), length))
            self.step(admits=admits)
            self.step(commits=[Commit(item.seq, item.chunk) for item in admits])

    def decode(self) -> Step:
        """The next step's message: one more token for every sequence."""
        commits, appends = [], []
        for seq, length in self.lengths.items():
            if length % BLOCK == 0:
                if length > START:
                    first = length - BLOCK
                    known = START + (seq - min(self.lengths)) % BLOCK
                    ids = _ids(seq, length)[max(first, known) * 4 :]
                    commits.append(Commit(seq, length, ids))
                appends.append(Append(seq, length + 1))
            self.lengths[seq] = length + 1
        return self.message(commits, appends=appends)

    def newcomer(self, like: int = 0) -> Admit:
        """A prompt nobody has, or the very prompt of the sequence `like`."""
        seq = self.next_seq
        self.next_seq += 1
        return Admit(seq, _ids(like or seq, PROMPT), PROMPT)


def _ids(seq: int, count: int) -> bytes:
    """Token ids nobody else has: prefixes of two sequences never meet."""
    return struct.pack(f"<{count}I", *((seq * 7919 + place) % 2**31 for place in range(count)))
