"""The loop in one process with a real socket, then real processes."""

from __future__ import annotations

import os
import shutil
import signal
import socket as unix
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from memd.server import LIMITS, MOST_BAD_FRAMES, MOST_BAD_PEERS, Server
from tests.memd.daemon import ROOT, Daemon, Executor, ready, running, spawn, stop
from tests.memd.driver import ME, OTHER, memory, pack, spec
from tests.wire.strategies import depth
from wire.clock import PauseClock
from wire.errors import Code
from wire.memory import (
    MAX_STEP,
    Admit,
    Append,
    Goodbye,
    Granted,
    Register,
    Registered,
    Rejected,
    Reply,
    Request,
    Step,
)
from wire.rpc import Dealer, Limits, Router, ipc

REGISTER = Register((1, 0), ME, spec())


class Bench:
    """A server without a loop, and one executor beside it."""

    def __init__(self, path: Path) -> None:
        self.broken = 0
        self.now = 0.0
        self.memory = memory()
        self.router = Router(ipc(path / "s"), LIMITS)
        self.server = Server(
            self.memory, self.router, PauseClock(lambda: self.now, 1.5), self._on_broken
        )
        self.executor = self.connect()

    def _on_broken(self) -> None:
        self.broken += 1

    def connect(self) -> Executor:
        dealer = Dealer(ipc(Path(str(self.router._file))), Limits())
        assert dealer.raw.poll(5000, 2)
        return Executor(dealer)

    def ask(self, payload: bytes, executor: Executor | None = None) -> Reply | None:
        executor = executor or self.executor
        executor.send(payload)
        assert self.router.poll(3000)
        self.server.drain()
        return executor.receive(0.3)

    def call(self, request: Request, executor: Executor | None = None) -> Reply | None:
        return self.ask(self.executor.codec.encode(request), executor)

    def step(self, number: int) -> Step:
        return Step(ME, 1, 7, number)

    def close(self) -> None:
        self.executor.dealer.close()
        self.router.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_a_step_is_answered_by_the_core_and_timed(bench: Bench) -> None:
    assert isinstance(bench.call(REGISTER), Registered)
    granted = bench.call(Step(ME, 1, 7, 1, admits=[Admit(1, pack(range(5)), 5)]))
    assert isinstance(granted, Granted)
    assert len(granted.admitted[0].blocks) == 2
    assert sum(bench.server.meter.step_buckets) == 1
    assert 0 < bench.server.meter.step_seconds < 1


def test_the_same_step_again_gets_the_same_bytes(bench: Bench) -> None:
    bench.call(REGISTER)
    step = bench.executor.codec.encode(Step(ME, 1, 7, 1, admits=[Admit(1, pack([1]), 1)]))
    answers = []
    for _ in range(2):
        bench.executor.send(step)
        assert bench.router.poll(3000)
        bench.server.drain()
        assert bench.executor.dealer.poll(3000)
        answers += list(bench.executor.dealer.receive())
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x91", b"\xc0", b"not msgpack", depth(100_000), msgspec.msgpack.encode(["x"])],
)
def test_a_frame_that_is_no_message_is_answered_and_counted(bench: Bench, payload: bytes) -> None:
    reply = bench.ask(payload)
    assert isinstance(reply, Rejected)
    assert (reply.code, reply.number, reply.epoch) == (Code.INVALID, 0, 7)
    assert bench.server.meter.bad_frames == 1
    assert isinstance(bench.call(REGISTER), Registered)  # others, and this peer, go on


def test_a_step_out_of_bounds_is_answered_under_its_own_number(bench: Bench) -> None:
    bench.call(REGISTER)
    before = bench.memory.digest()
    frame = msgspec.msgpack.decode(bench.executor.codec.encode(bench.step(1)))
    frame[6] = [-5]
    reply = bench.ask(msgspec.msgpack.encode(frame))
    assert isinstance(reply, Rejected)
    assert (reply.code, reply.number) == (Code.INVALID, 1)
    assert "$[" in reply.message  # says where
    assert bench.memory.digest() == before


def test_a_peer_that_keeps_sending_rubbish_is_not_heard_any_more_and_others_are(
    bench: Bench,
) -> None:
    for _ in range(MOST_BAD_FRAMES):
        assert isinstance(bench.ask(b"rubbish"), Rejected)
    assert bench.call(REGISTER) is None
    assert bench.server.meter.dropped == 1
    other = bench.connect()
    assert isinstance(bench.call(REGISTER, other), Registered)
    other.dealer.close()


def test_what_is_remembered_of_bad_peers_is_bounded(bench: Bench) -> None:
    for peer in range(MOST_BAD_PEERS + 10):
        bench.server._refuse_frame(peer.to_bytes(5, "big"), b"", ValueError("bad"))
    assert len(bench.server._bad) == MOST_BAD_PEERS


def test_a_peer_that_left_before_its_answer_is_counted(bench: Bench) -> None:
    bench.executor.send(bench.executor.codec.encode(REGISTER))
    assert bench.router.poll(3000)
    (message,) = bench.router.receive()
    bench.executor.dealer.close()
    time.sleep(0.2)
    bench.server._send(message[0], bench.memory.handle(0.0, REGISTER))
    assert bench.server.meter.peer_gone == 1
    bench.executor = bench.connect()


def test_rejections_are_counted_by_code(bench: Bench) -> None:
    bench.call(bench.step(1))
    assert bench.server.meter.rejected == {"fenced": 1}


def test_an_executor_that_is_rejected_in_a_loop_does_not_fill_the_log(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(50):
        bench.call(bench.step(1))
        bench.now += 0.05
    assert bench.server.meter.rejected == {"fenced": 50}
    assert 2 <= caplog.text.count("code=fenced") <= 4


def test_a_lease_ends_when_nobody_renews_it_and_the_end_is_counted(bench: Bench) -> None:
    bench.call(REGISTER)
    for _ in range(29):
        bench.now += 0.1
        bench.server.tick()
    assert len(bench.memory.pools) == 1
    for _ in range(2):
        bench.now += 0.1
        bench.server.tick()
    assert len(bench.memory.pools) == 0
    assert bench.server.meter.leases_ended == {"lease": 1}
    late = bench.call(bench.step(1))
    assert isinstance(late, Rejected)
    assert late.code is Code.FENCED


def test_a_bug_in_the_core_is_answered_and_service_goes_on_while_all_rules_hold(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.call(REGISTER)

    def fail(now: float, request: Request, packed: bytes) -> Reply:
        raise ZeroDivisionError

    monkeypatch.setattr(bench.memory, "answer", fail)
    reply = bench.call(bench.step(1))
    assert isinstance(reply, Rejected)
    assert (reply.code, reply.number) == (Code.INTERNAL, 1)
    monkeypatch.undo()
    assert isinstance(bench.call(bench.step(1)), Granted)
    assert (bench.broken, bench.server.meter.internal_errors) == (0, 1)


def test_memory_found_inconsistent_after_a_bug_grants_nothing_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.call(REGISTER)
    bench.call(Step(ME, 1, 7, 1, admits=[Admit(1, pack(range(5)), 5)]))

    def half_done(now: float, request: Request, packed: bytes) -> Reply:
        bench.memory.pools["p"].refs[1] += 1
        raise ZeroDivisionError

    monkeypatch.setattr(bench.memory, "answer", half_done)
    bench.call(bench.step(2))
    monkeypatch.undo()
    assert bench.broken == 1
    assert bench.call(bench.step(3)) is None


# ------------------------------------------------------------ real processes


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """One memd for the tests that leave it as they found it."""
    with running(tmp_path_factory.mktemp("run", numbered=True) / "r") as daemon:
        yield daemon


def wait(found: Callable[[], bool], seconds: float = 5) -> bool:
    limit = time.monotonic() + seconds
    while not found():
        if time.monotonic() > limit:
            return False
        time.sleep(0.02)
    return True


def one_registration(daemon: Daemon, name: str) -> None:
    """memd serves: a new executor gets a pool, a step and its leave."""
    with daemon.executor() as executor:
        registered = executor.register(Register((1, 0), OTHER, spec(name=name)))
        step = Step(
            OTHER, registered.generation, registered.epoch, 1, admits=[Admit(1, pack([1]), 1)]
        )
        assert isinstance(executor.ask(step), Granted)
        assert isinstance(executor.ask(Goodbye(OTHER, registered.generation)), Granted)


def test_an_executor_is_served_over_the_socket(daemon: Daemon) -> None:
    one_registration(daemon, "served")


def test_a_burst_of_steps_sent_ahead_is_answered_in_order(daemon: Daemon) -> None:
    with daemon.executor() as executor:
        got = executor.register(Register((1, 0), ME, spec(name="burst")))
        for number in range(1, 501):
            executor.send(executor.codec.encode(Step(ME, got.generation, got.epoch, number)))
        numbers: list[int] = []
        while len(numbers) < 500 and executor.dealer.poll(5000):
            for payload in executor.dealer.receive():
                reply = executor.codec.decode_reply(payload)
                assert isinstance(reply, Granted)
                numbers.append(reply.number)
        assert numbers == list(range(1, 501))
        executor.ask(Goodbye(ME, got.generation))


def test_an_oversized_frame_is_lost_with_its_connection_and_others_go_on(daemon: Daemon) -> None:
    with daemon.executor(Limits(max_message=1 << 30)) as large, daemon.executor() as other:
        got = other.register(Register((1, 0), ME, spec(name="large")))
        large.send(b"\xc4" * (MAX_STEP + 1))
        assert large.receive(0.3) is None
        assert isinstance(other.ask(Step(ME, got.generation, got.epoch, 1)), Granted)
        other.ask(Goodbye(ME, got.generation))


def test_frames_of_many_parts_are_ignored(daemon: Daemon) -> None:
    with daemon.executor() as executor:
        executor.dealer.raw.send_multipart([executor.codec.encode(REGISTER)] * 1000)
        assert executor.receive(0.3) is None
    one_registration(daemon, "parts")


def test_half_handshakes_and_noise_do_not_keep_anyone_out(daemon: Daemon) -> None:
    half = []
    for index in range(200):
        client = unix.socket(unix.AF_UNIX)
        client.connect(str(daemon.run_dir / "memd.sock"))
        client.sendall((b"\xff\0\0\0\0\0\0\0\1\x7f\3" + os.urandom(64))[: index % 40])
        half.append(client)
    one_registration(daemon, "half")
    for client in half:
        client.close()


def test_bad_frames_show_in_the_metrics(daemon: Daemon) -> None:
    before = daemon.metric("memd_bad_frames_total")
    with daemon.executor() as executor:
        executor.send(b"rubbish")
        reply = executor.receive()
        assert isinstance(reply, Rejected)
    assert daemon.metric("memd_bad_frames_total") == before + 1


def test_a_second_memd_is_refused_with_the_reason(daemon: Daemon) -> None:
    second = spawn(daemon.run_dir)
    _, error = second.communicate(timeout=20)
    assert second.returncode == 1
    assert f"another memd (process {daemon.process.pid}) serves {daemon.run_dir}" in error
    assert "Traceback" not in error
    one_registration(daemon, "first")


def test_sigterm_ends_it_with_status_0_and_no_file_that_points_to_it(tmp_path: Path) -> None:
    with running(tmp_path / "r") as daemon, daemon.executor() as executor:
        executor.register(REGISTER)
        started = time.monotonic()
        stop(daemon.process)
        assert time.monotonic() - started < 3
        assert not (tmp_path / "r" / "memd.sock").exists()
        assert not (tmp_path / "r" / "memd.json").exists()


def test_the_epoch_rises_and_executors_are_fenced_when_memd_was_killed(tmp_path: Path) -> None:
    with running(tmp_path / "r") as daemon, daemon.executor() as executor:
        old = executor.register(REGISTER)
        daemon.process.kill()
        daemon.process.communicate()
        with running(tmp_path / "r") as again:
            assert wait(lambda: executor.dealer.raw.poll(100, 2) != 0)
            late = executor.ask(Step(ME, old.generation, old.epoch, 1))
            assert isinstance(late, Rejected)
            assert late.code is Code.FENCED
            assert late.epoch == old.epoch + 1
            assert late.boot_id != old.boot_id
            executor.register(REGISTER)
            stop(again.process)


def test_the_state_directory_keeps_the_epoch_when_the_run_directory_does_not(
    tmp_path: Path,
) -> None:
    epochs = []
    for run in ("a", "b"):
        with running(tmp_path / run, "--state-dir", str(tmp_path / "state")) as daemon:
            epochs.append(daemon.get("/v1/state").json["epoch"])
    assert epochs == [1, 2]


def test_an_epoch_file_that_cannot_be_written_costs_a_warning_only(tmp_path: Path) -> None:
    (tmp_path / "state" / "memd.epoch").mkdir(parents=True)
    process = spawn(tmp_path / "r", "--state-dir", str(tmp_path / "state"))
    daemon = ready(process, tmp_path / "r")
    assert daemon.get("/v1/state").json["epoch"] >= 2**52
    assert "every start will have a random epoch" in stop(process)


def test_leases_survive_a_stop_of_memd_and_end_with_a_silent_executor(tmp_path: Path) -> None:
    with running(tmp_path / "r", "--lease-ms", "600") as daemon, daemon.executor() as executor:
        got = executor.register(REGISTER)
        daemon.process.send_signal(signal.SIGSTOP)
        time.sleep(1.2)  # two leases long
        daemon.process.send_signal(signal.SIGCONT)
        assert isinstance(executor.ask(Step(ME, got.generation, got.epoch, 1)), Granted)
        assert daemon.metric("memd_pauses_total") == 1
        assert wait(lambda: daemon.get("/v1/state").json["pools"] == [], 3)
        assert daemon.metric('memd_leases_ended_total{reason="lease"}') == 1
        assert stop(daemon.process).count("stood still") == 1


def test_blocks_of_a_killed_executor_are_back_within_the_lease(tmp_path: Path) -> None:
    with running(tmp_path / "r", "--lease-ms", "500") as daemon:
        with daemon.executor() as executor:
            got = executor.register(REGISTER)
            executor.ask(Step(ME, got.generation, 1, 1, admits=[Admit(1, pack(range(9)), 9)]))
            assert daemon.get("/v1/state").json["pools"][0]["used"] == 3
        # The connection is closed without a word; another instance wants the same pool.
        with daemon.executor() as executor:
            register = Register((1, 0), OTHER, spec())

            def registered() -> bool:
                reply = executor.ask(register)
                if isinstance(reply, Rejected):
                    assert reply.code is Code.POOL_BUSY
                return isinstance(reply, Registered)

            assert wait(registered, 2)
            assert daemon.get("/v1/state").json["pools"][0]["used"] == 0


@pytest.mark.parametrize(
    ("flags", "environ", "status", "words"),
    [
        (["--admin-host", "0.0.0.0"], {}, 2, "set MEMD_ADMIN_TOKEN"),
        ([], {"MEMD_ADMIN_TOKEN": ""}, 2, "MEMD_ADMIN_TOKEN ***: must not be empty"),
        (["--admin-host", "192.0.2.1", "--admin-token", "s3cret"], {}, 1, "cannot start"),
        (["--lease-ms", "1"], {}, 2, "--lease-ms 1: must be at least 200"),
        (["--run-dir", "/tmp"], {}, 1, "chmod 700 /tmp"),
        (["--run-dir", "/tmp/" + "x" * 120], {}, 1, "shorter --run-dir"),
    ],
)
def test_settings_it_cannot_serve_with_end_it_with_one_clear_line(
    tmp_path: Path, flags: list[str], environ: dict[str, str], status: int, words: str
) -> None:
    process = spawn(tmp_path / "r", *flags, **environ)
    _, error = process.communicate(timeout=20)
    assert (process.returncode, words in error) == (status, True), error
    assert "Traceback" not in error
    assert "s3cret" not in error


def test_a_port_in_use_is_refused_and_leaves_nothing_behind(daemon: Daemon, tmp_path: Path) -> None:
    process = spawn(tmp_path / "r", "--admin-port", str(daemon.port))
    _, error = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "address already in use" in error
    assert not (tmp_path / "r" / "memd.sock").exists()
    assert not (tmp_path / "r" / "memd.json").exists()


def test_a_refused_append_is_a_grant_that_says_so(daemon: Daemon) -> None:
    with daemon.executor() as executor:
        got = executor.register(Register((1, 0), ME, spec(num_blocks=3, name="small")))
        key = (ME, got.generation, got.epoch)
        executor.ask(Step(*key, 1, admits=[Admit(1, pack(range(4)), 4), Admit(2, pack([1]), 1)]))
        granted = executor.ask(Step(*key, 2, appends=[Append(1, 5)]))
        assert isinstance(granted, Granted)
        assert [(refusal.seq, refusal.code) for refusal in granted.refused] == [(1, Code.NO_BLOCKS)]
        executor.ask(Goodbye(ME, got.generation))


def test_the_server_gives_up_once_when_its_socket_file_is_gone(bench: Bench) -> None:
    bench.now += 1.1
    bench.server.tick()
    assert bench.broken == 0
    bench.router._file.unlink()
    bench.server.tick()
    assert bench.broken == 0  # once a second is enough
    for _ in range(3):
        bench.now += 1.1
        bench.server.tick()
    assert bench.broken == 1


@pytest.mark.parametrize("gone", ["memd.sock", ""])
def test_without_its_socket_file_memd_ends_with_status_1_and_can_be_started_anew(
    tmp_path: Path, gone: str
) -> None:
    run_dir = tmp_path / "r"
    with running(run_dir) as daemon:
        if gone:
            (run_dir / gone).unlink()
        else:
            shutil.rmtree(run_dir)
        _, log = daemon.process.communicate(timeout=5)
        assert daemon.process.returncode == 1
        assert "the socket file was removed or replaced" in log
    with running(run_dir) as daemon:
        one_registration(daemon, "anew")


# Every write to a file fails, as on a full disk; pipes go on.
FULL_DISK = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
sys.argv[0] = "memd"
runpy.run_module("memd", run_name="__main__")
"""


def test_memd_starts_and_serves_on_a_full_disk(tmp_path: Path) -> None:
    run_dir = tmp_path / "r"
    process = subprocess.Popen(
        [sys.executable, "-c", FULL_DISK, "--run-dir", str(run_dir), "--admin-port", "0"],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert wait(lambda: (run_dir / "memd.sock").exists() or process.poll() is not None, 20)
        daemon = Daemon(process, run_dir, "", 0)
        one_registration(daemon, "full")
        assert not (run_dir / "memd.json").exists()
        log = stop(process)
        assert "memd.json cannot be written" in log
        assert "Traceback" not in log
    finally:
        process.kill()
        process.communicate()
