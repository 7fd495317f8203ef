"""The rows of a plan: token ids, positions, tables and draws, once memd has granted them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from executor.plan import UNKNOWN, Draw, Row
from executor.request import Group, Sequence


def build(
    entries: list[tuple[Sequence, int, int]],
    refused: Iterable[int],
    sequences: Mapping[int, Sequence],
) -> list[Row]:
    """Rows of those that still run; what they will have computed is counted from now on.

    A sequence that ended or started over since it was proposed has no row, nor has any member of a group
    one of whose members got no block. A row's last token is UNKNOWN if it is still being drawn.

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
        tokens = seq.tokens[start:end]
        if len(tokens) < count:
            tokens.append(UNKNOWN)
        if end == len(seq.tokens) + seq.pending:
            # The first tokens of all choices are drawn from the lead's row; then each has its own.
            if group.together:
                draws = (_draw(seq, group),)
            else:
                draws = tuple([_draw(member, group) for member in group.live])
        rows.append(Row(seq_id, start, tokens, seq.blocks, draws))
    return rows


def fill(rows: list[Row], sequences: Mapping[int, Sequence]) -> list[Row]:
    """Put in the tokens that were unknown when the rows were built; whoever ended since has no row.

    Returns:
        The same list if nobody has.
    """
    ended = False
    for row in rows:
        if (seq := sequences.get(row.seq)) is None:
            ended = True
        elif row.tokens[-1] == UNKNOWN:
            row.tokens[-1] = seq.tokens[row.start + len(row.tokens) - 1]
    return [row for row in rows if row.seq in sequences] if ended else rows


def _draw(seq: Sequence, group: Group) -> Draw:
    ahead, seq.pending = seq.pending, seq.pending + 1
    early = group.ends and len(seq.output) + ahead < group.sampling.min_tokens
    return Draw(
        seq.id,
        seq.choice,
        len(seq.tokens) + ahead,
        group.sampling,
        group.prompt,
        seq.output,
        group.ends if early else (),
    )
