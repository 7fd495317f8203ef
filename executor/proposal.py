"""What the next step asks of memd, and what each question was about."""

from __future__ import annotations

from msgspec import Struct

from executor.request import Group, Sequence
from wire.memory import Admit, Append, Commit, Fork


class Wants(Struct):
    """What one step asks of memd: the parts of `wire.memory.Step` a scheduler knows."""

    commits: list[Commit] = []
    frees: list[int] = []
    forks: list[Fork] = []
    appends: list[Append] = []
    admits: list[Admit] = []
    fills: bytes = b""

    def __bool__(self) -> bool:
        """Whether memd must hear of it; how full blocks are can wait."""
        return bool(self.commits or self.frees or self.forks or self.appends or self.admits)


# A sequence that asks for slots up to a position: its place in the order of precedence, which is its group's
# and then its choice, itself, the id it asks under, and the position.
Growing = tuple[tuple[int, int], int, Sequence, int, int]


class Proposal(Struct):
    """Step k+1 as asked for. A sequence that started over or ended since has another id, or none: so
    every entry keeps the id it was asked under."""

    wants: Wants
    left: int = 0  # tokens of the step's budget that the running groups leave to newcomers
    # Each with the id it was asked under.
    rows: list[tuple[Sequence, int, int]] = []  # and tokens to compute
    growing: list[Growing] = []
    forked: list[tuple[Sequence, int]] = []  # the children
    entering: list[tuple[Group, int, int]] = []  # and most tokens
    joined: list[Sequence] = []  # stand in a lane from this step on
    committed: int = 0  # bytes of token ids in the commits of running sequences

    def grow(self, seq: Sequence, upto: int) -> None:
        """Have it ask for slots up to this position."""
        self.growing.append((seq.group.order, seq.choice, seq, seq.id, upto))

    def ask_growing(self) -> None:
        """Ask, in the order of precedence: there may not be blocks for all."""
        self.growing.sort()
        self.wants.appends = [Append(name, upto) for _, _, _, name, upto in self.growing]
