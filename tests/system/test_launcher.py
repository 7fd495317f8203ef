"""`pagekeeper up` with the real processes on a tiny model, and the examples against it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pagekeeper import lock, probe
from tests.system.stack import ROOT, eventually, get_json, http_status

pytestmark = pytest.mark.system


class Launched:
    """One `pagekeeper up` in a run directory of its own."""

    def __init__(self, model: Path) -> None:
        self.run_dir = Path(tempfile.mkdtemp(prefix="pk-"))
        self.log = self.run_dir.with_suffix(".log")
        command = [sys.executable, "-m", "pagekeeper", "up", "--run-dir", str(self.run_dir)]
        command += ["--model", str(model), "--served-model-name", "tiny", "--num-blocks", "512"]
        command += ["--dtype", "float32", "--port", "0", "--admin-port", "0"]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )

    @property
    def url(self) -> str:
        return probe.address(self.run_dir, "gateway")

    def ready(self) -> bool:
        return bool(self.url) and http_status(f"{self.url}/ready") == 200

    def child(self, name: str) -> psutil.Process | None:
        """The living process of that name, once it is past the leash."""
        for child in psutil.Process(self.process.pid).children():
            try:
                if child.cmdline()[1:3] == ["-m", name]:
                    return child
            except psutil.Error:
                continue  # it ended in between
        return None

    def pool(self) -> dict[str, Any]:
        """The one pool in memd's state, wherever memd listens now."""
        admin = probe.address(self.run_dir, "memd")
        pool: dict[str, Any] = get_json(f"{admin}/v1/state")["pools"][0]
        return pool

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        shutil.rmtree(self.run_dir)
        self.log.unlink()


@pytest.fixture(scope="module")
def launched(tiny_model: Path) -> Iterator[Launched]:
    running = Launched(tiny_model)
    try:
        eventually(lambda: "Ctrl-C" in running.log.read_text(), 90, "the launcher says ready")
        yield running
    finally:
        running.close()


def test_the_addresses_it_prints_are_those_that_answer(launched: Launched) -> None:
    text = launched.log.read_text()
    admin = probe.address(launched.run_dir, "memd")
    assert f"{launched.url}/v1\n" in text
    assert f"{admin}/\n" in text
    assert http_status(f"{launched.url}/") == 200
    assert http_status(f"{admin}/") == 200
    assert launched.pool()["total"] == 512


def test_the_example_in_python_streams_a_reply(launched: Launched) -> None:
    ran = subprocess.run(
        [sys.executable, "examples/stream.py", "Say something."],
        cwd=ROOT,
        env={**os.environ, "OPENAI_BASE_URL": f"{launched.url}/v1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert " tokens in, " in ran.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_example_in_curl_gets_every_answer(launched: Launched) -> None:
    ran = subprocess.run(
        ["bash", "examples/curl.sh"],
        cwd=ROOT,
        env={**os.environ, "URL": launched.url, "MODEL": "tiny"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "data: [DONE]" in ran.stdout
    assert '"object":"text_completion"' in ran.stdout


@pytest.mark.parametrize("name", ["memd", "executor", "gateway"])
def test_a_killed_process_is_brought_back_and_service_goes_on(
    launched: Launched, name: str
) -> None:
    eventually(launched.ready, 30, "ready before")
    first = launched.child(name)
    assert first is not None
    first.kill()
    eventually(lambda: launched.child(name) not in (None, first), 15, "another one runs")
    eventually(launched.ready, 60, "ready again")
    eventually(lambda: launched.pool()["used"] == 0, 10, "no block is used")


def test_kill_9_of_the_launcher_ends_all_and_a_new_one_can_start(launched: Launched) -> None:
    children = psutil.Process(launched.process.pid).children(recursive=True)
    assert len(children) == 3
    launched.process.send_signal(signal.SIGKILL)
    launched.process.wait(10)
    eventually(
        lambda: all(not c.is_running() or c.status() == "zombie" for c in children), 5, "all dead"
    )
    assert lock.owner(launched.run_dir) == 0
