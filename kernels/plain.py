"""What every kernel computes, in torch a newcomer reads in a minute: the same names, arguments and results.

These are the oracles of the kernels' tests, and the way to see an accelerator's whole path run without one.
They are written for reading; the portable path that serves is `kernels.reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.options import Options


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


def decode(
    queries: Tensor,  # [rows, heads, head_dim]
    keys: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    values: Tensor,
    tables: Tensor,  # [rows, width]
    lengths: Tensor,  # [rows]; 0: nothing is read and the output is zeros
    *,
    scale: float,
    options: Options = Options(),  # noqa: B008 (frozen)
    key_scales: Tensor | None = None,  # [num_blocks, block_size, kv_heads] of a quantised cache
    value_scales: Tensor | None = None,
    out: Tensor | None = None,
    splits: int | None = None,  # means nothing here
    longest: int | None = None,  # nor this
) -> Tensor:
    """Attention of one token per row over its sequence, whose last position it is."""
    out = torch.empty_like(queries) if out is None else out
    for row, length in enumerate(lengths.tolist()):
        key = _gathered(keys, key_scales, tables[row], length)
        value = _gathered(values, value_scales, tables[row], length)
        out[row] = _attend(queries[row : row + 1], key, value, scale, options)[0]
    return out


def prefill(
    queries: Tensor,  # [tokens, heads, head_dim], row after row
    keys: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    values: Tensor,
    tables: Tensor,  # [rows, width]
    starts: Tensor,  # [rows + 1]: row r's queries are those from starts[r] to starts[r + 1]
    lengths: Tensor,  # [rows] positions, of which the queries are the last
    longest: int,  # means nothing here
    *,
    scale: float,
    options: Options = Options(),  # noqa: B008 (frozen)
    key_scales: Tensor | None = None,  # [num_blocks, block_size, kv_heads] of a quantised cache
    value_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last tokens of each row's sequence over all of it."""
    out = torch.empty_like(queries) if out is None else out
    bounds = starts.tolist()
    for row, length in enumerate(lengths.tolist()):
        here = slice(bounds[row], bounds[row + 1])
        key = _gathered(keys, key_scales, tables[row], length)
        value = _gathered(values, value_scales, tables[row], length)
        out[here] = _attend(queries[here], key, value, scale, options)
    return out


def _gathered(cache: Tensor, scales: Tensor | None, table: Tensor, length: int) -> Tensor:
    """[length, kv_heads, head_dim] float32: what a sequence's blocks hold, unwritten slots left out."""
    blocks = table[: -(-length // cache.shape[1])].long()
    stored = cache[blocks].flatten(0, 1)[:length].float()
    return stored if scales is None else stored * scales[blocks].flatten(0, 1)[:length, :, None]


def _attend(
    queries: Tensor,  # [count, heads, head_dim], the last ones of the sequence
    keys: Tensor,  # [length, kv_heads, head_dim] float32
    values: Tensor,
    scale: float,
    options: Options,
) -> Tensor:  # [count, heads, head_dim] float32
    group = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", queries.float(), keys) * scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    length, count = len(keys), len(queries)
    seen = torch.arange(length, device=queries.device)[None, :]
    own = torch.arange(length - count, length, device=queries.device)[:, None]
    if options.slopes is not None:
        scores = scores - options.slopes[:, None, None] * (own - seen)
    hidden = seen > own
    if options.window is not None:
        hidden = hidden | (seen <= own - options.window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if options.sinks is not None:  # a key more, whose value is zero
        sinks = options.sinks[:, None, None].expand(-1, count, 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values)
