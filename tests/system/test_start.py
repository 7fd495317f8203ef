"""What an executor says of settings that do not fit, before it serves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.system.stack import Stack


def start(tmp_path: Path, model: Path, *flags: str) -> tuple[int, str]:
    """The exit status and what was written to stderr."""
    ended = subprocess.run(
        [sys.executable, "-m", "executor", "--run-dir", str(tmp_path / "run"), "--model", str(model), *flags],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )  # fmt: skip
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_more_kv_memory_than_there_is_ends_with_one_line(
    tmp_path: Path, tiny_model: Path, kernels: str
) -> None:
    status, said = start(tmp_path, tiny_model, "--kv-memory", "900000GiB", "--kernels", kernels)
    assert status == 2
    assert "Traceback" not in said
    assert "give a smaller --kv-memory" in said.splitlines()[-1]


def test_a_pool_smaller_than_the_context_and_a_context_beyond_the_model_are_told(
    tiny_model: Path,
) -> None:
    small = Stack(tiny_model, executor={"num-blocks": "9", "max-model-len": "100000"})
    try:
        small.up()
        said = small.logs["executor"].read_text()
    finally:
        small.down()
    assert "--max-model-len 100000 is more than the model's" in said
    assert "K and V of 144 tokens fit" in said
    assert "needs --kv-memory" in said
