"""The real processes, started for a test in a private run directory, and ways to look into them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]


def eventually(check: Callable[[], Any], within: float, what: str, every: float = 0.02) -> float:
    """Wait until `check()` is true; returns the seconds it took.

    Raises:
        AssertionError: it is still false after `within` seconds.
    """
    begin = time.monotonic()
    while True:
        try:
            value = check()
        except (OSError, KeyError, IndexError, ValueError):
            value = None
        waited = time.monotonic() - begin
        if value:
            return waited
        if waited > within:
            raise AssertionError(f"not within {within} s: {what} (last seen: {value!r})")
        time.sleep(every)


def get_json(url: str, timeout: float = 5.0) -> Any:
    """The JSON at `url`, whatever the status."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return json.loads(error.read() or b"null")


def http_status(url: str, timeout: float = 5.0) -> int:
    """The status of a GET; 0 when nobody listens."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


class Stack:
    """memd, one executor and a gateway as child processes.

    Attributes:
        url: of the gateway, without `/v1`.
        admin: of memd's HTTP.
    """

    def __init__(
        self, model: str | Path, *, executor: Mapping[str, str], name: str = "tiny"
    ) -> None:
        self.run_dir = Path(tempfile.mkdtemp(prefix="pk-"))
        self.logs: dict[str, Path] = {}
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.commands = {
            "memd": ["--admin-port", "0"],
            "executor": ["--model", str(model), "--served-model-name", name, "--threads", "1"],
            "gateway": ["--port", "0"],
        }
        for key, value in executor.items():
            self.commands["executor"] += [f"--{key}", value]

    @property
    def url(self) -> str:
        return str(json.loads((self.run_dir / "gateway.json").read_text())["url"]).rstrip("/")

    @property
    def admin(self) -> str:
        return str(json.loads((self.run_dir / "memd.json").read_text())["admin"]).rstrip("/")

    def start(self, process: str, *more: str) -> None:
        """Start one of the three (again)."""
        log = self.logs.setdefault(process, self.run_dir / f"{process}.log")
        # The launcher's leash: no process outlives a test run, even one that is killed.
        leash = [sys.executable, str(ROOT / "pagekeeper" / "leash.py"), str(os.getpid()), "0"]
        command = [*leash, sys.executable, "-m", process, "--run-dir", str(self.run_dir)]
        with log.open("ab") as out:
            self.children[process] = subprocess.Popen(
                [*command, *self.commands[process], *more],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )

    def up(self, within: float = 60) -> Stack:
        """Start all three and wait until the gateway is ready."""
        for process in ("memd", "executor", "gateway"):
            self.start(process)
        try:
            self.wait_ready(within)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.tail()}") from None
        return self

    def wait_ready(self, within: float = 60) -> float:
        return eventually(
            lambda: http_status(self.url + "/ready") == 200, within, "the gateway is ready", 0.05
        )

    def kill(self, process: str, sign: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal and wait for the end; returns the exit status."""
        child = self.children[process]
        child.send_signal(sign)
        return child.wait(40)

    def pool(self) -> dict[str, Any]:
        """The one pool in memd's state."""
        pools = get_json(self.admin + "/v1/state")["pools"]
        found: dict[str, Any] = pools[0]
        return found

    def used(self) -> int:
        return int(self.pool()["used"])

    def audit(self) -> None:
        """Have memd check its invariants."""
        request = urllib.request.Request(self.admin + "/v1/audit", method="POST", data=b"")
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200

    def tail(self, lines: int = 30) -> str:
        """The last log lines of each process, for a failing test's message."""
        return "\n".join(
            f"--- {process}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
            for process, log in self.logs.items()
        )

    def rss(self) -> dict[str, int]:
        """Resident bytes of each process."""
        return {
            process: int(psutil.Process(child.pid).memory_info().rss)
            for process, child in self.children.items()
        }

    def down(self) -> None:
        """End all processes and remove the run directory."""
        for child in self.children.values():
            if child.poll() is None:
                child.kill()
                child.wait(10)
        for path in self.run_dir.iterdir():
            path.unlink()
        self.run_dir.rmdir()
