"""What Python costs per engine step: the scheduler's three calls, the events, the handover to the worker.

memd's core answers in this process and the model draws at once, neither is counted; every sequence decodes
one token a step. Times are this thread's CPU time, the best of several rounds, so that a noisy machine counts
little; the handover is wall time.

    python -m bench.step_loop [--streams 1,64,256]
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict

from executor.plan import Drawn, Plan
from executor.worker import Worker
from tests.executor.driver import Driver
from wire.generate import Events, GenerateCodec

ROUNDS, STEPS = 12, 50


class Instant:
    """A model that always draws the same token."""

    def run(self, plan: Plan) -> list[Drawn]:
        return [Drawn(draw.seq, 5) for row in plan.rows for draw in row.draws]


def decoding(streams: int) -> Driver:
    """A scheduler whose sequences have all started."""
    driver = Driver(blocks=300 * streams, block_size=16, context=8192)
    driver.runner = Instant()  # type: ignore[assignment]
    for request in range(1, streams + 1):
        driver.submit(request, [request % 900 + 1] * 161, 4000)
    while len(driver.plan.rows) < streams or any(len(row.tokens) > 1 for row in driver.plan.rows):
        driver.step()
    return driver


def measure(streams: int) -> dict[str, float]:
    """Microseconds per step and part."""
    driver, encode = decoding(streams), GenerateCodec().encode
    scheduler, memory, clock = driver.scheduler, driver.memory, time.thread_time
    best: dict[str, float] = {}
    for _ in range(ROUNDS):
        spent: dict[str, float] = defaultdict(float)
        for _ in range(STEPS):
            started = clock()
            proposal = scheduler.propose()
            spent["propose"] += clock() - started
            memory.ask(proposal.wants)
            drawn = driver.runner.run(driver.plan)
            started = clock()
            news = scheduler.update(driver.plan, drawn)
            spent["update"] += clock() - started
            granted = memory.answer(lambda: None)
            started = clock()
            driver.plan = scheduler.settle(proposal, granted)
            spent["settle"] += clock() - started
            started = clock()
            for _, tokens in news.tokens:
                encode(Events(tokens=tokens))
            spent["emit"] += clock() - started
        if not best or sum(spent.values()) < sum(best.values()):
            best = dict(spent)
    return {part: seconds / STEPS * 1e6 for part, seconds in best.items()}


def handover() -> float:
    """Microseconds to have the worker do nothing."""
    worker, rounds = Worker(), []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(STEPS):
            worker.call(lambda: None, lambda: None, 1.0)
        rounds.append((time.perf_counter() - started) / STEPS * 1e6)
    worker.close()
    return min(rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", default="1,64,256")
    for streams in map(int, parser.parse_args().streams.split(",")):
        parts = measure(streams)
        shown = "  ".join(f"{part} {cost:.0f}" for part, cost in parts.items())
        print(f"{streams:5} streams: {shown}  in all {sum(parts.values()):.0f} us a step")
    print(f"handover to the worker: {handover():.0f} us")


if __name__ == "__main__":
    main()
