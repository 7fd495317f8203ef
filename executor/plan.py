"""What one engine step computes, as data: the runner reads nothing else.

A plan can be dumped, replayed and compared. (Structs, because building frozen dataclasses cost more than all
else the scheduler does in a step.) Rows hold flat tokens, so a chunk of a prompt, a whole prompt
and a single decoded token are the same thing: tokens at consecutive positions of one sequence.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from msgspec import Struct

from wire.memory import Copy
from wire.sampling import Sampling


class Draw(Struct, frozen=True, gc=False):
    """One token to be drawn from the logits at a row's last position."""

    seq: int  # the sequence that gets the token (a group's first draws come from its lead's row)
    choice: int  # index of the choice in its group: part of the key of the random draw
    position: int  # of the token drawn, counted from the prompt's first token: part of the key
    sampling: Sampling
    prompt: Sequence[int]  # token ids, for the repetition penalty
    output: Sequence[int]  # token ids generated so far, for penalties and min_tokens
    forbidden: tuple[
        int, ...
    ] = ()  # ids that may not be drawn yet: end and stop ids before min_tokens


Ids: TypeAlias = "array[int]"  # token ids, or positions: signed, of 32 bits
UNKNOWN = -1  # in the place of a token that the step before is still to draw


class Row(Struct, frozen=True, gc=False):
    """Consecutive tokens of one sequence: computed, written to KV, attended causally."""

    seq: int
    start: int  # position of tokens[0]; positions below it are in KV already
    tokens: list[int]  # at least one
    # Block table; ceil((start + len(tokens)) / block_size) entries or more. A list is never changed once it
    # is in a row, so whoever has seen it need not look at its entries again.
    blocks: list[int]
    draws: tuple[Draw, ...] = ()  # empty: a chunk whose sequence has more tokens to come


class Members(Struct, frozen=True, gc=False):
    """Who is in the lanes of a step, in order: what stays the same as long as nobody comes or goes."""

    names: list[int]  # sequences
    offsets: list[int]  # the token of each in step `g` is at position offset + g
    choices: bytes  # the index of each in its group
    samplings: list[Sampling]
    prompts: list[list[int]]
    # For what goes to gateways: of whom each sequence's request is, and its number there.
    peers: list[bytes]
    ids: bytes  # uint64


class Tables(Struct, frozen=True, gc=False):
    """The block tables of lanes, as `Row.blocks` each."""

    version: int  # rises by one with each of them
    blocks: list[list[int]]
    changed: list[int]  # at these places it differs from the version before, of the same members


class Lanes(Struct, frozen=True, gc=False):
    """Rows of one token whose sequences draw the next one from it, and ask for nothing but that token.

    In columns, because in most steps most sequences are like that. Lists are never changed, but for `tokens`.
    """

    members: Members
    step: int  # rises by one with each step that has lanes
    tables: Tables
    tokens: Ids  # empty while the step before is still to draw them

    def __len__(self) -> int:
        return len(self.members.names)

    def start(self, place: int) -> int:
        """Position of a token."""
        return self.members.offsets[place] + self.step

    def rows(self) -> list[Row]:
        """The same as rows. Draws have no output: nothing is asked that needs it."""
        members = self.members
        columns = zip(
            members.names,
            members.choices,
            members.samplings,
            members.prompts,
            map(self.start, range(len(self))),
            self.tables.blocks,
            self.tokens or [UNKNOWN] * len(self),
            strict=True,
        )
        return [
            Row(name, start, [token], table, (Draw(name, choice, start + 1, sampling, prompt, ()),))
            for name, choice, sampling, prompt, start, table, token in columns
        ]


class Plan(Struct, frozen=True, gc=False):
    """One step. Copies are made first, then all rows are computed together, then draws are made."""

    number: int  # of the memd step that granted it
    others: list[Row] = []  # that are not in lanes
    copies: list[Copy] = []
    lanes: Lanes | None = None

    @property
    def rows(self) -> list[Row]:
        """All rows, lanes first."""
        return self.others if self.lanes is None else self.lanes.rows() + self.others

    @property
    def computes(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.others or self.copies) or self.lanes is not None

    @property
    def tokens(self) -> int:
        """Computed in all."""
        lanes = len(self.lanes) if self.lanes is not None else 0
        return lanes + sum([len(row.tokens) for row in self.others])


class Drawn(Struct, frozen=True, gc=False):
    """One token drawn; a runner gives one for each draw, lanes first, then rows in order, as a list or as
    `Results`. `token` is -1 when the logits were not finite: the request must fail."""

    seq: int
    token: int
    logprob: float = (
        0.0  # natural log of the model's own distribution; when logprobs were asked for
    )
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), best first


class Results(Struct, frozen=True, gc=False):
    """What a plan drew, with the tokens of its lanes in a column: most of it is not looked at one by one."""

    lanes: Sequence[int]  # their sequences
    tokens: Ids  # of lanes
    others: list[Drawn]  # of all other draws

    def __iter__(self) -> Iterator[Drawn]:
        yield from map(Drawn, self.lanes, self.tokens)
        yield from self.others

    def __len__(self) -> int:
        return len(self.tokens) + len(self.others)

    def __getitem__(self, place: int) -> Drawn:
        return list(self)[place]


Draws: TypeAlias = list[Drawn] | Results


def of_lanes(drawn: Draws, count: int) -> tuple[Ids, list[Drawn]]:
    """The tokens of so many lanes, and all other draws."""
    if isinstance(drawn, Results):
        return drawn.tokens, drawn.others
    return array("i", [one.token for one in drawn[:count]]), drawn[count:]
