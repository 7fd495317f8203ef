"""What every kernel computes, in torch a newcomer reads in a minute: the same names, arguments and results.

These are the oracles of the kernels' tests, and the way to see an accelerator's whole path run without one.
They are written for reading; the portable path that serves is `kernels.reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def write_kv(
    queries: Tensor,  # [tokens, heads, head_dim], rotated in place
    new_keys: Tensor,  # [tokens, kv_heads, head_dim]
    new_values: Tensor,  # [tokens, kv_heads, head_dim]
    keys: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    values: Tensor,
    slots: Tensor,  # [tokens] int64; -1: write nothing
    *,
    cos: Tensor | None = None,  # [tokens, head_dim / 2] float32; None: no rotation
    sin: Tensor | None = None,
    key_scales: Tensor | None = None,  # [num_blocks, block_size, kv_heads] of a quantised cache
    value_scales: Tensor | None = None,
) -> None:
    """Store each token's K and V in its slot, rotated and scaled on the way."""
    rows = slots >= 0
    key = new_keys[rows]
    if cos is not None and sin is not None:
        key = _rotated(key, cos[rows], sin[rows])
        queries[rows] = _rotated(queries[rows], cos[rows], sin[rows]).to(queries.dtype)
    _store(key, keys, key_scales, slots[rows])
    _store(new_values[rows], values, value_scales, slots[rows])


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (i, i + head_dim / 2) turned by its token's angle, in float32."""
    low, high = heads.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _store(new: Tensor, cache: Tensor, scales: Tensor | None, slots: Tensor) -> None:
    if scales is not None:
        new, scale = quantised(new, cache.dtype)
        scales.view(-1, scales.shape[-1])[slots] = scale
    cache.flatten(0, 1)[slots] = new.to(cache.dtype)


def quantised(heads: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Heads divided so that the largest value of each is the type's largest, and what they were divided by.

    Args:
        heads: [..., head_dim].
        dtype: float8_e4m3fn or int8.

    Returns:
        [..., head_dim] of `dtype`, and the scales [...] float32; NaN where a head holds NaN or infinity.
    """
    heads = heads.float()
    largest = 127.0 if dtype == torch.int8 else 448.0
    scale = (heads.abs().amax(-1) / largest).clamp(min=1e-30) + (heads * 0).sum(-1)
    scaled = heads / scale[..., None]
    return (scaled + 0.5).floor().to(dtype) if dtype == torch.int8 else scaled.to(dtype), scale


def copy_blocks(
    keys: Tensor,  # [layers, num_blocks, block_size, kv_heads, head_dim]
    values: Tensor,
    sources: Tensor,  # [copies]
    targets: Tensor,  # [copies], none twice and none a source
    *,
    key_scales: Tensor | None = None,  # [layers, num_blocks, block_size, kv_heads]
    value_scales: Tensor | None = None,
) -> None:
    """Copy block `sources[i]` to block `targets[i]` in every layer, one after the other."""
    for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
        for cache in (keys, values, key_scales, value_scales):
            if cache is not None:
                cache[:, target] = cache[:, source]


def gather_blocks(cache: Tensor, blocks: Tensor, out: Tensor) -> None:
    """Copy blocks of every layer to a buffer [layers, count, ...]."""
    out.copy_(cache[:, blocks.to(cache.device)])


def scatter_blocks(buffer: Tensor, blocks: Tensor, cache: Tensor) -> None:
    """Copy a buffer [layers, count, ...] to blocks of every layer."""
    cache[:, blocks] = buffer.to(cache.device)
