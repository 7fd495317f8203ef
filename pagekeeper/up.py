"""`pagekeeper up`: start the three processes, show how far they are, keep them running, end them in order.

Exit status: 0 after a drained stop, 1 when start-up failed, 2 on a bad setting, 128 + signal when a second
signal cut the drain short.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pagekeeper import probe
from pagekeeper.children import LEFTOVERS, specs
from pagekeeper.config import UpConfig, first_key
from pagekeeper.lock import AlreadyRunning, RunLock
from pagekeeper.progress import Progress, loading
from pagekeeper.supervisor import BAD_SETTING, GaveUp, Spec, Supervisor, describe_status
from wire.rpc import BadEndpoint, private_directory

LOG_PREFIX = re.compile(r"^\d\d:\d\d:\d\d [A-Z] \S+ ")  # of `wire.logs`: time, level, process
POLL = 0.1  # seconds between two looks at whether the server is ready


class CannotStart(Exception):
    """Something outside this program is in the way; the message says what to do."""


def up(config: UpConfig, children: Sequence[Spec] | None = None) -> int:
    """Run the server until it is told to stop; returns the exit status.

    Args:
        children: what to start instead of the three processes; for tests.
    """
    try:
        private_directory(config.run_dir)
        with RunLock(config.run_dir):
            _check_ports(config)
            _remove_leftovers(config)
            try:
                return asyncio.run(_Launch(config, children or specs(config)).run())
            finally:
                _remove_leftovers(config)
    except AlreadyRunning as error:
        return _refuse(
            f"another one (process {error.pid}) runs in {config.run_dir}: stop it with "
            "`pagekeeper down`, or choose another --run-dir"
        )
    except (BadEndpoint, CannotStart) as error:
        return _refuse(str(error))
    except OSError as error:
        return _refuse(f"--run-dir {config.run_dir} cannot be used: {error.strerror}")


def _refuse(message: str) -> int:
    print(f"pagekeeper: {message}", file=sys.stderr)
    return 1


def _check_ports(config: UpConfig) -> None:
    for flag, host, port in (
        ("--port", config.host, config.port),
        ("--admin-port", "127.0.0.1", config.admin_port),
    ):
        if not probe.port_is_free(host, port):
            raise CannotStart(
                f"port {port} on {host} is taken or not ours to use: stop what listens there, or "
                f"choose another with {flag}"
            )


def _remove_leftovers(config: UpConfig) -> None:
    for name in LEFTOVERS:
        (config.run_dir / name).unlink(missing_ok=True)


class _Launch:
    """One run of the server, from the first process to the end of the last."""

    def __init__(self, config: UpConfig, children: Sequence[Spec]) -> None:
        self._config = config
        self._progress = Progress(sys.stderr)
        self._supervisor = Supervisor(children, self._child_said, self._progress.line)
        self._began = time.monotonic()
        self._signal = 0
        self._late = False

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._told_to_stop, number)
        self._progress.stage("starting memd, executor and gateway")
        waiting = asyncio.create_task(self._wait_until_ready())
        try:
            await self._supervisor.run()
        finally:
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting
            self._progress.done()
        if self._supervisor.gave_up:
            self._explain(self._supervisor.gave_up)
            return 1
        if self._late:
            return 1
        return 128 + self._signal if self._supervisor.killed else 0

    def _told_to_stop(self, number: int) -> None:
        if not self._signal:
            self._progress.line("stopping: running streams may finish; again to stop at once")
        self._signal = number
        self._supervisor.stop()

    def _child_said(self, name: str, line: str) -> None:
        found = loading(line) if name == "executor" else None
        if name == "executor" and line.endswith("warming up"):
            self._progress.stage("warming up")
            return
        if found is None:
            self._progress.line(line)
            return
        self._progress.loading(*found)

    async def _wait_until_ready(self) -> None:
        run_dir = self._config.run_dir
        while not await asyncio.to_thread(_is_ready, run_dir):
            if time.monotonic() - self._began > self._config.start_seconds:
                self._late = True
                self._progress.line(
                    f"pagekeeper: not ready after --start-seconds {self._config.start_seconds:g}: "
                    "stopped; the lines above say what was reached"
                )
                self._supervisor.stop()
                return
            await asyncio.sleep(POLL)
        self._supervisor.started()
        self._progress.done()
        print(await asyncio.to_thread(self._welcome), flush=True)

    def _welcome(self) -> str:
        api = probe.address(self._config.run_dir, "gateway")
        admin = probe.address(self._config.run_dir, "memd")
        key = first_key(self._config.api_keys)
        listed = probe.get_json(f"{api}/v1/models", key).get("data") or [{}]
        model = str(listed[0].get("id", "default"))
        body = msgspec.json.encode(
            {
                "model": model,
                "messages": [{"role": "user", "content": "Tell me a short story."}],
                "stream": True,
            }
        ).decode()
        auth = " -H 'Authorization: Bearer YOUR_KEY'" if key else ""
        took = time.monotonic() - self._began
        return (
            f"\n{model} is ready after {took:.1f} s\n\n"
            f"  API        {api}/v1\n"
            f"  chat       {api}/\n"
            f"  block map  {admin}/\n\n"
            f"  curl -N {api}/v1/chat/completions{auth} -H 'Content-Type: application/json' \\\n"
            f"    -d {shlex.quote(body)}\n\n"
            "Ctrl-C stops it.\n"
        )

    def _explain(self, gave_up: GaveUp) -> None:
        lines = gave_up.lines or ("(it wrote nothing)",)
        if gave_up.status == BAD_SETTING:
            why = LOG_PREFIX.sub("", lines[-1]).removeprefix(f"{gave_up.name}: ")
            print(f"pagekeeper: {gave_up.name} cannot start: {why}", file=sys.stderr)
            return
        print(
            f"pagekeeper: {gave_up.name} ended {gave_up.starts} times before it was ready "
            f"({describe_status(gave_up.status)}); its last lines:",
            *(f"  {line}" for line in lines),
            sep="\n",
            file=sys.stderr,
        )


def _is_ready(run_dir: Path) -> bool:
    if not probe.address(run_dir, "memd"):
        return False
    api = probe.address(run_dir, "gateway")
    return bool(api) and probe.get(f"{api}/ready")[0] == 200
