"""Where the check runs, and what the device could do at best."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.kernels.gpu import peak, seconds


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


@dataclass(frozen=True, slots=True)
class Peaks:
    """What the device could do at best."""

    source: str
    bandwidth: float  # bytes/s
    flops: float  # dense bfloat16 FLOP/s


def peaks(setting: Setting) -> Peaks:
    """From its data sheet if there is one, else as a copy and a product of matrices reach."""
    if known := peak(setting.device):
        return Peaks("data sheet", known[0] * 1e9, known[1] * 1e12)
    return measured_peaks(setting)


def measured_peaks(setting: Setting) -> Peaks:
    """What a plain copy and a plain product of matrices reach."""
    size, side = (1 << 20, 64) if setting.interpret else (1 << 30, 8192)
    with torch.device(setting.device):
        source, target = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
        a, b = (torch.randn(side, side, dtype=setting.dtype) for _ in range(2))
    copied = 2 * size / seconds(lambda: target.copy_(source), setting.device)
    multiplied = 2 * side**3 / seconds(lambda: a @ b, setting.device)
    return Peaks("measured", copied, multiplied)
