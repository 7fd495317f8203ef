"""The step loop: one thing after the other, so that the order of events is the order of the program.

While the device computes plan k, the tokens of plan k-1 go out and memd answers for step k+1; see `turn`. A
long step or a silent memd does not stop the loop from answering gateways and keeping its lease.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from executor.budget import Pace
from executor.memory import Fenced, MemoryClient
from executor.news import News
from executor.plan import Draws, Plan
from executor.proposal import Proposal
from executor.scheduler import Scheduler
from executor.server import Server
from executor.worker import Work, Worker
from wire.errors import Code
from wire.generate import Status
from wire.memory import Granted, Usage

log = logging.getLogger(__name__)

RENEW_S = 0.25  # idle, memd hears of us this often
CARE_S = 0.25  # in a long step, gateways and memd are looked after this often
HEAR_MS = 20  # beside a step, memd's answer is waited for half a step, and at most so long
FILLS_EVERY = 16  # steps between reports of how full the last blocks are
MOST_FENCES = 8  # registrations in a row that brought no granted step; then something is broken


class Runner(Protocol):
    """What executes plans: `executor.runner.Runner`, or a fake."""

    def prepare(self, plan: Plan) -> None:
        """The plan that probably runs next, while another thread is in `run`: tokens may be UNKNOWN."""

    def run(self, plan: Plan) -> Draws:
        """Make the plan's copies, compute its rows, draw its tokens."""


class Stopped(Exception):
    """The loop was told to stop while it waited."""


class Wedged(Exception):
    """A step took so long that the device must be stuck."""


class Engine:
    """Ties scheduler, memd, runner and gateways together."""

    def __init__(
        self,
        scheduler: Scheduler,
        memory: MemoryClient,
        runner: Runner,
        server: Server,
        *,
        worker: Worker,
        drain_seconds: float = 30.0,
        step_timeout: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._memory = memory
        self._runner = runner
        self._server = server
        self._worker = worker
        self._drain_seconds = drain_seconds
        self._step_timeout = step_timeout
        self._clock = clock
        self._pace = Pace(scheduler.bounds.step_tokens)
        scheduler.step_tokens = self._pace.tokens
        self._plan = Plan(0)
        self._computing = False  # whether that plan has been started
        self._usage = Usage(scheduler.bounds.blocks, scheduler.bounds.blocks, 0, 0, 0, 0, 0)
        self._hits_before = self._queries_before = 0  # counted by memds and pools of the past
        self._signals = 0
        self._drain_until: float | None = None
        self._news = News()  # not sent yet
        self._attached = False  # whether memd's last word was a grant or a registration
        self._asked_at = 0.0
        self._started_at = self._took = 0.0
        self._worked_at = clock()
        self._turns = 0
        self._fences = 0
        self._lost_steps = 0
        self.steps = 0  # that computed something

    def stop(self) -> None:
        """Finish what runs, then stop; the second call stops at once. Safe in a signal handler."""
        self._signals += 1

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Register, say `on_ready`, and turn until stopped.

        Raises:
            Refused: memd will not have this executor.
            Exception: whatever a step died of; the process must end, memd and the gateways will notice.
        """
        try:
            self._register()
            on_ready()
            while not self._stopped():
                self.turn()
            self._emit()  # what the last turn brought, before a step that still runs brings more
            if self._computing and self._signals == 1:
                self._worker.wait(self._take_in, self._care, CARE_S)  # no step is left behind
        except Stopped:
            pass
        finally:
            self._scheduler.fail_all(Code.UNAVAILABLE, "the executor stopped")
            self._emit()
            self._server.close("the executor stopped")
            self._memory.close()

    def turn(self) -> None:
        """One step: while the device computes plan k, send the tokens of k-1, ask memd for k+1 and settle it;
        then take in k's tokens and start k+1, or start it first if nothing in them can change it.

        Between two steps there is only what the second one depends on: everything else makes the device wait.
        """
        scheduler, plan = self._scheduler, self._plan
        working = plan.computes
        # After a pause of the whole process the blocks may be someone else's: look before computing.
        if working and not self._computing and not self._memory.stale():
            self._start()
        scheduler.now = self._clock()
        self._emit()
        self._server.service()
        proposal = scheduler.propose(fills=self._turns % FILLS_EVERY == 0)
        if not working and not proposal.wants:
            self._worked_at = self._clock()
            left = self._asked_at + RENEW_S - self._clock()
            if left > 0:
                self._server.poll(max(1, int(left * 1000)))
                return
        self._turns += 1
        self._asked_at = self._clock()
        self._memory.ask(proposal.wants)
        try:
            if working:
                self._finish(proposal)
            else:
                granted = self._answer()
                self._plan = scheduler.settle(proposal, granted)
                self._settled(granted)
        except Fenced as fenced:
            self._emit()
            self._reattach(fenced)
            return
        if not self._computing:
            self._emit()
            if not working and not self._plan.computes and scheduler.busy:
                self._server.poll(1)  # memory must come free first: do not spin for it

    def status(self) -> Status:
        """Load, for gateways."""
        scheduler, usage = self._scheduler, self._usage
        age = self._clock() - self._worked_at if scheduler.busy else 0.0
        reason = "" if self._attached else "waiting for the memory daemon"
        if self._drain_until is not None:
            reason = "shutting down"
        return Status(
            ready=not reason,
            draining=self._drain_until is not None,
            reason=reason,
            step_age_ms=int(age * 1000),
            running=scheduler.sequences_running,
            waiting=len(scheduler.waiting),
            waiting_tokens=scheduler.waiting.tokens,
            blocks_total=usage.total,
            blocks_used=usage.used,
            blocks_cached=usage.cached,
            steps=self.steps,
            preemptions=scheduler.counters.preemptions,
            prompt_tokens=scheduler.counters.prompt_tokens,
            generated_tokens=scheduler.counters.generated_tokens,
            hit_tokens=self._hits_before + usage.hit_tokens,
            query_tokens=self._queries_before + usage.query_tokens,
            memory_wait_us=self._memory.waited_us,
        )

    # ------------------------------------------------------------ inside

    def _start(self) -> None:
        self._worker.start(self._next())

    def _next(self) -> Callable[[], Draws | None]:
        """The plan at hand as work, to be started at once."""
        plan = self._plan
        self._computing = True
        self._started_at = self._asked_at = self._clock()
        return partial(self._compute, plan)

    def _compute(self, plan: Plan) -> Draws | None:
        """What a plan draws; None when the device lacked memory for it. A second time in a row, nothing is
        sure any more and the process ends."""
        try:
            return self._runner.run(plan)
        except Exception as error:
            if not _out_of_memory(error) or self._lost_steps:
                raise
            log.error("step=%d ran out of memory: %s", plan.number, error)
            return None

    def _finish(self, proposal: Proposal) -> None:
        """Wait for the plan at hand and take it in; if memd has answered by then, go on with the next one."""
        scheduler, computed, following = self._scheduler, self._plan, None
        if self._computing:
            granted = self._memory.hear(min(HEAR_MS, 1 + int(500 * self._took)))
        else:
            granted = self._answer()
            self._start()
        if granted is not None and scheduler.may_settle(granted):
            following = scheduler.settle(proposal, granted)
            self._runner.prepare(following)

        beside: Draws | None = None  # drawn, and taken in while the next step runs

        def then(drawn: Draws | None) -> Work | None:
            nonlocal beside
            if (
                following is not None
                and drawn is not None
                and scheduler.goes_on(computed, following, drawn)
            ):
                beside = drawn
                self._ended(lost=False)
                self._plan = following
                return None if self._memory.stale() else self._next()
            # Before memd's answer, which may be that all is lost: what was drawn is still right.
            self._take_in(drawn)
            if granted is None:
                return None
            self._plan = (
                scheduler.settle(proposal, granted)
                if following is None
                else scheduler.complete(following)
            )
            return None if not self._plan.computes or self._memory.stale() else self._next()

        self._worker.wait(then, self._care, CARE_S)
        if beside is not None:
            self._news = scheduler.go_on(computed, beside)
        if self._lost_steps == 0:
            self._count(computed)
        if granted is None:
            self._emit()
            granted = self._answer()
            self._plan = scheduler.settle(proposal, granted)
        self._settled(granted)

    def _take_in(self, drawn: Draws | None) -> None:
        """What the plan at hand brought. If it was lost, that costs its largest request."""
        self._ended(lost=drawn is None)
        if drawn is None:
            self._scheduler.step_lost(self._plan)
        else:
            self._news = self._scheduler.update(self._plan, drawn)

    def _ended(self, *, lost: bool) -> None:
        """The plan at hand was computed, or lost."""
        self._lost_steps = self._lost_steps + 1 if lost else 0
        self._computing = False
        self._worked_at = self._clock()
        self._took = self._worked_at - self._started_at

    def _count(self, plan: Plan) -> None:
        """What a plan that was computed says of steps to come."""
        self.steps += 1
        self._scheduler.step_tokens = self._pace.next(plan.tokens, self._took, self._memory.lease)

    def _settled(self, granted: Granted) -> None:
        self._attached = True
        self._usage = granted.usage
        self._fences = 0

    def _emit(self) -> None:
        """Send what the last step brought."""
        news, self._news = self._news, News()
        self._server.emit(news, self._scheduler.take_failures())

    def _answer(self) -> Granted:
        granted = self._memory.answer(self._idle)
        self._attached = True
        return granted

    def _reattach(self, fenced: Fenced) -> None:
        """Everything memd held for us is gone: requests go back to the queue and are computed again."""
        self._fences += 1
        log.warning(
            "lost the memory daemon's grants (%s): sequences computed again: %d",
            fenced,
            self._scheduler.sequences_running,
        )
        if self._fences > MOST_FENCES:
            raise RuntimeError(f"{self._fences} registrations in a row came to nothing") from fenced
        self._plan = Plan(0)
        self._scheduler.memory_lost()
        self._register()

    def _register(self) -> None:
        self._attached = False
        self._memory.register(self._idle)
        self._attached = True
        self._hits_before += self._usage.hit_tokens
        self._queries_before += self._usage.query_tokens
        self._usage = Usage(self._usage.total, self._usage.total, 0, 0, 0, 0, 0)

    def _idle(self) -> None:
        """While memd is silent, gateways are still answered."""
        if self._stopped():
            raise Stopped
        if self._clock() - self._asked_at > self._memory.lease * 2 / 3:
            self._attached = False
        self._server.service()

    def _care(self) -> None:
        """While a step runs long."""
        took = self._clock() - self._asked_at
        if took > self._step_timeout:
            raise Wedged(
                f"a step has been running for {took:.0f} s, the limit is {self._step_timeout:.0f} s "
                "(--step-timeout)"
            )
        if self._signals > 1:
            raise Stopped
        self._memory.renew()
        self._server.service()

    def _stopped(self) -> bool:
        """Whether the loop must end: told twice, or told once and either done or out of time."""
        if self._signals == 0:
            return False
        if self._drain_until is None:
            self._drain_until = self._clock() + self._drain_seconds
            self._server.draining = True
            self._server.send_status()
            log.info("draining: requests=%d", self._scheduler.requests)
        return self._signals > 1 or not self._scheduler.busy or self._clock() >= self._drain_until


def _out_of_memory(error: Exception) -> bool:
    """Whether the device or the host had no memory left; torch says so in more than one way."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )
