"""The supervisor with tiny children made of `python -c`."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

import psutil
import pytest

from pagekeeper.backoff import Policy
from pagekeeper.supervisor import Spec, Supervisor

P = ParamSpec("P")


def in_a_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an async test in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


QUICK = Policy(first=0.05, most=0.2, healthy=60, attempts=3)


class Run:
    """A supervisor whose lines and events are collected."""

    def __init__(self, *specs: Spec, policy: Policy = QUICK) -> None:
        self.lines: list[tuple[str, str]] = []
        self.events: list[str] = []
        self.supervisor = Supervisor(
            specs, lambda name, line: self.lines.append((name, line)), self.events.append, policy
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():  # noqa: ASYNC110 - what is waited for is another process
                await asyncio.sleep(0.01)

    def said(self, text: str) -> int:
        return sum(line == text for _, line in self.lines)


def python(name: str, code: str, *, stop_seconds: float = 5.0, nice: int = 0) -> Spec:
    argv = (sys.executable, "-I", "-S", "-u", "-c", textwrap.dedent(code))
    return Spec(name, argv, stop_seconds=stop_seconds, nice=nice)


POLITE = """
    import signal, sys, time
    def end(number, frame):
        print("ending"); sys.exit(0)
    signal.signal(signal.SIGTERM, end)
    print("up")
    while True:
        time.sleep(60)
"""

STUBBORN = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up")
    while True:
        time.sleep(60)
"""


@in_a_loop
async def test_a_child_killed_after_start_up_is_started_again() -> None:
    run = Run(python("a", POLITE))
    task = asyncio.create_task(run.supervisor.run())
    await run.until(lambda: run.said("up") == 1)
    run.supervisor.started()
    for round_ in range(2, 5):
        run.supervisor.children[0].signal(signal.SIGKILL)
        await run.until(functools.partial(lambda n: run.said("up") == n, round_))
    run.supervisor.stop()
    await task
    assert run.supervisor.gave_up is None
    assert run.events == [
        f"a ended (killed by SIGKILL): starting it again in {delay} s"
        for delay in ("0.05", "0.1", "0.2")
    ]


@in_a_loop
async def test_start_up_is_given_up_after_three_deaths_with_the_last_lines() -> None:
    run = Run(python("a", POLITE), python("b", "print('no such luck'); raise SystemExit(7)"))
    await run.supervisor.run()
    gave_up = run.supervisor.gave_up
    assert gave_up is not None
    assert (gave_up.name, gave_up.status, gave_up.starts) == ("b", 7, 3)
    assert gave_up.lines == ("no such luck",)
    assert run.supervisor.children[0].process is not None
    assert run.supervisor.children[0].process.poll() is not None


@in_a_loop
async def test_a_refused_setting_is_not_tried_again() -> None:
    run = Run(python("a", "print('--model x: no such file'); raise SystemExit(2)"))
    await run.supervisor.run()
    assert run.supervisor.gave_up is not None
    assert run.supervisor.gave_up.starts == 1


@in_a_loop
async def test_children_are_stopped_in_the_opposite_order_one_after_the_other() -> None:
    run = Run(*(python(name, POLITE) for name in "abc"))
    task = asyncio.create_task(run.supervisor.run())
    await run.until(lambda: run.said("up") == 3)
    run.supervisor.stop()
    await task
    assert [name for name, line in run.lines if line == "ending"] == ["c", "b", "a"]
    assert not run.supervisor.killed


@in_a_loop
async def test_a_child_that_ignores_sigterm_is_killed_when_its_time_is_up() -> None:
    run = Run(python("a", STUBBORN, stop_seconds=0.2))
    task = asyncio.create_task(run.supervisor.run())
    await run.until(lambda: run.said("up") == 1)
    run.supervisor.stop()
    await asyncio.wait_for(task, 10)
    assert run.events == ["a did not end within 0.2 s of SIGTERM: killed"]


@in_a_loop
async def test_a_second_stop_kills_at_once() -> None:
    run = Run(python("a", POLITE), python("b", STUBBORN, stop_seconds=600))
    task = asyncio.create_task(run.supervisor.run())
    await run.until(lambda: run.said("up") == 2)
    run.supervisor.stop()
    await asyncio.sleep(0.1)
    run.supervisor.stop()
    await asyncio.wait_for(task, 10)
    assert run.supervisor.killed


@in_a_loop
async def test_what_a_child_started_is_killed_with_it() -> None:
    nested = """
        import signal, subprocess, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"])
        print(child.pid)
        time.sleep(600)
    """
    run = Run(python("a", nested, stop_seconds=0.1))
    task = asyncio.create_task(run.supervisor.run())
    await run.until(lambda: bool(run.lines))
    grandchild = int(run.lines[0][1])
    run.supervisor.stop()
    await asyncio.wait_for(task, 10)
    assert ended(grandchild, within=5)


@in_a_loop
async def test_lines_of_any_length_and_bytes_are_passed_on() -> None:
    code = """
        import sys
        sys.stdout.buffer.write(b"x" * 300_000 + b"\\n\\xff\\xfe\\nlast")
        raise SystemExit(2)
    """
    run = Run(python("a", code))
    await run.supervisor.run()
    assert [len(line) for _, line in run.lines] == [8192, 2, 4]
    assert run.lines[-1] == ("a", "last")


@in_a_loop
async def test_niceness_reaches_the_child() -> None:
    run = Run(python("a", "import os; print(os.nice(0)); raise SystemExit(2)", nice=3))
    await run.supervisor.run()
    assert run.lines == [("a", str(min(os.nice(0) + 3, 19)))]


@pytest.mark.skipif(
    not os.path.exists("/proc/self/autogroup"), reason="this kernel has no groups of sessions"
)
@in_a_loop
async def test_niceness_counts_against_other_sessions_too() -> None:
    code = "print(open('/proc/self/autogroup').read().split()[-1]); raise SystemExit(2)"
    run = Run(python("a", code, nice=3))
    await run.supervisor.run()
    assert run.lines == [("a", str(min(os.nice(0) + 3, 19)))]


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_kill_9_of_the_launcher_leaves_no_process() -> None:
    code = f"""
        import asyncio, sys
        from pagekeeper.supervisor import Spec, Supervisor
        child = Spec("a", (sys.executable, "-I", "-S", "-u", "-c", {textwrap.dedent(STUBBORN)!r}))
        supervisor = Supervisor([child, Spec("b", child.argv)], lambda *line: ready(), print)
        def ready():
            print(*(child.process.pid for child in supervisor.children if child.process), flush=True)
        asyncio.run(supervisor.run())
    """
    launcher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    with launcher.stdout:
        launcher.stdout.readline()
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        assert len(pids) == 2
        assert all(psutil.pid_exists(pid) for pid in pids)
        launcher.kill()
        launcher.wait()
    assert all(ended(pid, within=5) for pid in pids)


def ended(pid: int, within: float) -> bool:
    """Whether a process is gone, or only waits to be collected by whoever inherited it."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False
