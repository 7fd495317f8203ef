"""Where the check runs, what the device could do at best, and how a time is taken."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

# TB/s of memory and dense bfloat16 TFLOP/s in data sheets, by part of the device's name.
DATA_SHEETS: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        "B200": (8.0, 2250.0),
        "H200": (4.8, 989.0),
        "H100 PCIe": (2.0, 756.0),
        "H100": (3.35, 989.0),
        "A100-SXM4-80GB": (2.039, 312.0),
        "A100 80GB PCIe": (1.935, 312.0),
        "A100": (1.555, 312.0),
        "L40S": (0.864, 362.0),
        "A10": (0.6, 125.0),
        "RTX 4090": (1.008, 165.0),
    }
)
_TAKE_S = 0.2  # one measurement runs for about so long
_MOST_TIMES = 200


@dataclass(frozen=True, slots=True)
class Setting:
    """A device, and sizes fit for it."""

    device: torch.device
    interpret: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of K, V and activations. The interpreter cuts bfloat16 off where devices round."""
        return torch.float32 if self.interpret else torch.bfloat16

    def wait(self) -> None:
        """Until the device has done all it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def free(self) -> int:
        """Bytes the device has left."""
        return torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 1 << 30

    def seconds(self, work: Callable[[], object]) -> float:
        """Median time of one call on the device. The caches it finds are those it left behind, so `work` must
        touch more than they hold. Launches are queued ahead: what the host does in between is not seen.
        """
        if self.device.type != "cuda":
            started = time.perf_counter()
            work()
            return time.perf_counter() - started
        for _ in range(3):  # the first compiles
            work()
        self.wait()
        started = time.perf_counter()
        work()
        self.wait()
        times = max(5, min(_MOST_TIMES, int(_TAKE_S / max(time.perf_counter() - started, 1e-6))))
        event: Any = torch.cuda.Event
        marks = [event(enable_timing=True) for _ in range(times + 1)]
        marks[0].record()
        for mark in marks[1:]:
            work()
            mark.record()
        self.wait()
        taken = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
        return float(taken[len(taken) // 2]) / 1e3


@dataclass(frozen=True, slots=True)
class Peaks:
    """What the device could do at best."""

    source: str
    bandwidth: float  # bytes/s
    flops: float  # dense bfloat16 FLOP/s


def peaks(setting: Setting) -> Peaks:
    """From its data sheet if there is one, else as a copy and a product of matrices reach."""
    if setting.device.type == "cuda":
        name = torch.cuda.get_device_name(setting.device)
        for part, (memory, compute) in DATA_SHEETS.items():
            if part in name:
                return Peaks("data sheet", memory * 1e12, compute * 1e12)
    reached = measured_peaks(setting)
    return Peaks("measured", reached.bandwidth, reached.flops)


def measured_peaks(setting: Setting) -> Peaks:
    """What a plain copy and a plain product of matrices reach."""
    size, side = (1 << 10, 64) if setting.interpret else (1 << 30, 8192)
    with torch.device(setting.device):
        source, target = (torch.empty(size, dtype=torch.uint8) for _ in range(2))
        a, b = (torch.randn(side, side, dtype=setting.dtype) for _ in range(2))
    copied = 2 * size / setting.seconds(lambda: target.copy_(source))
    multiplied = 2 * side**3 / setting.seconds(lambda: a @ b)
    return Peaks("measured", copied, multiplied)
