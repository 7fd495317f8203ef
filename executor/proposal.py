"""What the next step asks of memd, and what each question was about."""

from __future__ import annotations

from dataclasses import dataclass, field

from executor.request import Group, Sequence
from wire.memory import Admit, Append, Commit, Fork


@dataclass(slots=True)
class Wants:
    """What one step asks of memd: the parts of `wire.memory.Step` a scheduler knows."""

    commits: list[Commit] = field(default_factory=list)
    frees: list[int] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    appends: list[Append] = field(default_factory=list)
    admits: list[Admit] = field(default_factory=list)
    fills: bytes = b""

    def __bool__(self) -> bool:
        """Whether memd must hear of it; how full blocks are can wait."""
        return bool(self.commits or self.frees or self.forks or self.appends or self.admits)


@dataclass(slots=True)
class Proposal:
    """Step k+1 as asked for. A sequence that started over or ended since has another id, or none: so
    every entry keeps the id it was asked under."""

    wants: Wants
    left: int = 0  # tokens of the step's budget that the running groups leave to newcomers
    # Each with the id it was asked under.
    rows: list[tuple[Sequence, int, int]] = field(default_factory=list)  # and tokens to compute
    growing: list[tuple[Sequence, int]] = field(default_factory=list)
    forked: list[tuple[Sequence, int]] = field(default_factory=list)  # the children
    entering: list[tuple[Group, int, int]] = field(default_factory=list)  # and most tokens
    joined: list[Sequence] = field(default_factory=list)  # stand in a lane from this step on
    committed: int = 0  # bytes of token ids in the commits of running sequences

    def grow(self, seq: Sequence, seq_id: int, upto: int) -> None:
        """Ask for slots up to this position."""
        self.wants.appends.append(Append(seq_id, upto))
        self.growing.append((seq, seq_id))

    def sort(self) -> None:
        """Put what is asked for in the order of precedence: there may not be blocks for all."""
        asked = sorted(
            zip(self.growing, self.wants.appends, strict=True),
            key=lambda pair: (pair[0][0].group.order, pair[0][0].choice),
        )
        self.growing = [entry for entry, _ in asked]
        self.wants.appends = [append for _, append in asked]
