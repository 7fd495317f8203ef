"""What one engine step computes, as data: the runner reads nothing else.

A plan can be dumped, replayed and compared. (Structs, because building frozen dataclasses cost more than all
else the scheduler does in a step.) Rows hold flat tokens, so a chunk of a prompt, a whole prompt
and a single decoded token are the same thing: tokens at consecutive positions of one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

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


class Plan(Struct, frozen=True, gc=False):
    """One step. Copies are made first, then all rows are computed together, then draws are made."""

    number: int  # of the memd step that granted it
    rows: list[Row] = []
    copies: list[Copy] = []


class Drawn(Struct, frozen=True, gc=False):
    """One token drawn. `token` is -1 when the logits were not finite: the request must fail."""

    seq: int
    token: int
    logprob: float = (
        0.0  # natural log of the model's own distribution; when logprobs were asked for
    )
    top: tuple[tuple[int, float], ...] = ()  # (id, logprob), best first
