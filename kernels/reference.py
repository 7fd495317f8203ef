"""What every kernel computes, in torch a newcomer reads in a minute: the same names, arguments and results.

The oracle of the kernels' tests, and what serves where those cannot run (`--kernels torch`). Keys are
gathered through block tables, and a slot that is not written never gets through: it may hold NaN, and 0 * NaN
is NaN, so it is not enough to give it weight zero. (Kwon et al., "Efficient Memory Management for Large
Language Model Serving with PagedAttention", SOSP 2023.)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.options import Options

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""Of each type of one byte: the largest number it holds."""

# Slots gathered together: bounds the scratch memory of a batch of long sequences.
_MOST_SLOTS = 1 << 17


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
    rows = (slots >= 0).nonzero()[:, 0]
    slots, key, value = (each.index_select(0, rows) for each in (slots, new_keys, new_values))
    if cos is not None and sin is not None:
        cos, sin = cos.index_select(0, rows), sin.index_select(0, rows)
        key = _rotated(key, cos, sin)
        query = _rotated(queries.index_select(0, rows), cos, sin)
        queries.index_copy_(0, rows, query.to(queries.dtype))
    _store(key, keys, key_scales, slots)
    _store(value, values, value_scales, slots)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (i, i + head_dim / 2) turned by its token's angle, in float32."""
    heads = heads.float()
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return (heads * cos[:, None]).addcmul_(swapped, sin[:, None])


def _store(new: Tensor, cache: Tensor, scales: Tensor | None, slots: Tensor) -> None:
    if scales is not None:
        new, scale = quantised(new, cache.dtype)
        scales.view(-1, scales.shape[-1])[slots] = scale
    # A view, or an error: what is written to a copy would be lost.
    cache.view(-1, *cache.shape[2:])[slots] = new.to(cache.dtype)


def quantised(heads: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Heads divided so that the largest value of each is the type's largest, and what they were divided by.

    Args:
        heads: [..., head_dim].
        dtype: a key of `LARGEST`.

    Returns:
        [..., head_dim] of `dtype`, and the scales [...] float32; NaN where a head holds NaN or infinity.
    """
    heads = heads.float()
    scale = (heads.abs().amax(-1) / LARGEST[dtype]).clamp(min=1e-30) + (heads * 0).sum(-1)
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
    """Copy block `sources[i]` to block `targets[i]` in every layer."""
    for cache in (keys, values, key_scales, value_scales):
        if cache is not None:
            cache[:, targets] = cache[:, sources]


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
    """Attention of one token per row over its sequence, whose last position it is.

    Rows with tables of about the same width are computed together. That width follows from a row's own length
    alone, so its numbers do not depend on its company.
    """
    out = torch.empty_like(queries) if out is None else out
    alike: dict[int, list[int]] = {}
    for row, length in enumerate(lengths.tolist()):
        alike.setdefault(padded(-(-length // keys.shape[1])), []).append(row)
    for width, rows in alike.items():
        together = max(1, _MOST_SLOTS // max(1, width * keys.shape[1]))
        for first in range(0, len(rows), together):
            here = torch.tensor(rows[first : first + together], device=queries.device)
            places = _places(tables[here, :width], lengths[here], keys.shape[1])
            key = _gathered(keys, key_scales, *places)
            value = _gathered(values, value_scales, *places)
            new = _attend(queries[here, None], key, value, lengths[here], scale, options)
            out[here] = new[:, 0].to(out.dtype)
    return out


def padded(blocks: int) -> int:
    """The width a table of `blocks` is computed with: few different ones, at most a quarter wasted."""
    step = 1 << max(0, blocks.bit_length() - 3)
    return -(-blocks // step) * step


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
        here, one = slice(bounds[row], bounds[row + 1]), slice(row, row + 1)
        table = tables[one, : -(-length // keys.shape[1])]
        places = _places(table, lengths[one], keys.shape[1])
        key = _gathered(keys, key_scales, *places)[:, :length]
        value = _gathered(values, value_scales, *places)[:, :length]
        new = _attend(queries[None, here], key, value, lengths[one], scale, options)
        out[here] = new[0].to(out.dtype)
    return out


def _places(tables: Tensor, lengths: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The rows' blocks, [rows, width], and which of all their slots, laid end to end, are unwritten."""
    unwritten = torch.arange(tables.shape[1] * size, device=tables.device) >= lengths[:, None]
    # What a table names past its blocks is not looked at: there the null block stands in.
    blocks = tables.long().masked_fill_(unwritten[:, ::size], 0)
    return blocks, unwritten.flatten().nonzero()[:, 0]


def _gathered(cache: Tensor, scales: Tensor | None, blocks: Tensor, unwritten: Tensor) -> Tensor:
    """[rows, width * size, kv_heads, head_dim]: what the rows' blocks hold, zeros in unwritten slots."""
    stored = cache.index_select(0, blocks.flatten()).flatten(0, 1)
    if scales is not None:
        scale = scales.index_select(0, blocks.flatten()).flatten(0, 1)
        stored = stored.float() * scale[..., None]
    return stored.index_fill_(0, unwritten, 0).view(len(blocks), -1, *cache.shape[2:])


def _attend(
    queries: Tensor,  # [rows, count, heads, head_dim], the last ones of their sequences
    keys: Tensor,  # [rows, positions, kv_heads, head_dim]
    values: Tensor,
    lengths: Tensor,  # [rows], of the positions
    scale: float,
    options: Options,
) -> Tensor:  # [rows, count, heads, head_dim]
    """softmax(scale * Q K^T + bias) V, where the bias of what a query does not see is -inf."""
    (rows, count, heads, _), (positions, kv_heads) = queries.shape, keys.shape[1:3]
    if not positions:
        return torch.zeros_like(queries)
    own = (lengths[:, None] - count + torch.arange(count, device=keys.device))[:, None, :, None]
    seen = torch.arange(positions, device=keys.device)
    hidden = seen > own
    if options.window is not None:
        hidden |= seen <= own - options.window
    dtype = queries.dtype if queries.dtype == keys.dtype else torch.float32
    bias = torch.zeros(hidden.shape, dtype=dtype, device=keys.device)
    if options.slopes is not None:
        bias = options.slopes[:, None, None] * (seen - own)
    bias.masked_fill_(hidden, float("-inf"))
    if options.sinks is not None:  # a key more, all zeros, that scores what the sink says
        keys, values = (F.pad(each, (0, 0, 0, 0, 0, 1)) for each in (keys, values))
        sinks = options.sinks[:, None, None].expand(rows, heads, count, 1)
        bias = torch.cat((bias.expand(rows, heads, -1, -1), sinks), dim=-1)
    query, key, value = (each.to(dtype).transpose(1, 2) for each in (queries, keys, values))
    group = heads // kv_heads
    if count == 1:  # the heads of a group, which see the same, stand as rows of one query matrix
        query = query.reshape(rows, kv_heads, group, -1)
        bias = bias.reshape(rows, -1, group if bias.shape[1] > 1 else 1, bias.shape[3])
        group = 1
    if options.softcap is None:
        bias, grouped = bias.to(dtype), group > 1
        found = F.scaled_dot_product_attention(
            query, key, value, bias, scale=scale, enable_gqa=grouped
        )
    else:
        key, value = (each.repeat_interleave(group, 1) for each in (key, value))
        scores = options.softcap * torch.tanh(scale * query @ key.mT / options.softcap)
        found = (scores + bias).softmax(-1).to(dtype) @ value
    return found.reshape(rows, heads, *queries.shape[1::2]).transpose(1, 2)
