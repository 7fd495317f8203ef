"""One request: a group of sequences, the tokens they have, and the states the group may be in.

A sequence has tokens, and computed tokens that catch up with them; there is no prefill or decode phase.
Three counters say how far the key/value cache has come:

    written   the steps that ran have written this many tokens' KV
    computed  ... and the steps already granted will have, once they have run; written <= computed
    committed of `written`, what memd has been told of
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from wire.memory import Commit
from wire.sampling import Sampling


class State(StrEnum):
    """Where a group is in its life."""

    WAITING = "waiting"  # holds no blocks
    RUNNING = "running"  # its lead or all its unfinished sequences have block tables
    PREEMPTED = "preempted"  # just lost its blocks, on its way back to the queue
    FINISHED = "finished"  # done, failed or aborted


MOVES: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.RUNNING, State.FINISHED}),
    State.RUNNING: frozenset({State.PREEMPTED, State.FINISHED}),
    State.PREEMPTED: frozenset({State.WAITING}),
    State.FINISHED: frozenset(),
}


class IllegalMove(Exception):
    """A group was moved along an edge the transition table does not have: a bug of the scheduler."""

    def __init__(self, group: Group, to: State) -> None:
        super().__init__(
            f"request {group.id} cannot go from {group.state} to {to}; "
            f"before that: {', '.join(group.history) or 'nothing'}"
        )
        self.group = group
        self.to = to


def pack(tokens: list[int]) -> bytes:
    """Token ids as they travel: uint32, little-endian."""
    return array("I", tokens).tobytes()


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. Counts are in tokens from the prompt's first one."""

    group: Group = field(repr=False)
    choice: int
    tokens: list[int]  # prompt and output
    output: list[int] = field(default_factory=list)  # generated so far
    id: int = 0  # memd's name for it; a new one each time it starts over
    blocks: list[int] = field(default_factory=list)  # block table, replaced when it changes
    room: int = 0  # slots it may write without asking memd (wire.memory.Granted says which)
    computed: int = 0
    written: int = 0
    committed: int = 0
    known: int = 0  # token ids memd has
    pending: int = 0  # tokens that steps which were granted will draw, not known yet
    held: bool = False  # memd has a table for it
    lane: int = -1  # its place in `executor.decoding`; while it has one, what is above lags behind

    def start_over(self, new_id: int) -> None:
        """Forget all KV: the sequence begins again, under a new name, with the tokens it has."""
        self.id = new_id
        self.blocks = []
        self.room = self.computed = self.written = self.committed = self.known = self.pending = 0
        self.held = False

    def wanted(self) -> int:
        """Tokens it could have computed in the next step."""
        group = self.group
        if self.pending:
            if len(self.output) + 1 >= group.limit:
                return 0  # the token being drawn is its last: nothing follows
            return len(self.tokens) + 1 - self.computed
        return (len(self.tokens) if group.together else len(group.prompt)) - self.computed

    def untold(self, block_size: int) -> bool:
        """Whether memd has not heard of a full block of the prompt, which others may want at once. What is
        generated can wait until the sequence asks for a block or ends."""
        return self.committed // block_size < len(self.group.prompt) // block_size

    def commit(self, block_size: int) -> Commit | None:
        """What memd must hear of the KV written, or None while no further block is full."""
        if self.written // block_size <= self.committed // block_size:
            return None
        tokens = pack(self.tokens[self.known : self.written]) if self.known < self.written else b""
        self.committed = self.written
        self.known = max(self.known, self.written)
        return Commit(self.id, self.written, tokens)


@dataclass(slots=True, eq=False)
class Group:
    """A request and its sequences, which are scheduled and preempted together."""

    peer: bytes  # whose it is: identity of the gateway's socket
    id: int  # the gateway's number for it
    prompt: list[int]
    packed: bytes  # the prompt as it travels
    sampling: Sampling
    limit: int  # most tokens each choice may generate
    stops: frozenset[int]  # ids that end a choice
    ends: tuple[int, ...]  # ids that must not be drawn before min_tokens
    order: tuple[int, int]  # (priority, arrival): smaller goes first, everywhere
    tenant: str = ""
    deadline: float | None = None  # drop it if it has not started by then
    live: list[Sequence] = field(default_factory=list)  # unfinished members; the first leads
    state: State = State.WAITING
    together: bool = False  # all live members have tables; before, only the lead has
    arrived: float = 0.0  # when it was submitted, in seconds of the engine's clock
    queued: float = 0.0  # seconds until it was first admitted
    cached: int = -1  # prompt tokens found in the prefix index when first admitted; -1: not yet
    history: deque[str] = field(default_factory=lambda: deque(maxlen=8))

    @property
    def priority(self) -> int:
        return self.order[0]

    @property
    def restarted(self) -> bool:
        """Whether it ran before, so that coming back costs memory it is known to need."""
        return self.cached >= 0

    def move(self, to: State, why: str) -> None:
        """Go to another state.

        Raises:
            IllegalMove: the transition table has no such edge.
        """
        if to not in MOVES[self.state]:
            raise IllegalMove(self, to)
        self.history.append(f"{self.state}->{to} ({why})")
        self.state = to

    def opening(self) -> list[int]:
        """The tokens its lead is admitted with: the prompt alone while others will fork from it."""
        return self.prompt if len(self.live) > 1 else self.live[0].tokens

    def opening_bytes(self) -> bytes:
        """`opening`, packed; the prompt's bytes are kept as they came."""
        tokens = self.opening()
        return self.packed if len(tokens) == len(self.prompt) else pack(tokens)

    def blocks_held(self) -> int:
        """Blocks its tables name, shared ones once: at most this many come free with it."""
        if len(self.live) == 1:
            return len(self.live[0].blocks)
        return len({block for seq in self.live for block in seq.blocks})
