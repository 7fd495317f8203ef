"""Runs a scheduler against memd's core and the hash-of-KV model, without sockets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from executor.accept import Bounds
from executor.memory import Fenced
from executor.plan import Plan
from executor.request import pack
from executor.scheduler import Scheduler
from tests.fakes import END, VOCAB, FakeRunner, LocalMemory
from wire.generate import Failed, Submit
from wire.sampling import Sampling

PEER = b"gateway"


class Driver:
    """The engine's turn, step by step, with everything in reach of a test."""

    def __init__(
        self, blocks: int = 1000, block_size: int = 4, end_every: int = 0, **bounds: int
    ) -> None:
        self.bounds = Bounds(
            **{
                "block_size": block_size,
                "blocks": blocks,
                "context": 4096,
                "vocab": VOCAB,
                **bounds,
            },
            end_ids=(END,),
        )
        self.end_every = end_every
        self.scheduler = Scheduler(self.bounds)
        self.memory = LocalMemory(blocks, block_size)
        self.memory.register(lambda: None)
        self.runner = FakeRunner(block_size, end_every=end_every)
        self.plan = Plan(0)
        self.texts: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.finished: dict[tuple[int, int], str] = {}
        self.cached: dict[int, int] = {}
        self.failed: dict[int, Failed] = {}
        self.peak = 0
        self.steps = 0
        self.early = (
            0  # plans with rows that were settled before the tokens of the one before were known
        )
        self.between: Callable[[], None] = lambda: None  # called between ask and settle

    def submit(
        self,
        request: int,
        prompt: list[int],
        max_tokens: int = 8,
        n: int = 1,
        priority: int = 0,
        deadline: float | None = None,
        **sampling: object,
    ) -> None:
        settings = Sampling(seed=1, max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
        message = Submit(request, pack(prompt), settings, n, priority)
        self.scheduler.submit(PEER, message, deadline)

    def step(self) -> Plan:
        """One turn of the loop; returns the plan that was granted."""
        scheduler, plan = self.scheduler, self.plan
        proposal = scheduler.propose(fills=len(self.memory.asked) % 3 == 0)
        self.memory.ask(proposal.wants)
        self.steps += 1
        granted = self.memory.hear(0) if self.steps % 3 else None
        following = None
        if granted is not None and scheduler.may_settle(granted):
            following = scheduler.settle(proposal, granted)
            self.early += bool(following.rows)
        drawn = self.runner.run(plan) if plan.rows or plan.copies else []
        for _, delta in scheduler.update(plan, drawn):
            key = delta.id, delta.index
            assert key not in self.finished, "a delta after the last one"
            if not self.texts[key]:
                self.cached[delta.id] = delta.cached
            self.texts[key] += delta.tokens
            if delta.finish:
                self.finished[key] = delta.finish
        self.between()
        try:
            granted = granted or self.memory.answer(lambda: None)
        except Fenced:
            scheduler.memory_lost()
            self.memory.register(lambda: None)
            self.plan = Plan(0)
        else:
            if following is None:
                self.plan = scheduler.settle(proposal, granted)
            else:
                self.plan = scheduler.complete(following)
            assert sum(len(row.tokens) for row in self.plan.rows) <= self.bounds.step_tokens
        for _, failure in scheduler.take_failures():
            self.failed[failure.id] = failure
        self.peak = max(self.peak, self.memory.used())
        return self.plan

    def run(self, most: int = 10_000) -> None:
        """Turn until nothing is left to do, and check that nothing was left behind."""
        for _ in range(most):
            if not self.scheduler.busy and not self.plan.rows:
                break
            self.step()
        else:
            raise AssertionError(f"not finished after {most} steps")
        self.step()
        assert self.memory.used() == 0
        self.memory.core.check()
