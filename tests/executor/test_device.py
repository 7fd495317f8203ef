"""What is said where there is no GPU, or one that does not do; and how much of one goes to K and V."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from executor.__main__ import CannotStart, _check_device
from executor.config import read
from executor.device import blocks_that_fit, why_no_gpu
from kernels.dispatch import Unavailable, kernels_for

GIB = 1 << 30
CPU = torch.device("cpu")
CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("total", "elsewhere", "own", "share", "each", "blocks"),
    [
        (100, 0, 0, 1.0, 10, 10),
        (100, 0, 0, 0.9, 10, 9),
        (100, 5, 30, 0.9, 10, 5),
        (100, 50, 50, 1.0, 10, 0),
        (100, 90, 50, 0.5, 10, 0),
        (80 * GIB, 500 << 20, 17 * GIB, 0.9, 2 << 20, 27910),
        (1 << 60, 0, 0, 1.0, 1, 1 << 24),  # no more than memd can name
    ],
)
def test_blocks_fill_what_the_share_leaves_beside_all_else(
    total: int, elsewhere: int, own: int, share: float, each: int, blocks: int
) -> None:
    assert blocks_that_fit(total, elsewhere, own, share, each) == blocks


def test_a_torch_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    with pytest.raises(CannotStart, match=r"--device cuda: torch .* is a build for CPUs: install"):
        _check_device(read(["--device", "cuda"], {}))


def test_a_missing_driver_is_told_in_torchs_words_with_where_to_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def init() -> None:
        raise RuntimeError("Found no NVIDIA driver on your system. Please check that you have one")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "init", init)
    said = why_no_gpu() or ""
    assert said.startswith("no GPU can be used: Found no NVIDIA driver on your system")
    assert "nvidia-smi" in said


def test_a_gpu_that_is_there_needs_no_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert why_no_gpu() is None


def test_triton_on_a_cpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(CannotStart, match=r"--kernels triton: .* set TRITON_INTERPRET=1"):
        _check_device(read(["--kernels", "triton"], {}))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    _check_device(read(["--kernels", "triton"], {}))


def test_an_old_gpu_is_told_what_it_has_and_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA T4")
    with pytest.raises(Unavailable, match=r"NVIDIA T4 has compute capability 7\.5.* need 8\.0"):
        kernels_for("triton", CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert kernels_for("triton", CUDA).name == "triton"


def test_without_triton_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "triton" else found(name)
    )
    with pytest.raises(Unavailable, match=r"pip install 'pagekeeper\[gpu\]'"):
        kernels_for("triton", CPU)


def test_native_code_is_for_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(CannotStart, match="--kernels native is code for CPUs"):
        _check_device(read(["--device", "cuda", "--kernels", "native"], {}))


def test_plain_torch_runs_anywhere() -> None:
    assert kernels_for("torch", CPU).name == "torch"
