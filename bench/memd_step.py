"""Cost of one step: what an executor waits for memd, by live sequences and by size of the pool.

Starts a real memd for each pool size and talks to it over ipc as an executor does: every sequence decodes
one token a step, and they are staggered, so each step 1/16 of them fill a block (a commit with its 16 token
ids) and as many begin one (an append). Before that each pool is filled with cached prefixes, so that every
append evicts.
The pool sizes take turns, round by round, so that a noisy machine is noisy to all of them.

Daemon and client share one CPU unless `--cpu -1` says otherwise: waking an idle virtual CPU costs some 30 us,
a round trip through libzmq's threads wakes six, and what would then be measured is the virtual machine. A
device that computes keeps CPUs awake. The row of one sequence is nearly all transport.

    python -m bench.memd_step [--sequences 1,64,256,1024] [--pools 10000,1000000] [--cpu N] [--csv FILE]
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import zmq

from memd import compiled
from wire.memory import (
    Admit,
    Append,
    Commit,
    Granted,
    MemoryCodec,
    PoolSpec,
    Register,
    Registered,
    Reply,
    Request,
    Step,
)
from wire.rpc import Dealer, Limits, ipc

BLOCK = 16
PROMPT = 32  # tokens of a decoding sequence's prompt
STEPS = 64  # timed per round; each sequence grows by four blocks
WARM = 16  # before them, not timed: another pool was measured in between, and caches hold that one
FILLER = 8192  # tokens of the prompts that fill the pool
BOUND_US = 150.0  # the promise: p50 at 256 sequences

Ask = Callable[[Request], Reply]


@dataclass
class Driver:
    """An executor without a model: it says what a real one would, and believes every answer."""

    ask: Ask
    blocks: int
    instance: str = field(default_factory=lambda: uuid.uuid4().hex)
    generation: int = 0
    epoch: int = 0
    number: int = 0
    next_seq: int = 1
    lengths: dict[int, int] = field(default_factory=dict)

    def register(self) -> None:
        spec = PoolSpec(f"pool-{self.blocks}", "bench", "bfloat16", BLOCK, self.blocks, 368_640)
        reply = self.ask(Register((1, 0), self.instance, spec))
        if not isinstance(reply, Registered):
            raise SystemExit(f"memd refused to register: {reply}")
        self.generation, self.epoch = reply.generation, reply.epoch

    def step(
        self,
        commits: list[Commit] | None = None,
        frees: list[int] | None = None,
        appends: list[Append] | None = None,
        admits: list[Admit] | None = None,
    ) -> Granted:
        self.number += 1
        return self.send(
            Step(
                instance=self.instance,
                generation=self.generation,
                epoch=self.epoch,
                number=self.number,
                commits=commits or [],
                frees=frees or [],
                appends=appends or [],
                admits=admits or [],
            )
        )

    def send(self, step: Step) -> Granted:
        reply = self.ask(step)
        if not isinstance(reply, Granted) or reply.refused:
            raise SystemExit(f"memd did not grant step {step.number}: {reply}")
        return reply

    def fill(self) -> None:
        """Leave every block cached, as in a daemon that has served for a while."""
        left = self.blocks - 1
        while left:
            tokens = min(FILLER, left * BLOCK)
            seq, ids = self.next_seq, _ids(self.next_seq, tokens)
            self.next_seq += 1
            self.step(admits=[Admit(seq, ids, tokens)])
            self.step(commits=[Commit(seq, tokens)], frees=[seq])
            left -= tokens // BLOCK

    def begin(self, count: int) -> None:
        """End what runs, and start `count` sequences whose blocks fill at different steps."""
        self.step(frees=list(self.lengths))
        self.lengths = {}
        for first in range(0, count, 256):
            admits = []
            for index in range(first, min(first + 256, count)):
                seq, length = self.next_seq, PROMPT + index % BLOCK
                self.next_seq += 1
                self.lengths[seq] = length
                admits.append(Admit(seq, _ids(seq, length), length))
            self.step(admits=admits)
            self.step(commits=[Commit(item.seq, item.chunk) for item in admits])

    def decode(self) -> Step:
        """The next step's message: one more token for every sequence."""
        self.number += 1
        commits, appends = [], []
        for seq, length in self.lengths.items():
            if length % BLOCK == 0:
                if length > PROMPT:
                    first = length - BLOCK
                    known = PROMPT + (seq - min(self.lengths)) % BLOCK
                    ids = _ids(seq, length)[max(first, known) * 4 :]
                    commits.append(Commit(seq, length, ids))
                appends.append(Append(seq, length + 1))
            self.lengths[seq] = length + 1
        return Step(
            instance=self.instance,
            generation=self.generation,
            epoch=self.epoch,
            number=self.number,
            commits=commits,
            appends=appends,
        )


def _ids(seq: int, count: int) -> bytes:
    """Token ids nobody else has: prefixes of two sequences never meet."""
    return struct.pack(f"<{count}I", *((seq * 7919 + place) % 2**31 for place in range(count)))


@contextmanager
def daemon() -> Iterator[Ask]:
    """A memd process of its own, and the way to ask it."""
    with tempfile.TemporaryDirectory(prefix="memd-bench-") as run_dir:
        process = subprocess.Popen(
            [sys.executable, "-m", "memd", "--run-dir", run_dir, "--admin-port", "0",
             "--log-level", "error", "--lease-ms", "600000"]
        )  # fmt: skip
        try:
            with Dealer(ipc(Path(run_dir) / "memd.sock"), Limits()) as dealer:
                codec = MemoryCodec()

                def ask(request: Request) -> Reply:
                    dealer.send(codec.encode(request))
                    if not dealer.poll(10_000):
                        raise SystemExit("memd did not answer within 10 s")
                    return codec.decode_reply(next(dealer.receive()))

                if not dealer.raw.poll(10_000, zmq.POLLOUT):
                    raise SystemExit("memd did not start within 10 s")
                yield ask
        finally:
            process.terminate()
            process.wait(10)


def local(blocks: int) -> Ask:
    """The same core in this process."""
    from memd.core import Memory  # not before `main` had the chance to prefer the compiled one

    memory = Memory(boot_id="0" * 32, epoch=1, key=b"k" * 32, lease_ms=600_000)
    return lambda request: memory.handle(time.monotonic(), request)


def measure(driver: Driver, count: int) -> list[float]:
    """Microseconds of each of a round's steps."""
    driver.begin(count)
    taken = []
    # Made before: what an executor computes between two steps is not part of the round trip.
    steps = [driver.decode() for _ in range(WARM + STEPS)]
    for step in steps[:WARM]:
        driver.send(step)
    for step in steps[WARM:]:
        started = time.perf_counter()
        driver.send(step)
        taken.append((time.perf_counter() - started) * 1e6)
    return taken


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _progress(done: int, total: int, what: str) -> None:
    if sys.stderr.isatty() or done == total:
        bar = "█" * (30 * done // total)
        end = "\n" if done == total else ""
        print(f"\r{bar:<30} {done}/{total} {what:<40}", end=end, file=sys.stderr, flush=True)


def run(sequences: list[int], pools: list[int], rounds: int) -> list[dict[str, object]]:
    with ExitStack() as stack:
        remote, inside = {}, {}
        for number, blocks in enumerate(pools):
            _progress(2 * number, 2 * len(pools) + 1, f"filling {blocks} blocks")
            remote[blocks] = Driver(stack.enter_context(daemon()), blocks)
            inside[blocks] = Driver(local(blocks), blocks)
            for driver in (remote[blocks], inside[blocks]):
                driver.register()
                driver.fill()
        total, done = rounds * len(sequences) * len(pools), 0
        times: dict[tuple[int, int, str], list[float]] = {}
        for turn in range(rounds + 1):
            for count in sequences:
                for blocks in pools:
                    for name, driver in (("round trip", remote[blocks]), ("core", inside[blocks])):
                        taken = measure(driver, count)
                        if turn:  # the first warms up
                            times.setdefault((count, blocks, name), []).extend(taken)
                    done += bool(turn)
                    _progress(done, total, f"{count} sequences, {blocks} blocks")
    rows: list[dict[str, object]] = []
    for count in sequences:
        for blocks in pools:
            trips, cores = times[count, blocks, "round trip"], times[count, blocks, "core"]
            rows.append(
                {
                    "sequences": count,
                    "blocks": blocks,
                    "samples": len(trips),
                    "p50_us": round(_quantile(trips, 0.5), 1),
                    "p99_us": round(_quantile(trips, 0.99), 1),
                    "core_p50_us": round(_quantile(cores, 0.5), 1),
                    "core_p99_us": round(_quantile(cores, 0.99), 1),
                    "core_share": round(statistics.median(cores) / statistics.median(trips), 2),
                }
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description="Time memd's steps.", allow_abbrev=False)
    parser.add_argument("--sequences", default="1,64,256,1024")
    parser.add_argument("--pools", default="10000,1000000", help="blocks, the null block included")
    parser.add_argument("--rounds", type=int, default=16, help=f"of {STEPS} steps each")
    parser.add_argument("--csv", type=Path, help="also write the table here")
    parser.add_argument("--cpu", type=int, default=0, help="CPU for all processes; -1: any")
    given = parser.parse_args()
    if given.cpu >= 0:
        os.sched_setaffinity(0, {given.cpu})  # threads and the daemon inherit it
    sequences = [int(text) for text in given.sequences.split(",")]
    pools = [int(text) for text in given.pools.split(",")]
    core = "compiled" if compiled.prefer() else "plain Python"  # as `python -m memd` chooses
    print(f"core: {core}, CPU: {given.cpu if given.cpu >= 0 else 'any'}")
    rows = run(sequences, pools, given.rounds)
    names = list(rows[0])
    print("  ".join(f"{name:>11}" for name in names))
    for row in rows:
        print("  ".join(f"{row[name]!s:>11}" for name in names))
    if given.csv:
        with given.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)
    slow = [row for row in rows if row["sequences"] == 256 and float(str(row["p50_us"])) > BOUND_US]
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
