"""The comparison with llama.cpp where there is none."""

from __future__ import annotations

import subprocess
import sys

import pytest

from executor.load import DEFAULT_MODEL, find
from executor.weights import BadModel


def test_without_llama_cpp_it_says_so_in_one_line_and_ends() -> None:
    try:
        find(DEFAULT_MODEL)
    except BadModel as error:
        pytest.skip(str(error))
    done = subprocess.run(
        [sys.executable, "-m", "bench.llama", "--rounds", "1"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if done.returncode == 0:
        pytest.skip("llama_cpp is installed here")
    assert done.returncode == 1
    assert done.stdout == ""
    said, ended = done.stderr.splitlines()
    assert "cannot import llama_cpp" in said
    assert ended == "nothing to compare: llama.cpp ended with status 1"
