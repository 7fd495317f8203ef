"""`pagekeeper up`: start the three processes, show how far they are, keep them running, end them in order.

Exit status: 0 after a drained stop, 1 when start-up failed, 2 on a bad setting (a child's too), 128 + signal
when a second signal cut the drain short.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from pagekeeper import keys, probe
from pagekeeper.children import LEFTOVERS, specs
from pagekeeper.config import UpConfig
from pagekeeper.lock import AlreadyRunning, RunLock
from pagekeeper.progress import Progress, loading
from pagekeeper.supervisor import BAD_SETTING, GaveUp, Spec, Supervisor, describe_status
from wire.rpc import BadEndpoint, private_directory

LOG_PREFIX = re.compile(r"^\d\d:\d\d:\d\d [A-Z] \S+ ")  # of `wire.logs`: time, level, process
POLL = 0.1  # seconds between two looks at whether the server is ready
NOTICED = 10.0  # seconds within which the death of a child shows, if it does at all


class CannotStart(Exception):
    """Something outside this program is in the way; the message says what to do."""


class BadSetting(Exception):
    """The same command could never start; the message says what to change."""


def up(config: UpConfig, children: Sequence[Spec] | None = None) -> int:
    """Run the server until it is told to stop; returns the exit status.

    Args:
        children: what to start instead of the three processes; for tests.
    """
    try:
        _check_host(config)
        _make_run_dir(config.run_dir)
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
    except CannotStart as error:
        return _refuse(str(error))
    except (BadEndpoint, BadSetting) as error:
        return _refuse(str(error), BAD_SETTING)
    except OSError as error:
        return _refuse(f"--run-dir {config.run_dir} cannot be used: {error.strerror}", BAD_SETTING)


def _refuse(message: str, status: int = 1) -> int:
    print(f"pagekeeper: {message}", file=sys.stderr)
    return status


def _make_run_dir(path: Path) -> None:
    try:
        private_directory(path)
    except OSError as error:
        raise BadSetting(
            f"--run-dir {path} could not be created: {error.strerror}; choose a directory this user "
            "may write to"
        ) from None


def _check_host(config: UpConfig) -> None:
    """What the gateway would refuse too, said before anything runs."""
    twin = os.environ.get("GATEWAY_INSECURE_NO_AUTH", "").lower()
    excused = config.insecure_no_auth or twin in ("1", "true", "yes", "on")
    if excused or _is_loopback(config.host):
        return
    if not keys.find(config.api_keys, config.api_key_file).needed:
        raise BadSetting(
            f"--host {config.host} can be reached from other machines, and no API key is set: anyone "
            "could use this server. Set PAGEKEEPER_API_KEYS or --api-key-file, leave --host out, or "
            "say --insecure-no-auth if something in front of it checks who calls"
        )


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _check_ports(config: UpConfig) -> None:
    if config.port == config.admin_port != 0:
        raise BadSetting(
            f"--port and --admin-port are both {config.port}: the API and memd's page need two ports"
        )
    for flag, host, port in (
        ("--port", config.host, config.port),
        ("--admin-port", "127.0.0.1", config.admin_port),
    ):
        if (error := probe.listen_error(host, port)) is None:
            continue
        match error.errno:
            case errno.EADDRINUSE:
                raise CannotStart(
                    f"port {port} on {host} is taken: stop what listens there, or choose another "
                    f"with {flag}"
                )
            case errno.EACCES:
                raise BadSetting(
                    f"port {port} on {host} may not be used by this user: choose one above 1023 "
                    f"with {flag}"
                )
            case _:
                raise BadSetting(f"cannot listen on port {port} of {host}: {error.strerror}")


def _remove_leftovers(config: UpConfig) -> None:
    for name in LEFTOVERS:
        (config.run_dir / name).unlink(missing_ok=True)


class _Launch:
    """One run of the server, from the first process to the end of the last."""

    def __init__(self, config: UpConfig, children: Sequence[Spec]) -> None:
        self._config = config
        self._progress = Progress(sys.stderr)
        self._supervisor = Supervisor(
            children, self._child_said, self._progress.line, on_death=self._child_died
        )
        self._began = time.monotonic()
        self._signal = 0
        self._late = False
        self._loaded = ""  # the model's name as the executor said it
        self._returning: dict[str, asyncio.Task[None]] = {}  # children waited for, by name

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._told_to_stop, number)
        self._progress.stage("starting memd, executor and gateway")
        waiting = asyncio.create_task(self._wait_until_ready())
        try:
            await self._supervisor.run()
        finally:
            for task in [waiting, *self._returning.values()]:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            self._progress.done()
        if self._supervisor.gave_up:
            self._explain(self._supervisor.gave_up)
            return BAD_SETTING if self._supervisor.gave_up.status == BAD_SETTING else 1
        if self._late:
            return 1
        return 128 + self._signal if self._supervisor.killed else 0

    def _told_to_stop(self, number: int) -> None:
        if not self._signal:
            self._progress.line(self._last_words())
        self._signal = number
        self._supervisor.stop()

    def _last_words(self) -> str:
        seconds = self._config.drain_seconds
        may = f"running streams may finish, for up to {seconds:g} s; " if seconds else ""
        return f"stopping: {may}Ctrl-C again stops at once"

    def _child_died(self, name: str) -> None:
        if name not in self._returning:
            self._returning[name] = asyncio.create_task(self._say_when_back(name))

    async def _say_when_back(self, name: str) -> None:
        began, run_dir = time.monotonic(), self._config.run_dir
        try:
            # The gateway hears of an executor's death a moment later.
            noticed = False
            while True:
                ready = await asyncio.to_thread(_is_ready, run_dir)
                if ready and noticed:
                    break
                noticed = noticed or not ready
                if not noticed and time.monotonic() - began > NOTICED:
                    return
                await asyncio.sleep(POLL)
            took = time.monotonic() - began
            self._progress.line(f"{name} is back after {took:.1f} s")
        finally:
            del self._returning[name]
            self._progress.done()

    def _child_said(self, name: str, line: str) -> None:
        found = loading(line) if name == "executor" else None
        if name == "executor" and line.endswith("warming up"):
            self._progress.stage("warming up")
            return
        if found is None:
            self._progress.line(line)
            return
        self._loaded = found[0]
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
        known = keys.find(self._config.api_keys, self._config.api_key_file)
        # Without a key that the server knows it is not asked: it would log a refusal of our own.
        listed = (
            {} if known.needed and not known.one else probe.get_json(f"{api}/v1/models", known.one)
        )
        named = [str(model["id"]) for model in listed.get("data", ())]
        model = named[0] if named else self._config.served_model_name or self._loaded or "the model"
        body = msgspec.json.encode(
            {
                **({"model": named[0]} if named else {}),  # it may be left out
                "messages": [{"role": "user", "content": "Tell me a short story."}],
                "max_tokens": 200,  # a small model may go on for ever
                "stream": True,
            }
        ).decode()
        auth = ' -H "Authorization: Bearer YOUR_KEY"' if known.needed else ""
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
    """Whether memd answers and the gateway would run a request."""
    admin, api = probe.address(run_dir, "memd"), probe.address(run_dir, "gateway")
    return (
        bool(admin and api)
        and probe.get(f"{admin}/health")[0] == 200
        and probe.get(f"{api}/ready")[0] == 200
    )
