"""How fast the kernels are, against the device's peak and torch's attention on contiguous K and V."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.gpu.setting import Peaks, Setting
from kernels.copy_blocks import copy_blocks
from kernels.decode import decode
from kernels.prefill import prefill
from kernels.write_kv import write_kv

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16  # Llama 3 8B's, and the default block
# rows, context of each
DECODES = ((1, 2048), (1, 131072), (8, 8192), (64, 2048), (256, 1024))
# new tokens of each row, context before them
PREFILLS = (((2048,), (0,)), ((512,), (3584,)), ((512,) * 4, (0, 512, 1024, 1536)))
# 64 decodes beside a chunk, which the runner gives to the two kernels
COPIES = 32


@dataclass(slots=True)
class _Cache:
    """One layer's paged K and V, in blocks of random order, and the tables of `rows` sequences."""

    keys: Tensor
    values: Tensor
    tables: Tensor
    lengths: Tensor

    @classmethod
    def random(cls, setting: Setting, lengths: list[int]) -> _Cache:
        kv_heads, head_dim = _heads(setting)[1:]
        needed = [-(-length // BLOCK) for length in lengths]
        with torch.device(setting.device):
            shape = sum(needed) + 1, BLOCK, kv_heads, head_dim
            keys, values = (torch.randn(shape, dtype=setting.dtype) for _ in range(2))
            order = torch.randperm(sum(needed), dtype=torch.int32) + 1
            tables = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
            for row, mine in enumerate(torch.split(order, needed)):
                tables[row, : len(mine)] = mine
            return cls(keys, values, tables, torch.tensor(lengths, dtype=torch.int32))

    def row(self, row: int) -> tuple[Tensor, Tensor]:
        """[kv_heads, length, head_dim] of K and V, contiguous."""
        length = int(self.lengths[row])
        blocks = self.tables[row, : -(-length // BLOCK)].long()
        keys, values = (
            cache[blocks].flatten(0, 1)[:length].transpose(0, 1).contiguous()
            for cache in (self.keys, self.values)
        )
        return keys, values


def _heads(setting: Setting) -> tuple[int, int, int]:
    return (2, 1, 16) if setting.interpret else (HEADS, KV_HEADS, HEAD_DIM)


def decodes(
    setting: Setting, peaks: Peaks, progress: Callable[[float], None]
) -> list[dict[str, Any]]:
    """Bandwidth of `decode`: bytes of K and V that must be read, over the time it took."""
    heads, kv_heads, head_dim = _heads(setting)
    sizes = ((2, 33),) if setting.interpret else DECODES
    found = []
    for done, (rows, context) in enumerate(sizes):
        cache = _Cache.random(setting, [context] * rows)
        queries = torch.randn(rows, heads, head_dim, dtype=setting.dtype, device=setting.device)
        out, scale = torch.empty_like(queries), head_dim**-0.5
        taken = setting.seconds(
            lambda q=queries, c=cache, o=out, n=context, s=scale: decode(  # type: ignore[misc]
                q, c.keys, c.values, c.tables, c.lengths, scale=s, out=o, longest=n
            )
        )
        theirs = _contiguous_decode(setting, queries, cache, out)
        read = 2 * rows * context * kv_heads * head_dim * setting.dtype.itemsize
        found.append(
            {
                "rows": rows,
                "context": context,
                "us": taken * 1e6,
                "GB/s": read / taken / 1e9,
                "of peak": read / taken / peaks.bandwidth,
                "torch us": theirs * 1e6,
                "over torch": taken / theirs - 1,
            }
        )
        progress((done + 1) / len(sizes))
    return found


def _contiguous_decode(setting: Setting, queries: Tensor, cache: _Cache, ours: Tensor) -> float:
    """The faster of two ways to ask torch for the same: heads of a group as rows, or as heads.

    Raises:
        ValueError: its result is another one.
    """
    rows, heads, head_dim = queries.shape
    pairs = [cache.row(row) for row in range(rows)]
    keys, values = (torch.stack(part) for part in zip(*pairs, strict=True))
    del pairs
    grouped = queries.view(rows, keys.shape[1], -1, head_dim)
    single = queries.unsqueeze(2)
    scale = head_dim**-0.5
    wanted = F.scaled_dot_product_attention(grouped, keys, values, scale=scale)
    _same(ours, wanted.reshape(rows, heads, head_dim))
    ways: tuple[Callable[[], Tensor], ...] = (
        lambda: F.scaled_dot_product_attention(grouped, keys, values, scale=scale),
        lambda: F.scaled_dot_product_attention(single, keys, values, scale=scale, enable_gqa=True),
    )
    return min(setting.seconds(way) for way in ways)


def prefills(
    setting: Setting, peaks: Peaks, progress: Callable[[float], None]
) -> list[dict[str, Any]]:
    """FLOP/s of `prefill`: two products for each pair of a query and a key it sees."""
    heads, _, head_dim = _heads(setting)
    sizes = (((5, 3), (0, 4)),) if setting.interpret else PREFILLS
    found = []
    for done, (counts, before) in enumerate(sizes):
        cache = _Cache.random(setting, [a + b for a, b in zip(counts, before, strict=True)])
        with torch.device(setting.device):
            queries = torch.randn(sum(counts), heads, head_dim, dtype=setting.dtype)
            starts = torch.tensor([0, *counts]).cumsum(0).int()
        out, scale, most = torch.empty_like(queries), head_dim**-0.5, max(counts)
        taken = setting.seconds(
            lambda q=queries, c=cache, t=starts, o=out, n=most, s=scale: prefill(  # type: ignore[misc]
                q, c.keys, c.values, c.tables, t, c.lengths, n, scale=s, out=o
            )
        )
        pairs = sum(n * b + n * (n + 1) // 2 for n, b in zip(counts, before, strict=True))
        flops = 4 * heads * head_dim * pairs
        theirs = _contiguous_prefill(setting, queries, cache, counts, out)
        found.append(
            {
                "new": list(counts),
                "before": list(before),
                "us": taken * 1e6,
                "TFLOP/s": flops / taken / 1e12,
                "of peak": flops / taken / peaks.flops,
                "torch us": theirs * 1e6,
                "over torch": taken / theirs - 1,
            }
        )
        progress((done + 1) / len(sizes))
    return found


def _contiguous_prefill(
    setting: Setting, queries: Tensor, cache: _Cache, counts: tuple[int, ...], ours: Tensor
) -> float:
    """Torch's attention, row after row, each with its own K and V laid end to end.

    Raises:
        ValueError: its result is another one.
    """
    from torch.nn.attention.bias import causal_lower_right

    calls = []
    for row, query in enumerate(torch.split(queries, list(counts))):
        keys, values = cache.row(row)
        group = query.shape[1] // keys.shape[0]
        # Repeated beforehand: not every one of torch's kernels takes groups beside a mask.
        wide = [part.repeat_interleave(group, 0)[None] for part in (keys, values)]
        mask: Any = causal_lower_right(query.shape[0], keys.shape[1])
        calls.append((query.transpose(0, 1)[None].contiguous(), wide[0], wide[1], mask))

    def attend() -> list[Tensor]:
        return [
            F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
            for query, keys, values, mask in calls
        ]

    _same(ours, torch.cat([each[0].transpose(0, 1) for each in attend()]))
    return setting.seconds(attend)


def moves(
    setting: Setting, peaks: Peaks, progress: Callable[[float], None]
) -> list[dict[str, Any]]:
    """Bandwidth of writing new K and V, and of copying blocks: bytes read and written over the time."""
    heads, kv_heads, head_dim = _heads(setting)
    layers, blocks = (1, 8) if setting.interpret else (32, 2048)
    size = setting.dtype.itemsize
    found = []
    with torch.device(setting.device):
        shape = layers, blocks, BLOCK, kv_heads, head_dim
        keys, values = (torch.randn(shape, dtype=setting.dtype) for _ in range(2))
        for tokens in (3,) if setting.interpret else (64, 8192):
            fused = torch.randn(tokens, heads + 2 * kv_heads, head_dim, dtype=setting.dtype)
            queries, new_keys, new_values = torch.split(fused, [heads, kv_heads, kv_heads], dim=1)
            slots = torch.randperm(blocks * BLOCK)[:tokens]
            cos, sin = (torch.rand(tokens, head_dim // 2) for _ in range(2))
            taken = setting.seconds(
                lambda q=queries, k=new_keys, v=new_values, at=slots, c=cos, s=sin: write_kv(  # type: ignore[misc]
                    q, k, v, keys[0], values[0], at, cos=c, sin=s
                )
            )
            moved = tokens * (2 * heads + 4 * kv_heads) * head_dim * size
            found.append(_moved(f"write_kv of {tokens} tokens", taken, moved, peaks))
        progress(0.5)
        count = 2 if setting.interpret else COPIES
        order = torch.randperm(blocks)
        taken = setting.seconds(
            lambda: copy_blocks(keys, values, order[:count], order[count : 2 * count])
        )
        moved = 4 * count * layers * BLOCK * kv_heads * head_dim * size
        found.append(_moved(f"copy of {count} blocks, {layers} layers", taken, moved, peaks))
    progress(1.0)
    return found


def _moved(what: str, taken: float, moved: int, peaks: Peaks) -> dict[str, Any]:
    return {
        "what": what,
        "us": taken * 1e6,
        "GB/s": moved / taken / 1e9,
        "of peak": moved / taken / peaks.bandwidth,
    }


def _same(ours: Tensor, theirs: Tensor) -> None:
    ours, theirs = ours.float(), theirs.float()
    difference = ((ours - theirs).abs() / (1 + theirs.abs())).max().item()
    if not difference <= 3e-2:
        raise ValueError(f"torch's result differs by {difference:.3g}")
