"""The real scheduler, memd core and model in one process, stepped by hand."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Protocol

import torch

from executor.accept import Bounds
from executor.load import LoadedModel
from executor.native import NativeRunner
from executor.plan import Draws, Plan
from executor.request import pack
from executor.runner import Runner
from executor.scheduler import Scheduler
from tests.fakes import LocalMemory
from wire.generate import Submit
from wire.sampling import Sampling

PEER = b"gateway"
BLOCK_SIZE = 16
NEAR_TIE = 1e-4  # a logit gap below it may fall either way


@dataclass(slots=True)
class Text:
    """One choice: its tokens, and for each the gap between the two likeliest logits."""

    tokens: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


class Runs(Protocol):
    """What computes plans."""

    def run(self, plan: Plan) -> Draws: ...


class Machine:
    """An executor around one model. The KV tensors start as NaN: a slot that is read unwritten shows."""

    def __init__(
        self,
        loaded: LoadedModel,
        blocks: int,
        step_tokens: int = 512,
        *,
        native: bool = False,
        runner: Runs | None = None,  # of `blocks` + 1 blocks
    ) -> None:
        self.runner: Runs = runner or self._runner(loaded, blocks + 1, native)
        self.memory = LocalMemory(blocks, BLOCK_SIZE)
        self.memory.register(lambda: None)
        self.scheduler = Scheduler(
            Bounds(
                block_size=BLOCK_SIZE,
                blocks=blocks,
                context=loaded.config.context_length,
                vocab=loaded.config.vocab_size,
                step_tokens=step_tokens,
            )
        )
        self._requests = 0

    @staticmethod
    def _runner(loaded: LoadedModel, num_blocks: int, native: bool) -> Runner | NativeRunner:
        if native:
            step = NativeRunner(
                loaded,
                num_blocks=num_blocks,
                block_size=BLOCK_SIZE,
                device="cpu",
                dtype=torch.float32,
                keep=True,
            )
            step.kv.memory.fill(0xFF)  # NaN in every float format
            return step
        runner = Runner(
            loaded, num_blocks=num_blocks, block_size=BLOCK_SIZE, device="cpu", dtype=torch.float32
        )
        runner.kv.keys.fill_(float("nan"))
        runner.kv.values.fill_(float("nan"))
        return runner

    @property
    def preemptions(self) -> int:
        return self.scheduler.counters.preemptions

    def generate(
        self, prompts: list[list[int]], tokens: int, n: int = 1, **sampling: float
    ) -> list[list[Text]]:
        """Texts of all prompts, submitted together; for each prompt its `n` choices. Greedy, with the gaps
        of logits, unless `sampling` says otherwise."""
        asked = {"temperature": 0.0, "logprobs": 2} | sampling
        first = self._requests
        for prompt in prompts:
            settings = Sampling(seed=0, max_tokens=tokens, ignore_eos=True, **asked)  # type: ignore[arg-type]
            self.scheduler.submit(PEER, Submit(self._requests + 1, pack(prompt), settings, n))
            self._requests += 1
        texts: dict[tuple[int, int], Text] = defaultdict(Text)
        scheduler, plan, step = self.scheduler, Plan(0), 0
        while scheduler.busy or plan.rows:
            step += 1
            proposal = scheduler.propose(fills=step % 16 == 0)
            self.memory.ask(proposal.wants)
            drawn = self.runner.run(plan) if plan.rows or plan.copies else []
            for _, delta in scheduler.update(plan, drawn):
                text = texts[delta.id - 1 - first, delta.index]
                text.tokens += delta.tokens
                for logprobs in delta.logprobs:
                    text.gaps.append(logprobs.top[0].logprob - logprobs.top[1].logprob)
            plan = scheduler.settle(proposal, self.memory.answer(lambda: None))
            failures = scheduler.take_failures()
            assert not failures, failures
        assert self.memory.used() == 0
        self.memory.core.check()
        return [[texts[i, choice] for choice in range(n)] for i in range(len(prompts))]


def differences(
    expected: list[Text], got: list[Text], slack: int = 0
) -> tuple[list[str], list[str]]:
    """(near-ties that fell the other way, real differences), each in a sentence.

    Args:
        slack: token values that differ by no more are equal (when rounded likelihoods stand for ids).
    """
    ties: list[str] = []
    wrong: list[str] = []
    for which, (right, other) in enumerate(zip(expected, got, strict=True)):
        if len(right.tokens) != len(other.tokens):
            wrong.append(f"prompt {which}: {len(other.tokens)} tokens, not {len(right.tokens)}")
        at = next(
            (
                i
                for i, pair in enumerate(zip(right.tokens, other.tokens, strict=False))
                if abs(pair[0] - pair[1]) > slack
            ),
            None,
        )
        if at is None:
            continue
        story = f"prompt {which} differs at token {at}, logit gap {right.gaps[at]:.2e}"
        (ties if right.gaps[at] <= NEAR_TIE else wrong).append(story)
    return ties, wrong
