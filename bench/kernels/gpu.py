"""Time kernels on an accelerator and set the result beside what the device could do."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

# Memory bandwidth in GB/s and dense bfloat16 in TFLOP/s, from the makers' data sheets; first match counts.
PEAKS = (
    ("B200", 8000, 2250),
    ("H200", 4800, 989),
    ("H100 PCIe", 2000, 756),
    ("H100 NVL", 3900, 835),
    ("H100", 3350, 989),
    ("A100-SXM4-40GB", 1555, 312),
    ("A100-PCIE-40GB", 1555, 312),
    ("A100 80GB PCIe", 1935, 312),
    ("A100", 2039, 312),
    ("L40S", 864, 362),
    ("RTX 4090", 1008, 165),
    ("MI300X", 5300, 1307),
)
_FLUSH_BYTES = 1 << 28  # more than any device's L2 cache


@dataclass(frozen=True, slots=True)
class Figure:
    """One measurement of one kernel."""

    kernel: str
    shape: str
    seconds: float
    bytes: int  # what has to be read and written
    flops: int
    torch_seconds: (
        float | None
    )  # torch's own attention over the same keys side by side; None: it has none

    @property
    def gigabytes_per_second(self) -> float:
        return self.bytes / self.seconds / 1e9

    @property
    def teraflops(self) -> float:
        return self.flops / self.seconds / 1e12


def peak(device: torch.device) -> tuple[int, int] | None:
    """GB/s and TFLOP/s of a device that is known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next(((memory, compute) for known, memory, compute in PEAKS if known in name), None)


def seconds(function: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median time of a call: on a device replayed as a graph with a cold L2 cache, on a CPU of one call."""
    function()
    if device.type != "cuda":
        began = time.perf_counter()
        function()
        return time.perf_counter() - began
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the host takes no part in what is timed
        function()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
    event: Any = torch.cuda.Event
    times: list[float] = []
    for _ in range(repeats + 2):
        start, end = event(enable_timing=True), event(enable_timing=True)
        flush.zero_()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times[2:])


def table(figures: list[Figure], device: torch.device) -> Iterator[str]:
    """Lines of a table: achieved, share of the peak, and time against torch's own."""
    known = peak(device)
    yield (
        f"{'kernel':11} {'shape':44} {'ms':>9} {'GB/s':>7} {'peak':>5} {'TFLOP/s':>8} {'peak':>5} "
        f"{'torch/ours':>10}"
    )
    for figure in figures:
        memory, compute = figure.gigabytes_per_second, figure.teraflops
        of_memory = f"{memory / known[0]:.0%}" if known else "-"
        of_compute = f"{compute / known[1]:.0%}" if known else "-"
        ratio = f"{figure.torch_seconds / figure.seconds:.2f}x" if figure.torch_seconds else "-"
        yield (
            f"{figure.kernel:11} {figure.shape:44} {figure.seconds * 1e3:9.3f} {memory:7.1f} {of_memory:>5} "
            f"{compute:8.2f} {of_compute:>5} {ratio:>10}"
        )


def arguments(description: str) -> torch.device:
    """Parse a benchmark's command line; with --interpret, on the CPU. Call it before kernels are imported."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--interpret",
        action="store_true",
        help="run reduced sizes in Triton's interpreter on the CPU, to see that the program works",
    )
    if parser.parse_args().interpret:
        os.environ["TRITON_INTERPRET"] = "1"
        return torch.device("cpu")
    if not torch.cuda.is_available():
        parser.error(
            "no GPU is visible to torch: run this on a machine with one, or add --interpret"
        )
    return torch.device("cuda", 0)
