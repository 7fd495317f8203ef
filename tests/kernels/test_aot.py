from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels import aot
from kernels.aot import TARGETS, Result, excess, launches, modules, table, work

# "full" compiles every launch for every target, which takes minutes; otherwise each for one of them.
SCOPE = os.environ.get("PAGEKEEPER_AOT", "spread")
ROOT = Path(aot.__file__).parent.parent


def compiled(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """What the command does in a process of its own, and what it wrote."""
    written = folder / "results.json"
    command = [sys.executable, "-m", "kernels.aot", "--json", str(written), *arguments]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=1800)
    return run, json.loads(written.read_text()) if written.exists() else None


@pytest.mark.timeout(1800)
def test_every_launch_compiles_for_a_real_device_within_its_limits(tmp_path: Path) -> None:
    run, results = compiled(tmp_path, *(["--spread"] if SCOPE == "spread" else []))
    assert run.returncode == 0, run.stderr[-4000:]
    assert {item["target"] for item in results} == {target.name for target in TARGETS}
    assert {item["kernel"] for item in results} == {
        launch.name for module in modules() for launch in launches(module, "sm_90")
    }
    assert all(item["registers"] > 0 for item in results)
    assert max(item["shared"] for item in results if item["kernel"] == "decode") > 16_384


def test_spread_launches_together_are_all_launches() -> None:
    spread, everything = work(TARGETS, True), work(TARGETS, False)
    assert set(spread) <= set(everything)
    assert {(job.module, job.index) for job in spread} == {
        (job.module, job.index) for job in everything
    }
    for module in modules():
        assert {job.target for job in spread if job.module == module} == set(TARGETS)


@pytest.mark.parametrize(
    ("taken", "says"),
    [
        ({"shared": 163 * 1024}, ""),
        ({"shared": 163 * 1024 + 1}, "takes 166913 bytes of shared memory; A100 has 166912"),
        ({"registers": 256}, "takes 256 registers in a thread; A100 has 255"),
        ({"registers": 129}, "takes 66048 registers in 512 threads; A100 has 65536"),
    ],
)
def test_what_a_device_does_not_have_is_named(taken: dict[str, Any], says: str) -> None:
    result = replace(Result("sm_80", "decode", "a case"), **taken)
    assert excess(result, 16, TARGETS[0]) == says


def test_the_table_shows_the_most_any_launch_of_a_kernel_takes() -> None:
    results = [
        Result("sm_80", "decode", "one", shared=2048, registers=40),
        Result("sm_80", "join", "between", shared=0, registers=20),
        Result("sm_80", "decode", "two", shared=1024, registers=250, spills=8),
    ]
    assert table(results).splitlines()[2:] == [
        "| sm_80 (A100) | decode | 2 | 2.0 of 163 KiB | 250 of 255 | 1 of 2, 8 bytes |",
        "| sm_80 (A100) | join | 1 | 0.0 of 163 KiB | 20 of 255 | none |",
    ]


def test_a_kernel_that_does_not_compile_fails_the_command(tmp_path: Path) -> None:
    # Triton is told of another tool, which cannot assemble anything.
    tool = tmp_path / "ptxas"
    tool.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 'release 12.8' && exit\nexit 1\n")
    tool.chmod(0o755)
    code = (
        "import sys, kernels.aot as aot\n"
        "aot.modules = lambda: ['kernels.swap']\n"
        "sys.exit(aot.main(['--targets', 'sm_80', '--jobs', '1']))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TRITON_PTXAS_PATH": str(tool)},
        timeout=100,
    )
    assert run.returncode == 1, run.stderr[-2000:]
    assert "sm_80 swap (Llama 3 8B, bfloat16, to the buffer) does not compile" in run.stderr
    assert "0 of 2 launches can run" in run.stdout


def test_kernels_made_for_the_interpreter_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ)
    try:
        assert aot.main(["--targets", "sm_90"]) == 2
    finally:
        os.environ.clear()
        os.environ.update(before)
    assert "imported with TRITON_INTERPRET set" in capsys.readouterr().err


def test_an_unknown_target_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        aot.main(["--targets", "sm_70"])
    assert "sm_70 is not one of sm_80, sm_90, sm_100, gfx942" in capsys.readouterr().err
