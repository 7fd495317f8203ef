"""A Hypothesis state machine of one executor, valid and hostile, against the naive oracle.

`PAGEKEEPER_FUZZ=ci` runs 1,000 examples of 50 steps, `full` 10,000 of 100; the default is quicker.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.memd.driver import OTHER, Driver
from tests.memd.naive import Naive, must
from wire.errors import Code
from wire.memory import Admit, Append, Commit, Fork, Goodbye, Granted, Register, Rejected, Step

PROFILES = {"quick": (200, 50, 100), "ci": (1_000, 50, 300), "full": (10_000, 100, 20_000)}
EXAMPLES, STEPS, SECONDS = PROFILES[os.environ.get("PAGEKEEPER_FUZZ", "quick")]

pytestmark = pytest.mark.timeout(SECONDS)

index = st.integers(0, 31)
token = st.integers(0, 1)


@dataclass(frozen=True)
class Operation:
    """One valid part of a step; numbers are taken modulo what there is."""

    kind: str
    which: int  # sequence it is about
    tokens: list[int]
    back: int  # how far before the end of what is written
    extra: int


operations = st.builds(
    Operation,
    kind=st.sampled_from(
        [
            "admit",
            "like",
            "like",
            "commit",
            "commit",
            "free",
            "fork",
            "append",
            "append",
            "write",
            "fill",
        ]
    ),
    which=index,
    tokens=st.lists(token, min_size=1, max_size=9),
    back=st.sampled_from([0, 0, 0, 1, 2, 5]),
    extra=st.sampled_from([0, 0, 1, 2, 4]),
)
steps = st.lists(operations, min_size=1, max_size=6)


class Executor(RuleBasedStateMachine):
    """`work` sends steps of valid operations; the other rules come between them."""

    @initialize(
        blocks=st.sampled_from([11, 4, 8, 16]),
        size=st.sampled_from([4, 2, 3, 1]),
        hash_bits=st.sampled_from([256, 256, 4, 1]),
        spare=st.sampled_from([0, 0, 1, 3]),
        prompt=st.lists(token, min_size=1, max_size=9),
    )
    def start(self, blocks: int, size: int, hash_bits: int, spare: int, prompt: list[int]) -> None:
        driver = Driver(blocks, size, hash_bits=hash_bits, spare=spare)
        self.naive = Naive(driver, exact_hash=hash_bits == 256)
        self.admit(prompt, 1 << 20)

    def admit(
        self, prompt: list[int], chunk: int, tenant: str = "", members: int = 1, reuse: bool = True
    ) -> None:
        most = min(self.naive.pool.total * self.naive.block_size, 21)
        group = 1 + self.naive.ids if members > 1 else 0
        for _ in range(members):
            self.naive.admit(prompt[:most], chunk, tenant, group, reuse)

    # ------------------------------------------------------------ valid

    def queue(self, operation: Operation) -> None:
        naive, tokens, back, extra = self.naive, operation.tokens, operation.back, operation.extra
        seq = naive.choose(operation.which)
        if seq is None or operation.kind == "admit":
            tenant = "red" if operation.which % 4 == 3 else ""
            self.admit(tokens, (1 << 20, 1, 4, 5)[extra % 4], tenant, 1 + extra // 2)
            return
        match operation.kind:
            case "like":
                prompt = seq.tokens[: len(seq.tokens) - back] + tokens[:extra]
                self.admit(prompt or tokens, 1 << 20, seq.tenant, 1, operation.which % 8 != 7)
            case "commit":
                naive.commit(seq, seq.written - back, extra)
            case "free":
                naive.free(seq)
            case "fork":
                child = naive.fork(seq, max(0, seq.written - back))
                if extra:
                    naive.append_to_child(child, naive.queue.forks[-1].at, tokens[0])
            case "append":
                naive.append(seq, tokens, len(tokens) - back)
            case "write":
                naive.write(seq, tokens)
            case _:
                naive.fill(seq)

    @rule(step=steps)
    def work(self, step: list[Operation]) -> None:
        for operation in step:
            self.queue(operation)
        self.naive.send()

    @rule(step=steps)
    def work_on_what_is_committed(self, step: list[Operation]) -> None:
        for seq in self.naive.seqs.values():
            self.naive.commit(seq, seq.written, 0)
        self.work(step)

    @rule(step=steps)
    def work_on_an_idle_pool(self, step: list[Operation]) -> None:
        for seq in self.naive.seqs.values():
            self.naive.commit(seq, seq.written, 0)
            self.naive.free(seq)
        self.work(step)

    @rule(operation=operations)
    def prepare_a_part_of_the_next_step(self, operation: Operation) -> None:
        self.queue(operation)

    @rule(which=index)
    def pin(self, which: int) -> None:
        self.naive.pin(which)

    @rule(which=index)
    def unpin(self, which: int) -> None:
        self.naive.unpin(which)

    # ------------------------------------------------------------ hostile

    @rule(which=index)
    def free_twice_in_one_step(self, which: int) -> None:
        if seq := self.naive.choose(which):
            assert self.naive.refused(frees=[seq.id, seq.id]).code == Code.DUPLICATE

    @rule(seq=st.integers(1, 1 << 53 - 1))
    def free_again_or_free_what_never_was(self, seq: int) -> None:
        if seq > self.naive.pool.highest:
            assert self.naive.refused(frees=[seq]).code == Code.UNKNOWN_SEQUENCE
        elif seq not in self.naive.seqs and seq not in self.naive.queue.frees:
            self.naive.take(self.naive.driver.free(seq))

    @rule(
        seq=st.integers(1, 40),
        number=st.integers(0, 60),
        part=st.sampled_from(["commits", "appends", "forks", "admits", "fills"]),
        raw=st.binary(max_size=9),
    )
    def anything_else_refused_changes_nothing(
        self, seq: int, number: int, part: str, raw: bytes
    ) -> None:
        """Whatever an item says: either it is refused with the digest as it was, or it was not bad."""
        driver = self.naive.driver
        items = {
            "commits": Commit(seq, number, raw),
            "appends": Append(seq, number),
            "forks": Fork(seq, max(1, number), number),
            "admits": Admit(seq, raw, 1 + number),
        }
        parts = {part: raw if part == "fills" else [items[part], items[part]]}
        step = Step(driver.instance, driver.generation, 7, driver.number + 1, **parts)  # type: ignore[arg-type]
        before = driver.memory.digest()
        if part == "fills" and not raw:
            return
        reply = driver.memory.handle(driver.now, step)
        assert isinstance(reply, Rejected)
        assert driver.memory.digest() == before

    @rule(number=st.integers(0, 100), old=st.booleans())
    def a_wrong_number_or_generation_changes_nothing(self, number: int, old: bool) -> None:
        driver = self.naive.driver
        before = driver.memory.digest()
        generation = driver.generation - 1 if old else driver.generation
        if not old and number == driver.number + 1:
            return
        reply = driver.memory.handle(driver.now, Step(driver.instance, generation, 7, number))
        if number == driver.number and not old and self.naive.pool.reply is not None:
            assert reply is self.naive.pool.reply
        else:
            assert isinstance(reply, Rejected)
            expected = Code.FENCED if old else Code.STALE if number <= driver.number else Code.GAP
            assert reply.code == expected
        assert driver.memory.digest() == before

    @precondition(lambda self: self.naive.driver.number > 3)
    @rule(how=st.sampled_from(["lease", "goodbye", "again"]))
    def end_the_registration(self, how: str) -> None:
        driver = self.naive.driver
        if how == "lease":
            driver.now += 3.0
            (ended,) = driver.memory.tick(driver.now)
            assert ended.sequences == len(self.naive.seqs)
        elif how == "goodbye":
            reply = driver.memory.handle(driver.now, Goodbye(driver.instance, driver.generation))
            assert isinstance(reply, Granted)
        else:
            reply = driver.memory.handle(driver.now, Register((1, 0), OTHER, driver.spec))
            assert isinstance(reply, Rejected)
            assert reply.code == Code.POOL_BUSY
        driver.register()
        driver.memory.tick(driver.now)
        self.naive.forget()

    # ------------------------------------------------------------ always

    @invariant()
    def every_rule_holds(self) -> None:
        if hasattr(self, "naive"):
            self.naive.driver.memory.check()
            self.naive.verify()

    def teardown(self) -> None:
        if not hasattr(self, "naive"):
            return
        naive = self.naive
        while naive.pins:
            naive.unpin(0)
        naive.queue = type(naive.queue)(frees=dict.fromkeys(naive.seqs))
        naive.prompts.clear()
        naive.send()
        naive.send()
        counts = naive.pool.counts()
        must(counts.used == counts.quarantined == 0, "blocks leaked: %s", counts)


Executor.TestCase.settings = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

TestExecutor = Executor.TestCase
