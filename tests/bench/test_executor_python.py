"""What `perf` saw of an executor, counted."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from bench import executor_python
from bench.executor_python import HERTZ, Round, sample
from bench.load.client import ServerProblem

SEEN = """
 12.000000:     7f21 _PyEval_EvalFrameDefault+0x1 (/usr/lib/libpython3.11.so.1.0)
 12.500000:     7f22 (anonymous namespace)::product<(anonymous namespace)::Bf16, 6> (/usr/lib/step-avx2.so)
 13.000000:     7f23 [unknown] (/usr/lib/python3/zmq/_zmq.cpython-311-x86_64-linux-gnu.so)
 13.250000:     7f24 list_dealloc (/usr/bin/python3.12)
 14.000000: ffffffff clear_page_erms ([kernel.kallsyms])
"""


@pytest.fixture
def perf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in that prints what is in its file."""
    tool, said = tmp_path / "perf", tmp_path / "said"
    tool.write_text(f'#!/bin/sh\n[ "$1" = record ] || cat {said}\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return said


def test_samples_in_the_interpreter_are_python_and_those_in_libraries_are_not(perf: Path) -> None:
    perf.write_text(SEEN)
    seconds, files = asyncio.run(sample(1, 0.1, perf.parent))
    assert seconds == 2
    assert sum(files.values()) == 5
    seen = Round(steps=4, files=files)
    assert seen.python == 2
    assert seen.ms(seen.python) == pytest.approx(2 / HERTZ * 1000 / 4)


def test_a_process_that_perf_does_not_see_is_told(perf: Path) -> None:
    perf.write_text("\n")
    with pytest.raises(ServerProblem, match="saw nothing of process 1"):
        asyncio.run(sample(1, 0.1, perf.parent))


def test_without_perf_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="linux-perf"):
        executor_python.main([])
