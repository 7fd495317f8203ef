"""Real `python -m memd` processes, and an executor's side of their socket."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import zmq

from wire.memory import MemoryCodec, Registered, Reply, Request
from wire.rpc import Dealer, Limits, ipc

ROOT = Path(__file__).resolve().parents[2]


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Daemon:
    """A running memd."""

    process: subprocess.Popen[str]
    run_dir: Path
    host: str
    port: int

    def http(self, method: str, path: str, /, **headers: str) -> Answer:
        """One request without a body; underscores in header names become dashes."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=10)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers=named)
            response = connection.getresponse()
            return Answer(response.status, dict(response.headers.items()), response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.http("GET", path, **headers)

    def raw(self, payload: bytes) -> bytes:
        """What the server answers to these bytes before it closes, at most 5 s."""
        with socket.create_connection((self.host, self.port), timeout=5) as stream:
            stream.sendall(payload)
            answer = b""
            while part := stream.recv(65536):
                answer += part
            return answer

    @contextmanager
    def executor(self, limits: Limits | None = None) -> Iterator[Executor]:
        with Dealer(ipc(self.run_dir / "memd.sock"), limits or Limits()) as dealer:
            assert dealer.raw.poll(5000, zmq.POLLOUT)
            yield Executor(dealer)

    def metric(self, name: str) -> float:
        """The value of one sample, labels written as they are in the text format."""
        for line in self.get("/metrics").body.decode().splitlines():
            if line.startswith(f"{name} "):
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"no sample {name}")


class Executor:
    """Sends raw or typed messages and waits for answers."""

    def __init__(self, dealer: Dealer) -> None:
        self.dealer = dealer
        self.codec = MemoryCodec()

    def send(self, payload: bytes) -> None:
        self.dealer.send(payload)

    def receive(self, seconds: float = 5) -> Reply | None:
        if not self.dealer.poll(round(seconds * 1000)):
            return None
        return self.codec.decode_reply(next(self.dealer.receive()))

    def ask(self, request: Request) -> Reply:
        self.send(self.codec.encode(request))
        reply = self.receive()
        assert reply is not None
        return reply

    def register(self, request: Request) -> Registered:
        reply = self.ask(request)
        assert isinstance(reply, Registered), reply
        return reply


def spawn(run_dir: Path, *flags: str, **environ: str) -> subprocess.Popen[str]:
    """Start a memd; a given environment variable beats the flags' defaults."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "memd", "--run-dir", str(run_dir), "--admin-port", "0",
         *flags],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("MEMD_")}
        | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip


def ready(process: subprocess.Popen[str], run_dir: Path) -> Daemon:
    """Wait until that very process serves."""
    about = run_dir / "memd.json"
    limit = time.monotonic() + 20
    while True:
        if process.poll() is not None:
            raise AssertionError(f"memd ended with {process.returncode}: {process.communicate()}")
        if about.exists() and (told := json.loads(about.read_text()))["pid"] == process.pid:
            host, _, port = told["admin"].removeprefix("http://").rpartition(":")
            return Daemon(process, run_dir, host.strip("[]"), int(port))
        assert time.monotonic() < limit, "memd is not ready after 20 s"
        time.sleep(0.02)


def stop(process: subprocess.Popen[str]) -> str:
    """End it as a supervisor would; returns its log."""
    process.terminate()
    _, log = process.communicate(timeout=10)
    assert process.returncode == 0, log
    return log


@contextmanager
def running(run_dir: Path, *flags: str, **environ: str) -> Iterator[Daemon]:
    process = spawn(run_dir, *flags, **environ)
    try:
        yield ready(process, run_dir)
        if process.poll() is None:
            stop(process)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
