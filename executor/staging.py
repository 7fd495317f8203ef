"""Numbers on their way to the device: written here, sent in one copy that nothing waits for."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def put(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """A copy on `device`, under way when this returns; on a CPU the array itself."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Staging:
    """Named arrays of int64, side by side in host memory, and their twins on the device, which stay where
    they are: a CUDA graph may hold on to them.

    The host's are not to be written before the copy has been made; a step ends by waiting for its tokens,
    and with them for this.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        """
        Args:
            sizes: of each array. All hold 0 at first.
        """
        total = sum(sizes.values())
        self._source = torch.zeros(total, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._target = torch.zeros(total, dtype=torch.int64, device=device)
        self.host: dict[str, NDArray[np.int64]] = {}
        self.device: dict[str, Tensor] = {}
        flat, start = self._source.numpy(), 0
        for name, size in sizes.items():
            self.host[name] = flat[start : start + size]
            self.device[name] = self._target[start : start + size]
            start += size

    def send(self) -> None:
        """Start the copy."""
        self._target.copy_(self._source, non_blocking=True)
