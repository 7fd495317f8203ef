"""Block tables as memd made them: its answer applied to the executor's copies."""

from __future__ import annotations

from collections.abc import Container, Mapping

from executor.proposal import Proposal
from executor.request import Sequence
from wire.memory import Change


def apply(
    proposal: Proposal,
    changes: list[Change],
    refused: Container[int],
    sequences: Mapping[int, Sequence],
    block_size: int,
) -> list[int]:
    """Forks, changes and appends of a granted step.

    memd may have merged a full block of a parent at commit, which comes before the fork, and copied the
    partial one at append, which comes after it. So a child takes its parent's full blocks as they are after
    all changes to the parent, and the partial block as it was before them.

    Args:
        proposal: what was asked.
        changes: in the order memd made them.
        refused: ids of appends and admissions memd did not do; a fork takes no block and is never refused.
        sequences: the unfinished ones, by id.

    Returns:
        Ids of children that memd has made for sequences that ended meanwhile: to be freed.
    """
    orphans: list[int] = []
    born: list[tuple[Sequence, Sequence, int, list[int]]] = []
    parents: dict[int, Sequence] = {}  # a parent may have ended: its changes still matter
    for parent, child, child_id in proposal.forked:
        if child_id not in sequences:
            orphans.append(child_id)
            continue
        full, tokens = divmod(len(parent.group.prompt), block_size)
        born.append((parent, child, full, parent.blocks[full : full + (tokens > 0)]))
        parents[parent.id] = parent
    young = {child.id for _, child, _, _ in born}
    for change in changes:
        if change.seq not in young:
            seq = sequences.get(change.seq) or parents.get(change.seq)
            if seq is not None:
                seq.blocks[change.index : change.index + len(change.blocks)] = change.blocks
    for parent, child, full, tail in born:
        child.blocks = parent.blocks[:full] + tail
        child.held = True
    for change in changes if young else ():
        if change.seq in young:
            blocks = sequences[change.seq].blocks
            blocks[change.index : change.index + len(change.blocks)] = change.blocks
    for seq, seq_id in proposal.growing:
        if seq.id == seq_id and seq_id not in refused:
            seq.room = len(seq.blocks) * block_size
    return orphans
