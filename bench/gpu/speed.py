"""How fast the kernels are, against the device's peak and torch's attention on contiguous K and V."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu.setting import Peaks, Setting
from bench.kernels import decode, prefill
from bench.kernels.gpu import Figure, seconds
from kernels.copy_blocks import copy_blocks
from kernels.write_kv import write_kv

Progress = Callable[[float], None]


def decodes(setting: Setting, peaks: Peaks, progress: Progress) -> list[dict[str, Any]]:
    """Of `decode`: its time is that of reading K and V once, so bandwidth is what counts."""
    return _rows(decode.measure(setting.device, reduced=setting.interpret), peaks, progress)


def prefills(setting: Setting, peaks: Peaks, progress: Progress) -> list[dict[str, Any]]:
    """Of `prefill`: two products for each pair of a query and a key it sees."""
    return _rows(prefill.measure(setting.device, reduced=setting.interpret), peaks, progress)


def moves(setting: Setting, peaks: Peaks, progress: Progress) -> list[dict[str, Any]]:
    """Of writing new K and V, and of copying blocks."""
    return _rows(_moves(setting), peaks, progress)


def _rows(figures: Iterator[Figure], peaks: Peaks, progress: Progress) -> list[dict[str, Any]]:
    found = []
    for figure in figures:
        row: dict[str, Any] = {
            "shape": figure.shape,
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


def _moves(setting: Setting) -> Iterator[Figure]:
    heads, kv_heads, head_dim, size = 32, 8, 128, 16  # Llama 3 8B's
    layers, blocks = (1, 8) if setting.interpret else (32, 2048)
    with torch.device(setting.device):
        shape = layers, blocks, size, kv_heads, head_dim
        keys, values = (torch.randn(shape, dtype=setting.dtype) for _ in range(2))
        each = keys.element_size() * head_dim
        for tokens in (3,) if setting.interpret else (64, 8192):
            fused = torch.randn(tokens, heads + 2 * kv_heads, head_dim, dtype=setting.dtype)
            queries, new_keys, new_values = torch.split(fused, [heads, kv_heads, kv_heads], dim=1)
            slots = torch.randperm(blocks * size)[:tokens]
            cos, sin = (torch.rand(tokens, head_dim // 2) for _ in range(2))
            taken = seconds(
                lambda q=queries, k=new_keys, v=new_values, at=slots, c=cos, s=sin: write_kv(  # type: ignore[misc]
                    q, k, v, keys[0], values[0], at, cos=c, sin=s
                ),
                setting.device,
            )
            moved = tokens * (2 * heads + 4 * kv_heads) * each
            yield Figure("write_kv", f"write_kv of {tokens} tokens", taken, moved, 0, None)
        count = 2 if setting.interpret else 32
        order = torch.randperm(blocks)
        taken = seconds(
            lambda: copy_blocks(keys, values, order[:count], order[count : 2 * count]),
            setting.device,
        )
        moved = 4 * count * layers * size * kv_heads * each
        yield Figure("copy", f"copy of {count} blocks, {layers} layers", taken, moved, 0, None)
