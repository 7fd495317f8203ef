from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path

import psutil
import pytest

from bench import streams
from bench.load.client import ServerProblem
from bench.load.processes import MIB, Watched, behind, name_of, slope
from tests.bench.sse_server import hangs, serve


def test_a_slope_is_the_least_squares_one() -> None:
    assert slope([0.0, 1.0, 2.0, 3.0], [5.0, 7.0, 9.0, 11.0]) == 2.0
    assert slope([0.0, 1.0, 2.0], [0.0, 3.0, 0.0]) == 0.0
    assert math.isnan(slope([1.0], [5.0]))


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/x/.venv/bin/python", "-m", "executor", "--run-dir", "/r"], "executor"),
        (["/usr/bin/python3", "/x/bin/vllm", "serve", "m"], "vllm"),
        (["/usr/bin/llama-server", "--model", "m"], "llama-server"),
        ([], "?"),
    ],
)
def test_a_process_is_named_after_what_it_runs(command: list[str], name: str) -> None:
    assert name_of(command) == name


def watched(rss: list[int], *, gone: bool = False) -> Watched:
    """One sample a second; the second half of the time all streams are open is 6 to 10."""
    at = [float(second) for second in range(len(rss))]
    cpu = [0.5 * second for second in range(len(rss))]
    return Watched("x", psutil.Process(), at, [value * MIB for value in rss], cpu, gone)


def test_memory_that_only_grew_at_first_is_steady() -> None:
    growing = [100, 100, 120, 140, 160, 180, *[200] * 5, 150]
    [row] = streams.rows_of([watched(growing)], opened=2.0, closed=10.0)
    assert (row.before, row.half, row.end, row.after) == (100, 200, 200, 150)
    assert (row.slope_per_minute, row.steady, row.cpu) == (0.0, True, 0.5)


def test_memory_that_still_grows_in_the_second_half_is_not_steady() -> None:
    growing = [100 + 5 * second for second in range(12)]
    [row] = streams.rows_of([watched(growing)], opened=2.0, closed=10.0)
    assert row.slope_per_minute == 300.0
    assert not row.steady
    assert "not steady" in streams.table([row])


def test_a_process_that_ended_is_not_steady() -> None:
    [row] = streams.rows_of([watched([100] * 4, gone=True)], opened=2.0, closed=10.0)
    assert row.process == "x (ended)"
    assert not row.steady


def test_a_port_nobody_listens_on_has_no_processes() -> None:
    with pytest.raises(ServerProblem, match="port 1 of this machine"):
        behind(1)


def test_it_keeps_all_streams_open_and_closes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "SETTLE_SECONDS", 0.2)

    async def test() -> None:
        async with serve() as server:
            server.answer = hangs
            arguments = ["--url", server.url, "--streams", "20", "--seconds", "1", "--ramp", "0.1",
                         "--json", str(tmp_path / "out.json")]  # fmt: skip
            await asyncio.to_thread(streams.main, arguments)
            assert server.most == 20
            async with asyncio.timeout(10):
                while server.running:  # noqa: ASYNC110 - polls what has no event
                    await asyncio.sleep(0.01)

    asyncio.run(test())
    told = json.loads((tmp_path / "out.json").read_text())
    assert (told["open"], told["with_output"], told["opened"]) == (20, 20, 20)
    assert told["errors"] == {}
    assert psutil.Process().pid in [row["pid"] for row in told["processes"]]


def test_a_stream_that_fails_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(streams, "SETTLE_SECONDS", 0.0)

    async def test() -> int:
        async with serve() as server:
            server.status = 429
            arguments = ["--url", server.url, "--streams", "3", "--seconds", "1", "--ramp", "0.1"]
            return await asyncio.to_thread(streams.main, arguments)

    assert asyncio.run(test()) == 1
    assert "x http 429: slow down" in capsys.readouterr().out
