"""Block tables as memd made them: its answer applied to the executor's copies."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from executor.proposal import Proposal
from executor.request import Sequence
from wire.memory import Change


def apply(
    proposal: Proposal,
    changes: list[Change],
    refused: Container[int],
    sequences: Mapping[int, Sequence],
    block_size: int,
    moved: Callable[[Sequence], None],
) -> list[int]:
    """Forks, changes and appends of a granted step.

    Args:
        proposal: what was asked.
        changes: in the order memd made them; a fork's child gets its whole table by one.
        refused: ids of appends memd did not do; a fork takes no block and is never refused.
        sequences: the unfinished ones, by id.
        moved: told of everyone in a lane whose table is another one.

    Returns:
        Ids of children that memd has made for sequences that ended meanwhile: to be freed.
    """
    orphans: list[int] = []
    for child, child_id in proposal.forked:
        if child_id in sequences:
            child.held = True
        else:
            orphans.append(child_id)
    for change in changes:
        if (seq := sequences.get(change.seq)) is not None:
            table = seq.blocks.copy()  # rows have the old one
            table[change.index : change.index + len(change.blocks)] = change.blocks
            seq.blocks = table
            if seq.lane >= 0:
                moved(seq)
    for _, _, seq, seq_id, _ in proposal.growing:
        if seq.id == seq_id and seq_id not in refused:
            seq.room = len(seq.blocks) * block_size
    return orphans
