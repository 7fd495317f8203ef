"""Plays requests to the executor's real engine and writes down what happened.

The engine, its scheduler and memd's core are the product's. What is put in their place: gateways
(`Desk`), and for simulation the device and the clock. So a simulated run and a real one differ in nothing
but time.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, cast

from tqdm import tqdm

from bench.paper.device import CHOICE_BIT, Device, SimulatedRunner, VirtualClock
from bench.paper.policies import Paged, Policy, Split, client
from bench.paper.workload import LONGEST, Request
from executor.accept import Bounds
from executor.engine import Engine, Runner
from executor.news import News
from executor.plan import Draws, Plan
from executor.scheduler import Scheduler
from executor.server import Server
from executor.worker import Then, Work, Worker
from wire.errors import Code
from wire.generate import Failed, Submit
from wire.sampling import Sampling

PEER = b"bench"
SAMPLE_EVERY = 16  # steps between looks at what the pool holds
STEP_TOKENS = 2560  # of a simulated step: a whole prompt of the longest kind, and more; not chunked
SEQUENCES = 256  # most running at once, the paper's system's default


class Clock(Protocol):
    def __call__(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class RealClock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self._started

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(slots=True)
class Record:
    """One request's life, in seconds of the clock."""

    request: Request
    first: float = math.nan  # its first token
    last: float = math.nan  # its last
    tokens: int = 0

    @property
    def normalized(self) -> float:
        """The paper's measure: latency from arrival to the last token over the tokens of the output."""
        return (self.last - self.request.arrival) / self.request.output


@dataclass(slots=True)
class Outcome:
    """What a run came to. Steps count from `warm` seconds on, up to the last arrival."""

    records: list[Record]
    batched: list[int] = field(default_factory=list)  # requests in the batch of each step
    splits: list[Split] = field(default_factory=list)  # at every sixteenth of these
    saved: list[float] = field(default_factory=list)  # share of blocks spared by sharing, there
    began: float = 0.0  # when the first step counted began
    ended: float = 0.0  # when the last step ended
    tokens: int = 0  # drawn between these
    preemptions: int = 0
    cut: bool = False  # stopped early because requests had waited too long

    @property
    def mean_batched(self) -> float:
        return statistics.fmean(self.batched) if self.batched else math.nan

    @property
    def mean_saved(self) -> float:
        return statistics.fmean(self.saved) if self.saved else math.nan

    @property
    def token_rate(self) -> float:
        """Output tokens a second."""
        return self.tokens / (self.ended - self.began) if self.tokens else math.nan

    @property
    def done(self) -> list[Record]:
        return [record for record in self.records if not math.isnan(record.last)]

    @property
    def normalized(self) -> float:
        """Mean normalised latency in seconds a token; infinite when the run was cut."""
        if self.cut:
            return math.inf
        done = self.done
        return statistics.fmean(record.normalized for record in done) if done else math.nan

    def shares(self) -> dict[str, float]:
        """Mean share of the pool for each part of `Split`, 0 to 1."""
        total = sum(split.slots for split in self.splits) or math.nan
        return {
            name: sum(getattr(split, name) for split in self.splits) / total
            for name in Split.__struct_fields__
        }


class Desk:
    """What gateways are to the engine: hands in requests when they are due, takes tokens."""

    def __init__(
        self,
        requests: Sequence[Request],
        scheduler: Scheduler,
        clock: Clock,
        prompt: Callable[[Request], bytes],
        *,
        patience: float,
        end: float,
        progress: str,
    ) -> None:
        self.records = {request.number: Record(request) for request in requests}
        self.draining = False
        self.cut = False
        self.stop: Callable[[], None] = lambda: None
        self._coming = list(reversed(requests))
        self._open: dict[int, int] = {}  # choices unfinished, by request
        self._scheduler = scheduler
        self._clock = clock
        self._prompt = prompt
        self._patience = patience
        self._end = end
        self._bar = tqdm(
            total=len(requests), desc=progress, unit="req", disable=not progress, leave=False
        )

    def service(self) -> None:
        """Submit what is due; stop when all is done, at the end, or when the queue has become too old."""
        now = self._clock()
        while self._coming and self._coming[-1].arrival <= now:
            request = self._coming.pop()
            sampling = Sampling(seed=1, temperature=0, max_tokens=request.output, ignore_eos=True)
            self._scheduler.submit(
                PEER, Submit(request.number, self._prompt(request), sampling, request.choices)
            )
            self._open[request.number] = request.choices
        if now >= self._end or not (self._coming or self._open):
            self.stop()
        elif len(self._scheduler.waiting):
            oldest = self.records[self._scheduler.waiting.first.id].request.arrival
            if now - oldest > self._patience:
                self.cut = True
                self.stop()

    def poll(self, timeout_ms: int) -> bool:
        """Let time pass, until a request is due at most."""
        wait = timeout_ms / 1000
        if self._coming:
            wait = min(wait, max(self._coming[-1].arrival - self._clock(), 1e-6))
        self._clock.sleep(wait)
        return False

    def emit(self, news: News, failed: list[tuple[bytes, Failed]]) -> None:
        now = self._clock()
        for _, delta in news:
            record = self.records[delta.id]
            if not record.tokens:
                record.first = now
            record.tokens += len(delta.tokens)
            if delta.finish:
                self._open[delta.id] -= 1
                if not self._open[delta.id]:
                    del self._open[delta.id]
                    record.last = now
                    self._bar.update()
        for _, failure in failed:
            if failure.code is not Code.UNAVAILABLE:  # which is only said when the engine ends
                raise RuntimeError(f"request {failure.id} failed: {failure.message}")

    def send_status(self) -> None:
        pass

    def close(self, message: str) -> None:
        self._bar.close()


class Inline:
    """A worker that needs no thread, since a virtual device takes no time."""

    def __init__(self) -> None:
        self._work: Work | None = None

    def start(self, work: Work) -> None:
        self._work = work

    def wait(self, then: Then, idle: Callable[[], None], every: float) -> None:
        if self._work is None:
            raise RuntimeError("a result was awaited and nothing was started")
        self._work = then(self._work())

    def close(self) -> None:
        pass


class Watch:
    """The runner, with a look at the batch and the pool before each step."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        memory: Paged,
        clock: Clock,
        outcome: Outcome,
        warm: float,
        until: float,
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._memory = memory
        self._clock = clock
        self._outcome = outcome
        self._warm = warm
        self._until = until

    def prepare(self, plan: Plan) -> None:
        self._runner.prepare(plan)

    def run(self, plan: Plan) -> Draws:
        now, outcome, running = self._clock(), self._outcome, self._scheduler.running
        counted = self._warm <= now <= self._until
        if counted and running:
            if not outcome.batched:
                outcome.began = now
            outcome.batched.append(len(running))
            if len(outcome.batched) % SAMPLE_EVERY == 1:
                self._scheduler.catch_up()
                outcome.splits.append(self._memory.split(running))
                tables = [seq.blocks for group in running for seq in group.live]
                named = sum(map(len, tables))
                distinct = len({block for table in tables for block in table})
                outcome.saved.append(1 - distinct / named if named else 0.0)
        drawn = self._runner.run(plan)
        if counted and running:
            outcome.ended = self._clock()
            outcome.tokens += len(drawn)
        return drawn


def numbered(request: Request) -> bytes:
    """A simulated prompt: the common prefix, then the request's number in every place."""
    if request.number >> CHOICE_BIT:
        raise ValueError(f"request {request.number}: at most {1 << CHOICE_BIT} are told apart")
    shared = array("I", range(1 << 30, (1 << 30) + request.prefix))
    return (shared + array("I", [request.number]) * (request.prompt - request.prefix)).tobytes()


def random_prompt(request: Request, vocab: int, first: int = 100) -> bytes:
    """A real prompt: random ids, first the common prefix, then its own, the request's number last."""
    shared = random.Random(0).choices(range(first, vocab), k=request.prefix)
    own = random.Random(request.number).choices(
        range(first, vocab), k=request.prompt - request.prefix - 1
    )
    return array("I", [*shared, *own, request.number]).tobytes()


def simulate(
    requests: Sequence[Request],
    policy: Policy,
    device: Device,
    *,
    block_size: int = 16,
    longest: int = LONGEST,
    reuse: bool = True,
    step_tokens: int = STEP_TOKENS,
    warm: float = 0.0,
    patience: float = math.inf,
    end: float = math.inf,
    progress: str = "",
) -> Outcome:
    """Play requests on a virtual device. See `play`."""
    clock = VirtualClock()
    return play(
        requests,
        policy,
        device.slots,
        SimulatedRunner(device, clock),
        clock,
        cast(Worker, Inline()),
        numbered,
        vocab=1 << 31,
        block_size=block_size,
        longest=longest,
        reuse=reuse,
        step_tokens=step_tokens,
        warm=warm,
        patience=patience,
        end=end,
        progress=progress,
    )


def play(
    requests: Sequence[Request],
    policy: Policy,
    slots: int,
    runner: Runner,
    clock: Clock,
    worker: Worker,
    prompt: Callable[[Request], bytes],
    *,
    vocab: int,
    block_size: int = 16,
    longest: int = LONGEST,
    sequences: int = SEQUENCES,
    reuse: bool = True,
    step_tokens: int = STEP_TOKENS,
    warm: float = 0.0,
    patience: float = math.inf,
    end: float = math.inf,
    progress: str = "",
) -> Outcome:
    """Play requests to an engine with a memory policy, until the last one is done.

    Args:
        requests: by arrival.
        slots: token slots of the pool.
        prompt: the packed token ids of a request.
        longest: most tokens of a sequence.
        warm: seconds at the start whose steps do not count.
        patience: seconds a request may wait before the run is cut, as its load is more than can be served.
        end: stop then, whatever is unfinished.
        progress: what the bar says; empty: no bar.
    """
    memory, blocks = client(
        policy,
        slots,
        {request.number: request for request in requests},
        clock,
        block_size=block_size,
        sequences=sequences,
        longest=longest,
        reuse=reuse,
    )
    scheduler = Scheduler(
        Bounds(
            block_size,
            blocks,
            longest,
            vocab,
            step_tokens=step_tokens,
            sequences=sequences,
            waiting=1 << 30,
            waiting_tokens=1 << 40,
        )
    )
    desk = Desk(requests, scheduler, clock, prompt, patience=patience, end=end, progress=progress)
    outcome = Outcome(list(desk.records.values()))
    until = requests[-1].arrival if requests else 0.0
    watch = Watch(runner, scheduler, memory, clock, outcome, warm, until)
    engine = Engine(
        scheduler,
        memory,
        watch,
        cast(Server, desk),
        worker=worker,
        drain_seconds=0.0,
        clock=clock,
    )

    def stop() -> None:
        # Once: a second time would leave a step behind that is still being computed.
        if not desk.draining:
            desk.draining = True
            engine.stop()

    desk.stop = stop
    engine.run()
    outcome.preemptions = scheduler.counters.preemptions
    outcome.cut = desk.cut
    return outcome
