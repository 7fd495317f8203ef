"""`python -m gateway` as a process: how it starts, refuses to start, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.fake_executor import FakeExecutor, Script, make_card
from tests.gateway.front import Answer, call
from tests.gateway.serving import run, until
from wire.generate import Submit

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "stream": True}


@pytest.fixture
def run_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="pk-") as path:  # short: sockets' paths have a limit
        yield Path(path) / "run"


async def start(run_dir: Path, *argv: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", "--run-dir", str(run_dir), "--port", "0", *argv,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def started(
    run_dir: Path, *argv: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, int]]:
    """A gateway process that listens, and its port; killed at the end."""
    process = await start(run_dir, *argv)
    note = run_dir / "gateway.json"
    try:
        while not note.exists():
            assert process.returncode is None
            await asyncio.sleep(0.02)
        told = json.loads(note.read_bytes())
        assert told["pid"] == process.pid
        yield process, int(told["url"].rsplit(":", 1)[1])
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def until_ready(port: int) -> None:
    for _ in range(500):
        if (await call(port, "GET", "/ready")).status == 200:
            return
        await asyncio.sleep(0.02)
    raise TimeoutError("never ready")


def refusal(*argv: str, directory: Path) -> tuple[int, str]:
    """Exit status and message of a start that must fail."""

    async def case() -> tuple[int, str]:
        process = await start(directory, *argv)
        _, said = await process.communicate()
        assert process.returncode is not None
        return process.returncode, said.decode()

    return run(case())


def test_a_port_in_use_is_one_clear_line_and_a_failure(run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, said = refusal("--port", str(port), directory=run_dir)
    assert status == 2
    assert said.splitlines() == [
        f"gateway: port {port} of 127.0.0.1 is in use; stop what listens there or choose another --port"
    ]
    assert not (run_dir / "gateway.json").exists()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--host", "0.0.0.0"), "--insecure-no-auth"),
        (("--host", "::"), "--insecure-no-auth"),
        (("--api-key-file", "/nonexistent"), "cannot be read"),
        (("--api-keys", "a,,b"), "--api-keys"),
    ],
)
def test_settings_that_would_expose_the_server_are_refused_in_one_line(
    run_dir: Path, argv: tuple[str, ...], said: str
) -> None:
    status, message = refusal(*argv, directory=run_dir)
    assert status == 2
    assert said in message
    assert len(message.splitlines()) == 1


def test_sigterm_lets_a_stream_finish_refuses_new_requests_and_exits_with_0(run_dir: Path) -> None:
    def slow(submit: Submit) -> Script:
        return Script([list(range(20, 40))] * submit.n, delay=0.05)

    async def case() -> None:
        async with (
            FakeExecutor(run_dir, make_card(), slow),
            started(run_dir, "--drain-seconds", "20") as (process, port),
        ):
            await until_ready(port)
            stream = asyncio.create_task(call(port, "POST", "/v1/chat/completions", CHAT))
            await asyncio.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            assert (await call(port, "GET", "/ready")).json["status"].startswith("draining")
            late = await call(port, "POST", "/v1/chat/completions", CHAT)
            assert (late.status, late.error["code"]) == (503, "draining")
            assert late.headers["retry-after"].isdigit()
            answer = await stream
            assert b'"finish_reason":"length"' in answer.body
            assert b"data: [DONE]" in answer.body
            assert await process.wait() == 0
            assert not (run_dir / "gateway.json").exists()

    run(case())


@pytest.mark.parametrize("twice", [False, True])
def test_a_stream_over_the_deadline_ends_with_an_error_event_and_exit_0(
    run_dir: Path, twice: bool
) -> None:
    def endless(submit: Submit) -> Script:
        return Script([[20, 21, 22]] * submit.n, finish="")

    async def case() -> None:
        async with (
            FakeExecutor(run_dir, make_card(), endless),
            started(run_dir, "--drain-seconds", "20" if twice else "0.3") as (process, port),
        ):
            await until_ready(port)
            stream = asyncio.create_task(call(port, "POST", "/v1/chat/completions", CHAT))
            await asyncio.sleep(0.3)
            process.send_signal(signal.SIGTERM)
            if twice:
                await asyncio.sleep(0.1)
                process.send_signal(signal.SIGINT)
            answer: Answer = await stream
            assert answer.status == 200
            assert b'"error"' in answer.body
            assert b'"draining"' in answer.body
            async with asyncio.timeout(5):
                assert await process.wait() == 0

    run(case())


def test_an_idle_gateway_ends_at_once_and_can_start_without_an_executor(run_dir: Path) -> None:
    async def case() -> None:
        async with started(run_dir) as (process, port):
            assert (await call(port, "GET", "/health")).status == 200
            assert (await call(port, "GET", "/ready")).status == 503
            asked = await call(port, "POST", "/v1/chat/completions", CHAT)
            assert asked.status == 503
            assert oct(os.stat(run_dir).st_mode & 0o777) == "0o700"
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(3):
                assert await process.wait() == 0

    run(case())


def test_of_two_gateways_in_one_directory_the_later_is_announced_until_it_ends(
    run_dir: Path,
) -> None:
    note = run_dir / "gateway.json"

    async def case() -> None:
        async with started(run_dir) as (first, port):
            second = await start(run_dir)
            try:
                await until(lambda: json.loads(note.read_bytes())["pid"] == second.pid, 10)
                assert (await call(port, "GET", "/health")).status == 200
                first.send_signal(signal.SIGTERM)
                async with asyncio.timeout(5):
                    assert await first.wait() == 0
                assert json.loads(note.read_bytes())["pid"] == second.pid
                second.send_signal(signal.SIGTERM)
                async with asyncio.timeout(5):
                    assert await second.wait() == 0
                assert not note.exists()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    second.kill()
                await second.communicate()

    run(case())


# Every write to a file fails, as on a full disk; pipes go on.
FULL_DISK = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
sys.argv[0] = "gateway"
runpy.run_module("gateway", run_name="__main__")
"""


def answers(port: int) -> bool:
    """Whether somebody listens there."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_a_gateway_starts_and_serves_on_a_full_disk(run_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]

    async def case() -> str:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", FULL_DISK, "--run-dir", str(run_dir), "--port", str(port),
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            await until(lambda: answers(port) or process.returncode is not None, 20)
            assert (await call(port, "GET", "/health")).status == 200
            process.send_signal(signal.SIGTERM)
        except BaseException:
            process.kill()
            raise
        _, said = await process.communicate()
        assert process.returncode == 0
        return said.decode()

    said = run(case())
    assert "gateway.json cannot be written" in said
    assert "Traceback" not in said
