"""One way to keep memory, measured by command: memd over its socket, or its core in this process.

    python -m bench.memd.worker daemon|compiled|plain|answer BLOCKS

Says its name once its pool is full of cached prefixes, then answers each line of JSON, as
{"op": "fork", "samples": 64}, with a list of seconds, or null for an operation it does not have. `answer` is
the core too, but timed only until it has the reply. `bench/memd/peer.py` does the same for vLLM.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import zmq

from bench.memd.device import Device
from bench.memd.load import PROMPT, Ask, Driver
from memd import compiled
from wire.memory import Commit, Fork, MemoryCodec, Reply, Request, Step
from wire.rpc import Dealer, Limits, ipc

WARM = 16  # steps before the timed ones: another pool was measured in between, and caches hold that one
LEASE_MS = 600_000
PATIENCE_MS = 10_000
PACKED = b"\0"  # for the journal, which keeps a message as it came: a server has that anyway

Audit = Callable[[], object]


@contextmanager
def daemon() -> Iterator[tuple[Ask, Audit]]:
    """A memd process of its own: how to ask it, and how to have it check every rule."""
    with tempfile.TemporaryDirectory(prefix="memd-bench-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "memd", "--run-dir", folder, "--admin-port", "0",
             "--log-level", "error", "--lease-ms", str(LEASE_MS)]
        )  # fmt: skip
        try:
            with Dealer(ipc(Path(folder) / "memd.sock"), Limits()) as dealer:
                codec = MemoryCodec()

                def ask(request: Request) -> Reply:
                    dealer.send(codec.encode(request))
                    if not dealer.poll(PATIENCE_MS):
                        raise SystemExit("memd did not answer within 10 s")
                    return codec.decode_reply(next(dealer.receive()))

                def audit() -> object:
                    about = json.loads((Path(folder) / "memd.json").read_text())
                    asked = urllib.request.Request(f"{about['admin']}/v1/audit", method="POST")
                    with urllib.request.urlopen(asked, timeout=120) as reply:
                        return reply.read()

                if not dealer.raw.poll(PATIENCE_MS, zmq.POLLOUT):
                    raise SystemExit("memd did not start within 10 s")
                yield ask, audit
        finally:
            process.terminate()
            process.wait(10)


class Worker:
    """The operations, on any of the two.

    Args:
        ask: sends a request and returns its reply.
        audit: checks every rule.
        settle: finishes what a reply left over, not timed; None where that is the other side's business.
    """

    def __init__(
        self, driver: Driver, audit: Audit, settle: Callable[[], None] | None = None
    ) -> None:
        self._driver = driver
        self._audit = audit
        self._settle = settle
        self._device = Device()
        driver.register()
        driver.fill()
        gc.collect()
        gc.freeze()  # as memd does when it is ready

    def measure(self, asked: dict[str, Any]) -> list[float] | None:
        """Seconds of each sample.

        Args:
            asked: `op`; `samples`; for steps `count`, of sequences; `threads`, that compute meanwhile;
                `pause_ms`, between two samples.
        """
        samples: int = asked["samples"]
        with self._device.computing(asked.get("threads", 0)):
            match asked["op"]:
                case "step":
                    return self._steps(asked["count"], samples, asked.get("pause_ms", 0) / 1000)
                case "admit":
                    return self._admit(samples)
                case "free":
                    return self._free(samples)
                case "lookup":
                    return self._lookup(samples)
                case "fork":
                    return self._fork(samples)
                case "audit":
                    started = time.perf_counter()
                    self._audit()
                    return [time.perf_counter() - started]
        return None

    def _time(self, steps: list[Step], pause: float = 0.0) -> list[float]:
        """Messages are made before: what an executor computes between two is not part of the round trip."""
        taken = []
        for step in steps:
            if pause:
                time.sleep(pause)
            started = time.perf_counter()
            self._driver.send(step)
            taken.append(time.perf_counter() - started)
            if self._settle is not None:
                self._settle()
        return taken

    def _steps(self, count: int, samples: int, pause: float) -> list[float]:
        """Every sequence decodes one token a step; one in sixteen begins a block, which must be evicted."""
        self._driver.begin(count)
        taken = self._time([self._driver.decode() for _ in range(WARM + samples)], pause)
        self._driver.step(frees=list(self._driver.lengths))
        self._driver.lengths = {}
        return taken[WARM:]

    def _admitted(self, count: int) -> list[int]:
        """Sequences of new prompts, computed and committed."""
        admits = [self._driver.newcomer() for _ in range(count)]
        for item in admits:
            self._driver.step(admits=[item])
        self._driver.step(commits=[Commit(item.seq, PROMPT) for item in admits])
        return [item.seq for item in admits]

    def _admit(self, samples: int) -> list[float]:
        """One new prompt a step, with the commit of the one before."""
        admits = [self._driver.newcomer() for _ in range(samples + 1)]
        self._driver.step(admits=[admits[0]])
        taken = self._time(
            [
                self._driver.message([Commit(before.seq, PROMPT)], admits=[item])
                for before, item in pairwise(admits)
            ]
        )
        self._driver.step(
            commits=[Commit(admits[-1].seq, PROMPT)], frees=[item.seq for item in admits]
        )
        return taken

    def _free(self, samples: int) -> list[float]:
        return self._time([self._driver.message(frees=[seq]) for seq in self._admitted(samples)])

    def _lookup(self, samples: int) -> list[float]:
        """A prompt whose every token but the last is cached."""
        (first,) = self._admitted(1)
        self._driver.step(frees=[first])
        taken = []
        for _ in range(samples):
            item = self._driver.newcomer(like=first)
            taken += self._time([self._driver.message(admits=[item])])
            self._driver.step(frees=[item.seq])
        return taken

    def _fork(self, samples: int) -> list[float]:
        (parent,) = self._admitted(1)
        children = [self._driver.newcomer().seq for _ in range(samples)]
        taken = self._time(
            [self._driver.message(forks=[Fork(parent, child, PROMPT)]) for child in children]
        )
        self._driver.step(frees=[parent, *children])
        return taken


def serve(worker: Worker, name: str) -> None:
    """Answer lines until there are no more."""
    print(json.dumps(name), flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.measure(json.loads(line))), flush=True)


def main() -> int:
    kind, blocks = sys.argv[1], int(sys.argv[2])
    if kind == "daemon":
        with daemon() as (ask, audit):
            serve(Worker(Driver(ask, blocks), audit), "over ipc")
        return 0
    if kind == "plain":
        os.environ["MEMD_PLAIN"] = "1"
    name = "compiled core" if compiled.prefer() else "plain core"
    from memd.core import Memory  # not before the compiled one could be preferred

    memory = Memory(boot_id="0" * 32, epoch=1, key=b"k" * 32, lease_ms=LEASE_MS)

    def handle(request: Request) -> Reply:
        return memory.handle(time.monotonic(), request, PACKED)

    def answer(request: Request) -> Reply:
        return memory.answer(time.monotonic(), request, PACKED)

    if kind == "answer":
        serve(Worker(Driver(answer, blocks), memory.check, memory.settle), f"{name}, to the answer")
    else:
        serve(Worker(Driver(handle, blocks), memory.check), name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
