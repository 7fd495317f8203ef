"""The check of a GPU, on a CPU: every section runs and finds what it should, and failures are told apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import gpu_check
from bench.gpu import numerics


def test_every_section_passes_in_the_interpreter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    assert gpu_check.main(["--interpret", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert {name: each["status"] for name, each in report["sections"].items()} == dict.fromkeys(
        ("device", "numerics", "tokens", "decode", "prefill", "moves", "graphs", "memd"), "passed"
    )
    kernels = report["sections"]["numerics"]["found"]["kernels"]
    assert set(kernels) == {"decode", "prefill", "write_kv", "copy_blocks", "swap"}
    assert report["sections"]["memd"]["found"]["steps"] > 0
    for shown in (capsys.readouterr().out, out.with_suffix(".txt").read_text()):
        assert "== decode: passed" in shown
        assert "== memd: passed" in shown
        assert "all passed" in shown


def test_a_section_that_fails_costs_the_exit_status_and_not_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(setting: object, progress: object) -> None:
        raise RuntimeError("the device fell off the bus")

    monkeypatch.setattr(numerics, "check", broken)
    out = tmp_path / "found.json"
    given = ["--interpret", "--only", "numerics,device", "--out", str(out)]
    assert gpu_check.main(given) == 1
    sections = json.loads(out.read_text())["sections"]
    assert sections["numerics"]["status"] == "failed"
    assert "fell off the bus" in sections["numerics"]["found"]["failures"][0]
    assert sections["device"]["status"] == "passed"
    assert "FAILED: numerics" in capsys.readouterr().out


def test_a_kernel_that_computes_something_else_fails_numerics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numerics, "copy_blocks", lambda *tensors: None)
    monkeypatch.setattr(numerics, "_attention", lambda *given: iter(()))  # which takes its time
    out = tmp_path / "found.json"
    assert gpu_check.main(["--interpret", "--only", "numerics", "--out", str(out)]) == 1
    (failure,) = json.loads(out.read_text())["sections"]["numerics"]["found"]["failures"]
    assert failure.startswith("copy_blocks")


def test_without_a_gpu_it_says_how_to_run_without_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--out", str(tmp_path / "none.json")]) == 2
    assert "--interpret" in capsys.readouterr().err
