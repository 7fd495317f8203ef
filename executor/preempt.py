"""Who loses its blocks when the pool is full: the newest, never the oldest."""

from __future__ import annotations

from executor.request import Group


def for_growth(running: list[Group], short: dict[Group, int], available: int) -> list[Group]:
    """Groups to preempt so that those in `short` can grow in the next step.

    Worst priority first, then latest arrival. A group that is short and is chosen itself needs nothing any
    more. The first of `running` is never chosen: whatever happens, the oldest request progresses.

    Args:
        running: in order of precedence.
        short: blocks each refused group asked for.
        available: blocks that are free, or will be before anything else in the next step.
    """
    missing = sum(short.values()) - available
    chosen: list[Group] = []
    for group in reversed(running[1:]):
        if missing <= 0:
            break
        chosen.append(group)
        missing -= group.blocks_held() + short.get(group, 0)
    return chosen


def for_priority(
    running: list[Group], newcomer: Group, missing_blocks: int, missing_slots: int
) -> list[Group]:
    """Groups of strictly worse priority to preempt so that `newcomer` can start; none if they would
    not suffice. Equals are never preempted for each other, so nothing can go back and forth.
    """
    chosen: list[Group] = []
    for group in reversed(running):
        if missing_blocks <= 0 and missing_slots <= 0:
            break
        if group.priority <= newcomer.priority:
            return []
        chosen.append(group)
        missing_blocks -= group.blocks_held()
        missing_slots -= len(group.live)
    return chosen if missing_blocks <= 0 and missing_slots <= 0 else []
