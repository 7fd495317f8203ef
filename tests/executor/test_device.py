"""What is said where there is no GPU, or one that does not do; and how much of one goes to K and V."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import executor.__main__ as process
from executor.__main__ import CannotStart, _check_device
from executor.config import read
from executor.device import blocks_that_fit, measured_blocks, why_no_gpu
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


class Probe:
    """A runner that takes memory, on a device that is made up."""

    block_bytes = 2 << 20

    def __init__(self, num_blocks: int, taken: dict[str, int]) -> None:
        taken["kv"] = num_blocks * self.block_bytes
        self._taken = taken

    def largest_step(self) -> None:
        self._taken["peak"] = self._taken["kv"] + 3 * GIB


def test_kv_gets_what_the_largest_step_beside_the_weights_and_other_processes_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = {"weights": 16 * GIB, "kv": 0, "peak": 0}
    elsewhere, total = 2 * GIB, 80 * GIB

    def reserved(device: torch.device) -> int:
        return taken["weights"] + taken["kv"]

    def emptied() -> None:
        taken["kv"] = 0

    for name, fake in (
        ("reset_peak_memory_stats", lambda device: None),
        ("max_memory_reserved", lambda device: taken["weights"] + taken["peak"]),
        ("memory_reserved", reserved),
        ("mem_get_info", lambda device: (total - elsewhere - reserved(device), total)),
        ("empty_cache", emptied),
    ):
        monkeypatch.setattr(torch.cuda, name, fake)
    built: list[int] = []

    def build(num_blocks: int) -> Any:
        built.append(num_blocks)
        return Probe(num_blocks, taken)

    blocks = measured_blocks(build, 33, CUDA, 0.9)
    assert built == [33]
    assert blocks == (72 - 2 - 16 - 3) * 512  # of 2 MiB


def no_room(*given: Any, **named: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with little left."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (GIB // 2, 80 * GIB))


@pytest.mark.usefixtures("full")
def test_weights_that_do_not_fit_are_told_with_what_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process, "load_model", no_room)
    server: Any = SimpleNamespace(reason="")
    with pytest.raises(CannotStart, match=r"weights of big do not fit: 0\.5 of cuda's 80\.0 GiB"):
        process._load(read(["--device", "cuda", "--model", "big"], {}), server)


@pytest.mark.usefixtures("full")
@pytest.mark.parametrize("asked", [["--kv-memory", "64MiB"], []])
def test_kv_that_does_not_fit_is_told_with_what_to_make_smaller(
    monkeypatch: pytest.MonkeyPatch, asked: list[str]
) -> None:
    monkeypatch.setattr(process, "_kernels", lambda *given: no_room)
    monkeypatch.setattr(process, "block_bytes", lambda *given: 1 << 20)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    server: Any = SimpleNamespace(reason="")
    loaded: Any = SimpleNamespace(config=None)
    with pytest.raises(CannotStart, match=r"Tried to allocate .*; 0\.5 of .*smaller --kv-memory"):
        process._runner(read(["--device", "cuda", *asked], {}), loaded, server)


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
