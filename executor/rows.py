"""The rows of a plan: token ids, positions, tables and draws, once all of them are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from executor.plan import Draw, Row
from executor.request import Group, Sequence


def build(
    entries: list[tuple[Sequence, int, int]],
    refused: Iterable[int],
    sequences: Mapping[int, Sequence],
) -> list[Row]:
    """Rows of those that still run; what they will have computed is counted from now on.

    A sequence that ended or started over since it was proposed has no row, nor has any member of a group
    one of whose members got no block.

    Args:
        entries: sequence, its id when it was proposed, tokens to compute.
        refused: ids memd refused something for.
        sequences: the unfinished ones, by id.
    """
    stuck = {seq.group for seq_id in refused if (seq := sequences.get(seq_id)) is not None}
    rows = []
    for seq, seq_id, count in entries:
        if seq_id not in sequences or (stuck and seq.group in stuck):
            continue
        group, start = seq.group, seq.computed
        end = seq.computed = start + count
        draws: tuple[Draw, ...] = ()
        if end == len(seq.tokens):
            # The first tokens of all choices are drawn from the lead's row; then each has its own.
            drawing = (seq,) if group.together else group.live
            draws = tuple([_draw(member, group) for member in drawing])
        rows.append(Row(seq_id, start, seq.tokens[start:end], seq.blocks, draws))
    return rows


def _draw(seq: Sequence, group: Group) -> Draw:
    seq.pending = True
    early = group.ends and len(seq.output) < group.sampling.min_tokens
    return Draw(
        seq.id,
        seq.choice,
        len(seq.tokens),
        group.sampling,
        group.prompt,
        seq.output,
        group.ends if early else (),
    )
