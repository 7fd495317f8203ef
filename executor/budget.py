"""How one step's token budget is shared among the groups that are running."""

from __future__ import annotations

from itertools import chain, pairwise

from wire.sampling import MAX_CHOICES

START_TOKENS = 128  # of the first steps, until the device's speed is known


def share(wants: list[list[int]], budget: int) -> list[list[int]]:
    """Tokens each sequence computes in this step; a group gets something for all members or nothing.

    Groups are served in order. A chunk of a prompt leaves one token for every sequence behind it that
    only decodes, so a long prompt slows the others' streams but does not stop them, and it takes at least
    one token per member itself, so that whoever is first always progresses.

    Args:
        wants: for each group, in order, the tokens each member still has to compute (at least 1 each).
        budget: most tokens in the step.

    Returns:
        Counts in the shape of `wants`; all 0 for a group that was left out.
    """
    behind = sum(len(group) for group in wants if max(group) == 1)
    counts: list[list[int]] = []
    for group in wants:
        members = len(group)
        if max(group) == 1:
            behind -= members
        if budget < members:
            counts.append([0] * members)
            continue
        allowance = max(members, budget - behind)
        given = []
        for place, want in enumerate(group):
            count = min(want, allowance - (members - place - 1))
            given.append(count)
            allowance -= count
            budget -= count
        counts.append(given)
    return counts


def cut(counts: list[int], ends: list[int], aim: int, most: int, lanes: int) -> list[int]:
    """Rows that want more tokens than a step should have, cut down to it.

    Args:
        counts: tokens each row wants.
        ends: of each group, how many rows there are up to its last one.
        aim: tokens the step should have.
        most: tokens it may have.
        lanes: tokens it has besides, one for each sequence that only decodes.

    Returns:
        Tokens each row gets.
    """
    if not counts:
        return []
    wants = [counts[start:end] for start, end in pairwise([0, *ends])]
    # Steps may have become slow, but a stream that flows is not stopped for it, and nobody who came first is
    # stopped by those in lanes.
    flowing = sum(len(group) for group in wants if max(group) == 1)
    least = max(flowing, len(wants[0])) if lanes else flowing
    budget = max(aim - lanes, min(least, most - lanes))
    return list(chain.from_iterable(share(wants, budget)))


class Pace:
    """Keeps steps short, whatever the device: tokens come, clients that left are noticed and new requests
    are let in only between steps.

    Aims at steps of a sixth of the lease. One that took more than a quarter of it shrinks the budget of the
    next ones in proportion; full steps that took less than a sixth let it grow again, at most twofold. It
    starts low, since nobody knows yet how fast the device is.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._now = min(most, START_TOKENS)

    @property
    def tokens(self) -> int:
        """Most tokens of the next step."""
        return self._now

    def next(self, tokens: int, seconds: float, lease: float) -> int:
        """Most tokens of the next step, after one of `tokens` took `seconds`."""
        aim = lease / 6
        if seconds > lease / 4:
            self._now = max(MAX_CHOICES, min(self._now, int(tokens * aim / seconds)))
        elif seconds < aim and tokens >= self._now * 3 // 4:
            grown = int(self._now * min(2.0, aim / seconds)) if seconds else self._now * 2
            self._now = min(self._most, grown)
        return self._now
