"""How fast the kernels are, against the device's peak and torch's attention on contiguous K and V."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from bench.gpu.setting import Peaks, Setting
from bench.kernels import copy_blocks, decode, prefill, swap, write_kv
from bench.kernels.gpu import Figure

Progress = Callable[[float], None]
MOVES = (write_kv, copy_blocks, swap)


def decodes(setting: Setting, peaks: Peaks, progress: Progress) -> list[dict[str, Any]]:
    """Of `decode`: its time is that of reading K and V once, so bandwidth is what counts."""
    return _rows(decode.measure(setting.device, reduced=setting.interpret), peaks, progress)


def prefills(setting: Setting, peaks: Peaks, progress: Progress) -> list[dict[str, Any]]:
    """Of `prefill`: two products for each pair of a query and a key it sees."""
    return _rows(prefill.measure(setting.device, reduced=setting.interpret), peaks, progress)


def moves(setting: Setting, peaks: Peaks, progress: Progress) -> list[dict[str, Any]]:
    """Of writing new K and V, of copying blocks, and of taking them to the host and back."""
    parts = [part.measure(setting.device, reduced=setting.interpret) for part in MOVES]
    return _rows(chain.from_iterable(parts), peaks, progress)


def _rows(figures: Iterable[Figure], peaks: Peaks, progress: Progress) -> list[dict[str, Any]]:
    found = []
    for figure in figures:
        row: dict[str, Any] = {
            "shape": f"{figure.kernel}, {figure.shape}",
            "us": figure.seconds * 1e6,
            "GB/s": figure.gigabytes_per_second,
            "of bandwidth": figure.bytes / figure.seconds / peaks.bandwidth,
            "TFLOP/s": figure.teraflops,
            "of FLOP/s": figure.flops / figure.seconds / peaks.flops,
            "over torch": None,
        }
        if figure.torch_seconds is not None:
            row["over torch"] = figure.seconds / figure.torch_seconds - 1
        found.append(row)
        progress(1 - 0.8 ** len(found))
    progress(1.0)
    return found
