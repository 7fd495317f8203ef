"""The launcher from start to end, with stand-ins for the three processes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pagekeeper import keys, lock
from pagekeeper.__main__ import main
from pagekeeper.children import specs
from pagekeeper.config import AtConfig, UpConfig, load_up, unknown_names
from pagekeeper.status import down, status
from pagekeeper.up import _Launch, up
from tests.pagekeeper.fakes import three
from wire.settings import Secret, Size

DIES = "print('12:00:00 E executor-0 --model nowhere: no such file'); raise SystemExit(2)"


def config(run_dir: Path) -> UpConfig:
    return UpConfig(port=0, admin_port=0, run_dir=run_dir)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def launcher(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A launcher in a process of its own, ready."""
    code = (
        "import sys; from pathlib import Path; from pagekeeper.up import up;"
        "from tests.pagekeeper.fakes import three; from tests.pagekeeper.test_up import config;"
        "p = Path(sys.argv[1]); sys.exit(up(config(p), three(p)))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(run_dir)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "Ctrl-C" in line:
                break
        yield process
        process.kill()


def test_a_start_shows_progress_and_addresses_and_a_stop_leaves_nothing(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop_when_ready() -> None:
        while not lock.owner(run_dir) or status(AtConfig(run_dir=run_dir)) != 0:
            time.sleep(0.05)
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop_when_ready)
    stopper.start()
    assert up(config(run_dir), three(run_dir)) == 0
    stopper.join()
    out, err = capsys.readouterr()
    assert "tiny is ready after" in out
    assert "/v1/chat/completions" in out
    assert "block map  http://127.0.0.1:" in out
    for expected in ("loading tiny 50 %", "warming up", "memd.json ending"):
        assert expected in err
    assert err.index("gateway.json ending") < err.index("memd.json ending")
    assert list(run_dir.iterdir()) == []


def test_a_child_that_refuses_its_settings_ends_the_start_with_its_own_line(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert up(config(run_dir), three(run_dir, executor=DIES)[:2]) == 2
    err = capsys.readouterr().err
    assert err.rstrip().endswith("executor cannot start: --model nowhere: no such file")
    assert "Traceback" not in err
    assert list(run_dir.iterdir()) == []


def test_a_child_that_crashes_at_start_ends_it_with_its_last_lines(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Without the gateway, which would be ready at once: it is a stand-in.
    assert up(config(run_dir), three(run_dir, executor="print('one'); 1 / 0")[:2]) == 1
    err = capsys.readouterr().err
    assert "executor ended 3 times before it was ready (status 1); its last lines:\n  one" in err
    assert err.rstrip().endswith("ZeroDivisionError: division by zero")


def test_a_server_that_is_not_ready_in_time_is_stopped(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = UpConfig(port=0, admin_port=0, run_dir=run_dir, start_seconds=1)
    assert up(settings, three(run_dir)[:2]) == 1
    assert "not ready after --start-seconds 1" in capsys.readouterr().err


def test_status_and_down_work_on_a_running_server(
    launcher: subprocess.Popen[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(AtConfig(run_dir=run_dir)) == 0
    shown = capsys.readouterr().out
    for expected in ("ready", "tiny", "epoch 7", "10 blocks: used 1  cached 2  free 7"):
        assert expected in shown
    assert down(AtConfig(run_dir=run_dir)) == 0
    assert launcher.wait(timeout=10) == 0
    assert status(AtConfig(run_dir=run_dir)) == 3


@pytest.mark.usefixtures("launcher")
def test_a_second_launcher_is_refused(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert up(config(run_dir), three(run_dir)) == 1
    err = capsys.readouterr().err
    assert f"another one (process {lock.owner(run_dir)}) runs in {run_dir}" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("flag", ["port", "admin_port"])
def test_a_taken_port_is_refused_before_anything_starts(
    flag: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ports = {"port": 0, "admin_port": 0, flag: port}
        assert up(UpConfig(run_dir=run_dir, **ports)) == 1
    err = capsys.readouterr().err
    assert f"port {port} on 127.0.0.1 is taken" in err
    assert f"--{flag.replace('_', '-')}" in err
    assert err.count("\n") == 1


def test_equal_ports_are_refused_at_once(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert up(UpConfig(run_dir=run_dir, port=8031, admin_port=8031)) == 2
    assert "--port and --admin-port are both 8031" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may use every port")
def test_a_port_of_the_system_is_told_from_a_taken_one(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert up(UpConfig(run_dir=run_dir, port=1, admin_port=0)) == 2
    assert "choose one above 1023 with --port" in capsys.readouterr().err


def test_a_public_host_without_keys_is_refused_before_anything_starts(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert up(UpConfig(run_dir=run_dir, host="0.0.0.0", port=0, admin_port=0)) == 2
    err = capsys.readouterr().err
    assert "PAGEKEEPER_API_KEYS or --api-key-file" in err
    assert err.count("\n") == 1


def test_a_run_directory_that_cannot_be_made_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert up(config(Path("/proc/nowhere"))) == 2
    assert "--run-dir /proc/nowhere could not be created" in capsys.readouterr().err


def test_a_server_with_keys_is_neither_asked_without_one_nor_shown_as_open(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GATEWAY_API_KEYS", "sha256:" + 64 * "0")
    launch = _Launch(config(run_dir), three(run_dir))
    shown = launch._welcome()
    assert '-H "Authorization: Bearer YOUR_KEY"' in shown
    monkeypatch.delenv("GATEWAY_API_KEYS")
    (run_dir / "gateway.json").write_text('{"url": "http://127.0.0.1:1", "needs_key": true}')
    assert status(AtConfig(run_dir=run_dir)) == 3
    assert "needs a key (PAGEKEEPER_API_KEYS)" in capsys.readouterr().out


def test_a_process_that_died_is_reported_back(launcher: subprocess.Popen[str]) -> None:
    (memd,) = [c for c in psutil.Process(launcher.pid).children() if "memd.json" in c.cmdline()]
    memd.kill()
    assert launcher.stdout is not None
    lines = filter(None, map(str.strip, launcher.stdout))
    assert next(lines).startswith("memd ended (killed by SIGKILL)")
    assert next(lines).startswith("memd is back after ")


def test_keys_are_found_where_the_gateway_will_find_them(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# comment\nsha256:{64 * '0'} t\nsk-plain tenant\n")
    assert keys.find(None, None, {}) == keys.Keys(False, "")
    assert keys.find(Secret("a,b"), None, {"GATEWAY_API_KEYS": "c"}) == keys.Keys(True, "a")
    assert keys.find(None, None, {"GATEWAY_API_KEYS": " c"}) == keys.Keys(True, "c")
    assert keys.find(None, file, {}) == keys.Keys(True, "sk-plain")
    assert keys.find(None, None, {"GATEWAY_API_KEY_FILE": str(file)}).one == "sk-plain"


def test_a_variable_that_nothing_reads_is_named_with_the_likely_one() -> None:
    assert unknown_names({"PAGEKEEPER_MODLE": "x", "PAGEKEEPER_PORT": "1", "HOME": "/"}) == [
        "nothing reads the environment variable PAGEKEEPER_MODLE; did you mean PAGEKEEPER_MODEL?"
    ]


def test_an_unknown_flag_is_one_line_with_the_likely_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as refused:
        load_up(["--modle", "x"])
    assert refused.value.code == 2
    err = capsys.readouterr().err
    assert err == (
        "pagekeeper up: --modle is not a flag of this command: did you mean --model? "
        "--help lists them\n"
    )


def test_only_what_was_given_is_handed_to_children(run_dir: Path) -> None:
    given = UpConfig(
        run_dir=run_dir, model="m", kv_memory=Size(1 << 30), block_size=8, cuda_graphs=False
    )
    memd, executor, gateway = specs(given)
    assert " ".join(executor.argv[3:]) == (
        f"--run-dir {run_dir} --model m --kv-memory 1GiB --block-size 8 --cuda-graphs False "
        "--drain-seconds 5.0"
    )
    assert memd.argv[3:] == ("--run-dir", str(run_dir), "--admin-port", "9100")
    assert "--host" in gateway.argv


@pytest.mark.parametrize(
    ("cpus", "given", "nice"),
    [
        (2, {}, 5),
        (4, {}, 5),
        (5, {}, 0),
        (2, {"device": "cuda"}, 0),
        (2, {"executor_nice": 5}, 0),  # they go before the step, as asked
        (2, {"servers_nice": 0}, 0),
        (64, {"servers_nice": 7}, 7),
    ],
)
def test_a_step_on_few_cpus_goes_before_memd_and_the_gateway(
    cpus: int, given: dict[str, Any], nice: int, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)), raising=False)
    children = specs(UpConfig(run_dir=run_dir, **given))
    assert [child.nice for child in children] == [nice, given.get("executor_nice", 0), nice]


def test_keys_are_on_no_command_line(run_dir: Path) -> None:
    children = specs(UpConfig(run_dir=run_dir, api_keys=Secret("sk-one,sk-two")))
    assert not any("sk-" in word for child in children for word in child.argv)
    assert [child.env.get("GATEWAY_API_KEYS") for child in children] == [
        None,
        None,
        "sk-one,sk-two",
    ]


def test_flags_beat_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEKEEPER_PORT", "8001")
    monkeypatch.setenv("PAGEKEEPER_BLOCK_SIZE", "32")
    loaded = load_up(["--port", "8002"])
    assert (loaded.port, loaded.block_size) == (8002, 32)


def test_an_empty_key_variable_does_not_switch_keys_off(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEKEEPER_API_KEYS", "")
    with pytest.raises(SystemExit) as refused:
        load_up([])
    assert refused.value.code == 2
    assert "PAGEKEEPER_API_KEYS" in capsys.readouterr().err


def test_an_unknown_command_prints_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dance"]) == 2
    assert "usage: pagekeeper COMMAND" in capsys.readouterr().err
