"""Two schedulers that live through the same: one as it is, and one in which nobody stands in a lane."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from executor.accept import Bounds
from executor.memory import Fenced
from executor.news import News
from executor.plan import UNKNOWN, Drawn, Plan
from executor.request import Sequence, pack
from executor.scheduler import Scheduler
from tests.fakes import END, VOCAB, FakeRunner, LocalMemory
from wire.errors import Refused
from wire.generate import Submit
from wire.memory import Commit
from wire.sampling import MAX_CHOICES, Sampling

PEERS = b"one", b"two"
MOMENTS = "before", "asked", "settled", "updated", "after"

Submission = tuple[bytes, Submit]


@dataclass
class Turn:
    """What happens in one turn, and when."""

    submits: list[Submission] = field(default_factory=list)
    aborts: dict[str, list[tuple[bytes, int]]] = field(default_factory=dict)  # by moment
    ill: set[int] = field(default_factory=set)  # requests whose logits are not numbers
    late: bool = False  # memd answers when the step is done
    lost: bool = False  # the step ran out of memory
    restart: bool = False  # memd dies before it is asked
    step_tokens: int = 0  # from now on; 0: as before
    fills: bool = False
    idle: bool = True  # with nothing to compute and nothing to say, memd is not asked


class Side:
    """A scheduler, a memd and a device."""

    def __init__(self, bounds: Bounds, end_every: int, *, lanes: bool) -> None:
        self.scheduler = Scheduler(bounds)
        if not lanes:
            self.scheduler._decoding.takes = lambda seq: False  # type: ignore[method-assign]
        self.memory = LocalMemory(bounds.blocks, bounds.block_size)
        self.memory.register(lambda: None)
        self.runner = FakeRunner(bounds.block_size, end_every=end_every)
        self.plan = Plan(0)
        self.texts: dict[tuple[bytes, int, int], list[int]] = {}
        self.finished: dict[tuple[bytes, int, int], str] = {}
        self.failed: list[Any] = []
        self.seen: list[Any] = []  # of the last turn: what both must have in common
        self.told: dict[int, bytes] = {}  # what memd has heard of each sequence's tokens, in all
        self.lanes = 0  # rows that were in lanes, in all
        self.went_on = 0  # plans that were started before the tokens were taken in

    def turn(self, turn: Turn) -> None:
        """As the engine does it."""
        scheduler, plan = self.scheduler, self.plan
        self.seen = []
        if turn.step_tokens:
            scheduler.step_tokens = turn.step_tokens
        for peer, submit in turn.submits:
            try:
                scheduler.submit(peer, submit)
            except Refused as refused:
                self.seen.append(refused.code)
        self._abort(turn, "before")
        proposal = scheduler.propose(turn.fills)
        self._look(proposal.wants.fills)
        self.seen.append(("left", proposal.left))
        if turn.idle and not plan.computes and not proposal.wants:
            return
        if turn.restart:
            self.memory.restart()
        self._tell(proposal.wants.commits)
        proposal.wants.commits.sort(key=lambda commit: commit.seq)
        proposal.wants.frees.sort()
        self.memory.ask(proposal.wants)
        self._abort(turn, "asked")
        granted = None if turn.late else self.memory.hear(0)
        following = None
        if granted is not None and scheduler.may_settle(granted):
            following = scheduler.settle(proposal, granted)
            self.runner.prepare(following)
        self.seen.append(("early", following is not None))
        self._abort(turn, "settled")
        if turn.lost and plan.computes:
            scheduler.step_lost(plan)
        else:
            drawn = self.runner.run(plan) if plan.computes else []
            drawn = [self._ill(one, turn.ill) for one in drawn]
            # The engine would start the next step now, so from here on it must not change.
            on = following is not None and scheduler.goes_on(plan, following, drawn)
            started = following.rows if following is not None and on else []
            self._hear(scheduler.go_on(plan, drawn) if on else scheduler.update(plan, drawn))
            if on and following is not None:
                assert scheduler.complete(following) is following
                assert following.rows == started
                assert UNKNOWN not in [token for row in started for token in row.tokens]
                self.went_on += 1
        self._abort(turn, "updated")
        try:
            granted = granted or self.memory.answer(lambda: None)
        except Fenced:
            scheduler.memory_lost()
            self.memory.register(lambda: None)
            self.plan = Plan(0)
        else:
            self.plan = (
                scheduler.settle(proposal, granted)
                if following is None
                else scheduler.complete(following)
            )
            self.seen.append(granted.usage.used)
        self._abort(turn, "after")
        for peer, failure in scheduler.take_failures():
            self.failed.append((peer, failure.id, failure.code))
        self.lanes += len(self.plan.lanes) if self.plan.lanes else 0
        self.seen += [self.failed, self._rows(), self._asked()]

    def state(self) -> list[Any]:
        """Of all groups that run or wait, in order."""
        scheduler = self.scheduler
        scheduler.catch_up()
        assert scheduler.sequences_running == sum(len(group.live) for group in scheduler.running)
        return [
            (group.peer, group.id, group.state, group.together, [self._of(s) for s in group.live])
            for groups in (scheduler.running, scheduler.waiting)
            for group in groups
        ]

    def _of(self, seq: Sequence) -> tuple[object, ...]:
        decoding, pending = self.scheduler._decoding, seq.pending
        if seq.lane >= 0:
            assert decoding._seqs[seq.lane] is seq
            pending += decoding._granted - decoding._since[seq.lane]
        assert seq.tokens == seq.group.prompt + seq.output
        return (
            seq.id, seq.choice, tuple(seq.output), len(seq.blocks), seq.room,
            seq.computed, seq.written, pending, seq.held,
        )  # fmt: skip

    def _abort(self, turn: Turn, moment: str) -> None:
        for peer, request in turn.aborts.get(moment, ()):
            self.scheduler.abort(peer, request)

    def _ill(self, drawn: Drawn, ill: set[int]) -> Drawn:
        seq = self.scheduler._sequences.get(drawn.seq)
        return Drawn(drawn.seq, -1) if seq is not None and seq.group.id in ill else drawn

    def _hear(self, news: News) -> None:
        deltas = list(news)
        assert news.count == len(deltas)
        said = Counter((peer, delta.id, delta.index) for peer, delta in deltas)
        assert not said or max(said.values()) == 1
        for peer, delta in deltas:
            key = peer, delta.id, delta.index
            assert key not in self.finished
            self.texts.setdefault(key, []).extend(delta.tokens)
            if delta.finish:
                self.finished[key] = delta.finish
        self.seen.append(sorted((peer, repr(delta)) for peer, delta in deltas))
        self.seen.append(self.scheduler.counters.generated_tokens)

    def _look(self, fills: bytes) -> None:
        numbers = memoryview(fills).cast("Q").tolist()
        pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
        assert len(dict(pairs)) == len(pairs)
        self.seen.append(sorted(pairs))

    def _rows(self) -> list[Any]:
        rows = self.plan.rows
        assert len({row.seq for row in rows}) == len(rows)
        return sorted(
            (
                row.seq, row.start, row.tokens, len(row.blocks),
                [(d.seq, d.choice, d.position, d.prompt, d.forbidden) for d in row.draws],
            )
            for row in rows
        )  # fmt: skip

    def _asked(self) -> list[Any]:
        wants = self.memory.asked[-1]
        return [
            sorted(wants.frees),
            [(fork.parent, fork.child) for fork in wants.forks] if wants.forks else [],
            sorted((append.seq, append.upto) for append in wants.appends),
            [(admit.seq, admit.tokens) for admit in wants.admits],
        ]

    def _tell(self, commits: list[Commit]) -> None:
        """Those in lanes may say later what they generated, not something else."""
        for commit in commits:
            self.told[commit.seq] = self.told.get(commit.seq, b"") + commit.tokens


def script(draw: random.Random, *, tight: bool) -> tuple[Bounds, int, list[Turn]]:
    """A life: bounds, how often the model ends a text, and turns.

    Args:
        tight: steps may lack tokens for all that flow.
    """
    size = draw.choice([1, 2, 3, 4, 4, 16])
    sequences = draw.choice([4, 6, 8, 32])
    plenty = [64, 128] if sequences <= 8 else [512, 1024]
    step_tokens = draw.choice([16, 20, 32] if tight else plenty)
    bounds = Bounds(
        block_size=size,
        blocks=draw.choice([40, 80, 400]) * 4 // size + 10,
        context=300,
        vocab=VOCAB + 4,
        end_ids=(END,),
        sequences=sequences,
        step_tokens=step_tokens,
    )
    many = draw.choice([0.1, 0.3] if tight else [0.1, 0.3, 0.8])
    wild = draw.random() < 0.6
    turns, number = [], 0
    known: list[tuple[bytes, int]] = []
    # Of tokens that are never generated: when memd hears of generated ones makes no difference.
    texts = [[VOCAB + draw.randrange(1, 4) for _ in range(40)] for _ in range(3)]
    long = draw.choice([10, 40, 120])
    for _ in range(draw.choice([60, 120])):
        turn = Turn(late=draw.random() < 0.3, fills=draw.random() < 0.3, idle=draw.random() < 0.8)
        if tight and draw.random() < 0.2:
            turn.step_tokens = draw.choice([MAX_CHOICES, step_tokens])
        while draw.random() < many:
            number += 1
            peer = draw.choice(PEERS)
            kind = draw.random()
            sampling: dict[str, Any] = {"max_tokens": draw.randint(1, long)}
            if kind < 0.1:
                sampling["logprobs"] = 0
            elif kind < 0.2:
                sampling["presence_penalty"] = 0.5
            elif kind < 0.4:
                sampling["stop_ids"] = tuple(draw.randrange(VOCAB) for _ in range(80))
            if draw.random() < 0.15:
                sampling["min_tokens"] = draw.randint(1, sampling["max_tokens"])
            if draw.random() < 0.1:
                sampling["ignore_eos"] = True
            prompt = draw.choice(texts)[: draw.randint(1, 40)]
            submit = Submit(
                number, pack(prompt), Sampling(seed=1, **sampling),
                draw.choice([1, 1, 1, 2, 4]), draw.choice([0, 0, 0, 1, -1]),
            )  # fmt: skip
            turn.submits.append((peer, submit))
            known.append((peer, number))
        if wild:
            for moment in MOMENTS:
                if known and draw.random() < 0.04:
                    turn.aborts[moment] = draw.sample(
                        known[-8:], min(len(known[-8:]), draw.choice([1, 1, 2]))
                    )
            if known and draw.random() < 0.03:
                turn.ill = {draw.choice(known[-8:])[1]}
            turn.lost = draw.random() < 0.01
            turn.restart = draw.random() < 0.01
        turns.append(turn)
    turns += [Turn(late=draw.random() < 0.3) for _ in range(10_000 if tight else 60)]
    return bounds, draw.choice([0, 10, 40]), turns


def live(seed: int, *, tight: bool = False) -> Side:
    """Live it twice, with the same in every step; returns the one with lanes.

    Args:
        tight: steps may lack tokens for all that flow. Those in lanes do not lose theirs to chunks of
            prompts, so then only the texts are the same.
    """
    bounds, end_every, turns = script(random.Random(seed), tight=tight)
    one, two = (Side(bounds, end_every, lanes=lanes) for lanes in (True, False))
    for index, turn in enumerate(turns):
        for side in (one, two):
            if side.scheduler.busy or side.plan.computes or turn.submits or not tight:
                side.turn(turn)
        assert one.state() == two.state() or tight, (seed, index)
        assert one.seen == two.seen or tight, (seed, index)
        for name in one.told.keys() & two.told.keys():
            shorter, longer = sorted((one.told[name], two.told[name]), key=len)
            assert longer.startswith(shorter) or tight, (seed, index)
    assert not two.lanes
    aborted = {name for turn in turns for names in turn.aborts.values() for name in names}
    aborted |= {(peer, request) for peer, request, _ in one.failed + two.failed}
    if not tight:
        assert one.texts == two.texts
        assert one.told == two.told
        return one
    for side in (one, two):
        assert not side.scheduler.busy, seed
        assert side.memory.used() == 0
        side.memory.core.check()
    for key in one.texts.keys() | two.texts.keys():
        texts = one.texts.get(key, []), two.texts.get(key, [])
        shortest = min(map(len, texts))
        assert texts[0][:shortest] == texts[1][:shortest], (seed, key)
        if key[:2] not in aborted:
            assert len(texts[0]) == len(texts[1]), (seed, key)
            assert one.finished[key] == two.finished[key]
    return one
