"""Sequences that only decode: one token a step, drawn without a look at anything but its logits.

Most sequences are like that in most steps, and to look at each of them would cost more than all else: between
two looks the model's weights have passed through the caches, and a sequence with its request is dozens of
lines of memory. So here they stand in *lanes*, columns by place; a step adds one to a counter and a list of
tokens to a log. Their own counters and tokens lag behind and are brought up to date (`sync`) every 32 steps,
and when somebody needs them: at the end of a sequence, or while memd has not heard of its prompt.

Steps are counted from 0. A lane's row in step `g` is at position `offset + g`; `granted` steps have rows,
of `taken` of them the tokens are here.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, MutableSequence
from typing import Any

from executor.plan import UNKNOWN, Ids, Lanes, Members, Tables
from executor.request import Sequence
from executor.sampler import is_plain
from wire.sampling import Sampling

_LOG_STEPS = 32  # then everybody is brought up to date


class Decoding:
    """The lanes. Whoever stands in one has a row in every step, and keeps its place until somebody leaves."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._granted = self._taken = 0
        self._stops: set[int] = set()  # a token outside ends nobody
        # By lane.
        self._seqs: list[Sequence] = []
        self._offsets: list[int] = []
        self._since: list[int] = []  # the first step whose token the sequence has not been given
        self._due: list[int] = []  # when something must be done for it
        self._lasts: list[int] = []  # where no row of it can be
        self._names: list[int] = []
        self._choices = bytearray()
        self._samplings: list[Sampling] = []
        self._prompts: list[list[int]] = []
        self._peers: list[bytes] = []
        self._ids = array("Q")
        self._tables: list[list[int]] = []
        # What is made of the columns.
        self._members: Members | None = None  # None when they have changed
        self._shown: Tables | None = None  # the same
        self._moved: list[int] = []  # lanes whose tables have changed since
        self._version = 0
        # Tokens by step and lane, from step `_logged` on, and whose the last ones are.
        self._log: list[Ids] = []
        self._logged = 0
        self._latest: Members | None = None
        self._calendar: dict[int, list[Sequence]] = {}

    def __len__(self) -> int:
        return len(self._seqs)

    # ------------------------------------------------------------ who comes and goes

    def takes(self, seq: Sequence) -> bool:
        """Whether a sequence that wants one token computed may stand in a lane. Its first token, those before
        min_tokens, and what it draws while memd does not know of it yet, are drawn elsewhere."""
        group, drawn = seq.group, len(seq.output) + seq.pending
        return (
            drawn > 0
            and seq.held
            and group.together
            and is_plain(group.sampling)
            and not (group.ends and drawn < group.sampling.min_tokens)
        )

    def join(self, seq: Sequence) -> None:
        """From the next step on."""
        group = seq.group
        seq.lane = len(self._seqs)
        self._seqs.append(seq)
        self._offsets.append(seq.computed - self._granted)
        self._since.append(self._granted)
        self._due.append(self._granted)
        self._lasts.append(last_position(seq))
        self._names.append(seq.id)
        self._choices.append(seq.choice)
        self._samplings.append(group.sampling)
        self._prompts.append(group.prompt)
        self._peers.append(group.peer)
        self._ids.append(group.id)
        self._tables.append(seq.blocks)
        self._stops |= group.stops
        self._members = self._shown = None

    def leave(self, seq: Sequence) -> None:
        """Bring it up to date; steps that are granted and not taken are left to the caller."""
        lane = seq.lane
        self.sync(seq)
        seq.computed = self._offsets[lane] + self._granted
        seq.pending += self._granted - self._since[lane]
        seq.lane = -1
        last = self._seqs[-1]
        if last is not seq:
            self.sync(last)  # the log has its tokens under its old place
            last.lane = lane
        columns: tuple[MutableSequence[Any], ...] = (
            self._seqs,
            self._offsets,
            self._since,
            self._due,
            self._lasts,
            self._names,
            self._choices,
            self._samplings,
            self._prompts,
            self._peers,
            self._ids,
            self._tables,
        )
        for column in columns:
            moved = column.pop()
            if last is not seq:
                column[lane] = moved
        self._members = self._shown = None
        if not self._seqs:
            self._calendar.clear()

    def dissolve(self) -> None:
        """All leave."""
        for seq in reversed(self._seqs.copy()):
            self.leave(seq)

    def lost(self) -> None:
        """All leave, and steps that were granted and not taken never will be."""
        self.dissolve()
        self._taken = self._granted
        self._log.clear()

    def sync(self, seq: Sequence) -> None:
        """Give a sequence the tokens of steps that were taken."""
        lane = seq.lane
        if (since := self._since[lane]) < self._taken:
            tokens = [step[lane] for step in self._log[since - self._logged :]]
            seq.tokens += tokens
            seq.output += tokens
            seq.written = self._offsets[lane] + self._taken
            self._since[lane] = self._taken

    def catch_up(self) -> None:
        """Give everybody theirs."""
        for seq in self._seqs:
            self.sync(seq)
            seq.computed = self.position(seq)

    # ------------------------------------------------------------ before a step

    def due(self) -> list[Sequence]:
        """Those for whom something must be done before the next step; `plan_ahead` each that stays."""
        step, due, found = self._granted, self._due, []
        for seq in self._calendar.pop(step, ()):
            if seq.lane >= 0 and due[seq.lane] == step:
                due[seq.lane] = -1  # once, if it left and came back
                found.append(seq)
        return found

    def position(self, seq: Sequence) -> int:
        """Of its next row."""
        return self._offsets[seq.lane] + self._granted

    def ends(self, seq: Sequence) -> bool:
        """Whether the token being drawn is its last."""
        lane = seq.lane
        return self._offsets[lane] + self._granted >= self._lasts[lane]

    def plan_ahead(self, seq: Sequence, *, soon: bool) -> None:
        """Have it looked after when it needs a block and at its end, or before the next step."""
        lane, size = seq.lane, self._size
        place = self._offsets[lane] + self._granted
        wait = self._lasts[lane] - place
        room = seq.room - place
        if room <= 0:
            room = size - place % size  # what it asks for now
        if room < wait:
            wait = room
        if soon or wait < 1:
            wait = 1
        self._due[lane] = when = self._granted + wait
        self._calendar.setdefault(when, []).append(seq)

    def moved(self, seq: Sequence) -> None:
        """It has another block table."""
        self._tables[seq.lane] = seq.blocks
        self._moved.append(seq.lane)

    def step(self, joined: Iterable[Sequence]) -> Lanes | None:
        """The rows of the next step.

        Args:
            joined: who has had no step in a lane before.
        """
        if not self._seqs:
            return None
        # Whoever ended since is waited for no more, though a step that draws for it may still run.
        known = self._taken == self._granted and not any(
            seq.pending for seq in joined if seq.lane >= 0
        )
        self._granted += 1
        return self._lanes(self._granted - 1, known)

    # ------------------------------------------------------------ after a step

    def take(self, lanes: Lanes, tokens: Ids) -> None:
        """The tokens of a step. Those of sequences that left since are ignored."""
        if not self._log:
            self._logged = lanes.step
        elif lanes.step >= self._logged + len(self._log):
            # A step of which nobody was left was not run.
            self._log += [array("i")] * (lanes.step - self._logged - len(self._log))
        members = self._now()
        self._latest = members
        if members is not lanes.members:
            found = dict(zip(lanes.members.names, tokens, strict=True))
            tokens = array("i", [found.get(name, UNKNOWN) for name in self._names])
            if UNKNOWN in tokens:
                self._latest = None
        self._log.append(tokens)
        self._taken = lanes.step + 1
        if len(self._log) >= _LOG_STEPS:
            self._give_out()
            self._stops = set().union(*{seq.group.stops for seq in self._seqs})
            self._log.clear()

    def may_end(self, tokens: Iterable[int]) -> bool:
        """Whether one of them ends anybody who has been here."""
        return not self._stops.isdisjoint(tokens)

    def same(self, lanes: Lanes) -> bool:
        """Whether a step's lanes are those of today."""
        return self._members is lanes.members

    def strangers(self, lanes: Lanes) -> list[int]:
        """Places of a step's lanes whose sequences stand in none today."""
        here = set(self._names)
        return [place for place, name in enumerate(lanes.members.names) if name not in here]

    def complete(self, lanes: Lanes) -> Lanes | None:
        """The lanes of the last step granted, with its tokens, without those that have left since."""
        if not self._seqs:
            self._taken = self._granted  # it will not run
            return None
        if not self.same(lanes):
            return self._lanes(lanes.step, known=True)
        if not lanes.tokens:
            lanes.tokens.extend(self._tokens(lanes.members))
        return lanes

    # ------------------------------------------------------------ inside

    def fills(self) -> list[int]:
        """Pairs of a sequence's name and the tokens computed."""
        granted = self._granted
        pairs = zip(self._names, self._offsets, strict=True)
        return [number for name, offset in pairs for number in (name, offset + granted)]

    def _give_out(self) -> None:
        """`sync` everybody: the log as one table, of which each takes a column."""
        width = len(self._seqs)
        table = array("i")
        for row in self._log:
            table += row[:width]
            table += array("i", [UNKNOWN]) * (width - len(row))
        for lane, (seq, since) in enumerate(zip(self._seqs, self._since, strict=True)):
            if since < self._taken:
                tokens = table[width * (since - self._logged) + lane :: width]
                seq.tokens += tokens
                seq.output += tokens
                seq.written = self._offsets[lane] + self._taken
        self._since = [max(since, self._taken) for since in self._since]

    def _now(self) -> Members:
        members = self._members
        if members is None:
            members = self._members = Members(
                self._names.copy(),
                self._offsets.copy(),
                bytes(self._choices),
                self._samplings.copy(),
                self._prompts.copy(),
                self._peers.copy(),
                self._ids.tobytes(),
            )
        return members

    def _lanes(self, step: int, known: bool) -> Lanes:
        members, shown = self._now(), self._shown
        if shown is None or self._moved:
            changed, self._moved = self._moved, []
            self._version += 1
            shown = self._shown = Tables(self._version, self._tables.copy(), changed)
        return Lanes(members, step, shown, self._tokens(members) if known else array("i"))

    def _tokens(self, members: Members) -> Ids:
        """The last token of every lane."""
        if self._log and self._latest is members:
            return self._log[-1][:]
        taken = self._taken
        return array(
            "i",
            [
                self._log[-1][lane] if self._since[lane] < taken else self._seqs[lane].tokens[-1]
                for lane in range(len(self._seqs))
            ],
        )


def last_position(seq: Sequence) -> int:
    """Where no row of it can be: the token drawn from the one before is its last."""
    return len(seq.group.prompt) + seq.group.limit - 1
