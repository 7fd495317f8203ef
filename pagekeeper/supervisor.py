"""Keeps a list of child processes alive, and takes all of them down together.

It knows nothing of what the children do: they are argument lists. Every line a child writes is passed on and
the last ones are kept, because they say why it died. One event loop, and one waiting thread per child.

Before `started()` is called a child that dies three times, or once with status 2 (a bad setting: the same
again would happen), ends the whole; afterwards a child is restarted for ever, with growing delays.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from pagekeeper.backoff import Backoff, Policy

LEASH = Path(__file__).with_name("leash.py")
KEPT_LINES = 20  # of each child, to show when it dies
LONGEST_LINE = 8192  # bytes; the rest of a longer line is dropped
BAD_SETTING = 2  # exit status of a process that was started with a setting it refuses


@dataclass(slots=True, frozen=True)
class Spec:
    """One child to keep alive."""

    name: str
    argv: tuple[str, ...]  # argv[0] is a path
    env: Mapping[str, str] = field(default_factory=dict)  # added to this process's own
    nice: int = 0  # added to its niceness: above 0 others run first
    stop_seconds: float = 5.0  # after SIGTERM, before SIGKILL


@dataclass(slots=True, frozen=True)
class GaveUp:
    """Why start-up ended without success."""

    name: str
    status: int  # as `Popen.returncode`: below 0 a signal
    starts: int
    lines: tuple[str, ...]  # the last ones it wrote


def describe_status(status: int) -> str:
    """`status` of a dead process for people."""
    if status >= 0:
        return f"status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


class Child:
    """One process at a time, started again and again from the same spec."""

    def __init__(self, spec: Spec, on_line: Callable[[str, str], None]) -> None:
        self.spec = spec
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.process: subprocess.Popen[bytes] | None = None
        self.starts = 0
        self._on_line = on_line

    async def run_once(self, threads: Executor) -> int:
        """Start the process, pass on its lines, and return its status when it has ended.

        Args:
            threads: where to wait for it; one of them is taken meanwhile.
        """
        self.starts += 1
        self.lines.clear()
        self.process = process = self._spawn()
        reading = asyncio.create_task(self._read_lines(process))
        status = await asyncio.get_running_loop().run_in_executor(threads, process.wait)
        # A grandchild may hold the pipe open: what is in it by now is enough.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reading, timeout=1.0)
        return status

    def _spawn(self) -> subprocess.Popen[bytes]:
        leash = (sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), str(self.spec.nice))
        return subprocess.Popen(
            [*leash, *self.spec.argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **self.spec.env},
            # Its own session: Ctrl-C reaches the launcher alone, which then stops children in order.
            start_new_session=True,
        )

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it runs."""
        if self.process is not None:
            self.process.send_signal(number)  # does nothing when it has ended

    def kill(self) -> None:
        """Kill the process and all it has started."""
        if self.process is not None and self.process.poll() is None:
            # It leads a group of its own since `_spawn`; it may have ended in between.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    async def _read_lines(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), process.stdout
        )
        rest = b""
        try:
            while chunk := await reader.read(65536):
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    self._line(line)
                rest = rest[:LONGEST_LINE]
            if rest:
                self._line(rest)
        finally:
            transport.close()

    def _line(self, raw: bytes) -> None:
        text = raw[:LONGEST_LINE].decode(errors="replace").rstrip()
        if text:
            self.lines.append(text)
            self._on_line(self.spec.name, text)


class Supervisor:
    """Runs children until it is told to stop or start-up fails.

    Args:
        specs: in the order they are started; they are stopped in the opposite order, each after the one
            before has ended, because the first ones serve the later ones while those drain.
        on_line: called with a child's name and a line it wrote.
        on_event: called with a sentence when something happens to a child.
        on_death: called with the name of a child that died after `started` and will be started again.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        on_line: Callable[[str, str], None],
        on_event: Callable[[str], None],
        policy: Policy | None = None,
        on_death: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.children = [Child(spec, on_line) for spec in specs]
        self.gave_up: GaveUp | None = None
        self._policy = policy or Policy()
        self._on_event = on_event
        self._on_death = on_death
        self._started = False
        self._stopping = asyncio.Event()
        self._killed = False
        self._threads = ThreadPoolExecutor(max(1, len(specs)))

    def started(self) -> None:
        """Start-up is over: from now on a dead child is always started again."""
        self._started = True

    def stop(self) -> None:
        """End `run`: SIGTERM to one child after the other, last first. Again: SIGKILL to all."""
        if self._stopping.is_set():
            self._killed = True
            for child in self.children:
                child.kill()
        self._stopping.set()

    @property
    def killed(self) -> bool:
        """Whether `stop` was called more than once, so that nothing was drained."""
        return self._killed

    async def run(self) -> None:
        """Keep all children alive until `stop` or until start-up fails (`gave_up`); none is left."""
        keeping = {
            child.spec.name: asyncio.create_task(self._keep(child)) for child in self.children
        }
        try:
            await self._stopping.wait()
            for child in reversed(self.children):
                await self._take_down(child, keeping[child.spec.name])
        finally:
            for child in self.children:
                child.kill()
            await asyncio.gather(*keeping.values(), return_exceptions=True)
            self._threads.shutdown()

    async def _take_down(self, child: Child, kept: asyncio.Task[None]) -> None:
        child.signal(signal.SIGTERM)
        _, late = await asyncio.wait({kept}, timeout=child.spec.stop_seconds)
        if late:
            self._on_event(
                f"{child.spec.name} did not end within {child.spec.stop_seconds:g} s of SIGTERM: killed"
            )
            child.kill()
            await asyncio.wait({kept})

    async def _keep(self, child: Child) -> None:
        backoff = Backoff(self._policy)
        while not self._stopping.is_set():
            began = time.monotonic()
            status = await child.run_once(self._threads)
            if self._stopping.is_set():
                return
            delay = backoff.died(time.monotonic() - began)
            if not self._started and (status == BAD_SETTING or backoff.exhausted):
                self.gave_up = GaveUp(child.spec.name, status, child.starts, tuple(child.lines))
                self._stopping.set()
                return
            self._on_event(
                f"{child.spec.name} ended ({describe_status(status)}): starting it again in {delay:g} s"
            )
            if self._started:
                self._on_death(child.spec.name)
            try:
                await asyncio.wait_for(self._stopping.wait(), timeout=delay)
            except TimeoutError:
                continue
