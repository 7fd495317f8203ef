from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

from bench.memd import __main__ as program
from bench.memd.load import Driver
from bench.memd.worker import Worker
from memd.core import Memory
from wire.memory import Reply, Request

FAKE_PEER = """
import json, sys
print(json.dumps("peer"), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    known = asked["op"] in ("step", "admit")
    print(json.dumps([0.001, 0.002, 0.003] if known else None), flush=True)
"""


def local(blocks: int) -> tuple[Driver, Memory]:
    memory = Memory(boot_id="0" * 32, epoch=1, key=b"k" * 32, lease_ms=600_000)

    def ask(request: Request) -> Reply:
        return memory.handle(0.0, request)

    return Driver(ask, blocks), memory


def test_its_steps_are_what_they_say_staggered_and_evicting() -> None:
    driver, memory = local(2000)
    driver.register()
    driver.fill()
    driver.begin(256)
    (pool,) = memory.pools.values()
    assert pool.cached_blocks() > 1000
    for _ in range(64):
        before = pool.counters.evictions
        step = driver.decode()
        assert len(step.appends) == 16  # one sequence in sixteen begins a block
        granted = driver.send(step)
        assert len(granted.changes) == 16
        assert pool.counters.evictions == before + 16
    assert granted.usage.used == sum(-(-length // 16) for length in driver.lengths.values())


def test_every_operation_leaves_the_pool_as_it_was_but_for_what_is_cached() -> None:
    driver, memory = local(600)
    worker = Worker(driver, memory.check)
    (pool,) = memory.pools.values()
    for op in ("step", "admit", "lookup", "fork", "free", "audit"):
        taken = worker.measure({"op": op, "count": 5, "samples": 4})
        assert taken is not None
        assert len(taken) == (1 if op == "audit" else 4)
        assert min(taken) > 0
        assert (len(pool.sequences), pool.counts().used) == (0, 0), op
    assert worker.measure({"op": "juggle", "samples": 4}) is None
    # Four lookups found all of the prompt but its last token; nothing else did.
    assert pool.counters.hits == 4 * 160
    memory.check()


def test_a_table_and_a_file_come_out_of_real_processes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = tmp_path / "peer.py"
    peer.write_text(FAKE_PEER)
    monkeypatch.setattr(program, "PEER", peer)
    out = tmp_path / "figures.csv"
    program.main(
        ["--sequences", "3", "--pools", "300", "--rounds", "1", "--samples", "2", "--pause-ms", "0",
         "--peer-python", sys.executable, "--csv", str(out)]
    )  # fmt: skip
    with out.open() as file:
        rows = list(csv.DictReader(file))
    seen = {(row["subject"], row["operation"]): row for row in rows}
    for setting in ("busy", "paced", "idle"):
        assert float(seen[f"over ipc, {setting}", "step"]["p50_us"]) > 0
    for op in ("admit", "lookup", "fork", "free", "audit"):
        assert ("over ipc", op) in seen
        assert ("plain core", op) in seen
    assert seen["peer", "step"]["p50_us"] == "2000.0"
    assert seen["peer", "step"]["per_sequence_us"] == "666.67"
    assert ("peer", "fork") not in seen
    table = capfd.readouterr().out
    assert "| 300 | fork | 1 |" in table
    assert "| 2000.0 / 3000.0 |" in table


def test_a_subject_that_dies_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="ended with status 3"):
        program.Subject([sys.executable, "-c", "raise SystemExit(3)"])


def test_a_round_trip_over_the_promise_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(p50: float) -> list[program.Row]:
        return [
            {"blocks": 10, "operation": "step", "sequences": count, "subject": subject, "samples": 1,
             "p50_us": p50, "p99_us": p50, "per_sequence_us": 1.0}
            for count, subject in ((256, "over ipc, idle"), (1024, "over ipc, idle"))
        ]  # fmt: skip

    for p50, status in ((149.9, 0), (150.1, 1)):
        monkeypatch.setattr(program, "measure_pool", lambda *given, p50=p50: rows(p50))
        assert program.main(["--pools", "10"]) == status
