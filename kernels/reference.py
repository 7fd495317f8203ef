"""Paged attention, KV writes and block copies in plain torch: obvious, portable, the oracle for the rest.

K and V of one layer are tensors [num_blocks, block_size, kv_heads, head_dim]; a *slot* is the place of one
token, numbered `block * block_size + offset`. Attention reads a sequence's keys through its block table and
never lets an unwritten slot through: such a slot may hold NaN, and 0 * NaN is NaN, so it is not enough to
give it weight zero. (Kwon et al., "Efficient Memory Management for Large Language Model Serving with
PagedAttention", SOSP 2023.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_NEVER = float("-inf")
# Slots gathered by one call: bounds the scratch memory of a batch of long sequences.
_MOST_SLOTS = 1 << 17


def rotate(
    heads: Tensor,  # [tokens, heads, head_dim], changed in place
    cos: Tensor,  # [tokens, 1, head_dim]
    sin: Tensor,  # [tokens, 1, head_dim], its first half negated
) -> None:
    """Turn each pair (i, i + head_dim / 2) by its token's angle."""
    swapped = torch.roll(heads, heads.shape[-1] // 2, dims=-1)
    heads.mul_(cos).addcmul_(swapped, sin)


def write_kv(
    key_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    value_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    keys: Tensor,  # [tokens, kv_heads, head_dim]
    values: Tensor,  # [tokens, kv_heads, head_dim]
    slots: Tensor,  # [tokens] int64, no slot twice
) -> None:
    """Store the K and V of each token in its slot."""
    key_cache.flatten(0, 1).index_copy_(0, slots, keys)
    value_cache.flatten(0, 1).index_copy_(0, slots, values)


def copy_blocks(cache: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy whole blocks. No target is a source, and no block is a target twice.

    Args:
        cache: [layers, num_blocks, block_size, kv_heads, head_dim].
        sources: [copies] int64 block ids.
        targets: [copies] int64 block ids.
    """
    cache.index_copy_(1, targets, cache.index_select(1, sources))


@dataclass(slots=True, frozen=True)
class Chunk:
    """Several consecutive tokens of one sequence."""

    first: int  # index of its first token in the flat batch
    count: int
    table: Tensor  # [blocks] int64, the blocks that hold positions 0 .. length - 1
    length: int  # positions it may see: those before the chunk and the chunk


@dataclass(slots=True, frozen=True)
class Decodes:
    """Sequences with one token each and tables of the same padded width."""

    tokens: Tensor  # [batch] int64, indices in the flat batch
    tables: Tensor  # [batch * width] int64, row after row; a short table repeats its first block
    width: int  # blocks per sequence
    lengths: Tensor  # [batch] int64, positions each may see
    unwritten: (
        Tensor  # [any] int64, places of the gathered [batch * width * block_size] past lengths
    )


@dataclass(slots=True)
class Layout:
    """Which tokens of a flat batch belong together, and where their keys are. Made once per step.

    A single token takes the path of `Decodes` whatever else is in the batch, and its table is padded to a
    width that depends on its own length alone, so its numbers do not depend on its company.
    """

    block_size: int
    chunks: list[Chunk]
    decodes: list[Decodes]
    dtype: torch.dtype
    _masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        starts: Sequence[int],
        counts: Sequence[int],
        tables: Sequence[np.ndarray],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Layout:
        """Lay out sequences whose tokens follow each other in the flat batch.

        Args:
            starts: position of each sequence's first token.
            counts: tokens of each sequence, at least 1.
            tables: block ids of each sequence, at least ceil((start + count) / block_size) of them.
            dtype: of queries, keys and values.
        """
        chunks: list[Chunk] = []
        by_width: dict[int, list[tuple[int, int, np.ndarray]]] = {}
        first = 0
        for start, count, table in zip(starts, counts, tables, strict=True):
            length = start + count
            used = table[: -(-length // block_size)]
            if count == 1:
                by_width.setdefault(_padded(len(used)), []).append((first, length, used))
            else:
                chunks.append(Chunk(first, count, torch.from_numpy(used).to(device), length))
            first += count
        decodes = [
            _decodes(part, width, block_size, device)
            for width, rows in by_width.items()
            for part in _parts(rows, max(1, _MOST_SLOTS // (width * block_size)))
        ]
        return cls(block_size, chunks, decodes, dtype)

    def chunk_mask(self, index: int, window: int | None) -> Tensor:
        """[count, length]: 0 where a token of chunk `index` sees a position, -inf elsewhere."""
        if (index, window) not in self._masks:
            chunk = self.chunks[index]
            device = chunk.table.device
            seen = torch.arange(chunk.length, device=device)[None, :]
            own = torch.arange(chunk.length - chunk.count, chunk.length, device=device)[:, None]
            hidden = seen > own
            if window is not None:
                hidden |= seen <= own - window
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=device)
            self._masks[index, window] = mask.masked_fill_(hidden, _NEVER)
        return self._masks[index, window]

    def decode_mask(self, index: int, window: int | None) -> Tensor:
        """[batch, 1, 1, width * block_size]: 0 where a sequence's token sees a position, else -inf."""
        key = (-1 - index, window)
        if key not in self._masks:
            rows = self.decodes[index]
            seen = torch.arange(rows.width * self.block_size, device=rows.lengths.device)[None, :]
            lengths = rows.lengths[:, None]
            hidden = seen >= lengths
            if window is not None:
                hidden |= seen < lengths - window
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=hidden.device)
            self._masks[key] = mask.masked_fill_(hidden, _NEVER)[:, None, None, :]
        return self._masks[key]


def paged_attention(
    queries: Tensor,  # [tokens, heads, head_dim]
    key_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim], the batch's own keys included
    value_cache: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    layout: Layout,
    window: int | None,  # positions a token sees, itself included; None: all before it
    scale: float,  # of the scores, before softmax
) -> Tensor:  # [tokens, heads, head_dim]
    """Causal attention of every token of a flat batch over its sequence's keys and values.

    Query heads are grouped: head h reads KV head h // (heads / kv_heads).
    """
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    for index, chunk in enumerate(layout.chunks):
        here = slice(chunk.first, chunk.first + chunk.count)
        keys = key_cache.index_select(0, chunk.table).flatten(0, 1)[: chunk.length]
        values = value_cache.index_select(0, chunk.table).flatten(0, 1)[: chunk.length]
        mask = layout.chunk_mask(index, window)
        out[here] = _attend(queries[here], keys, values, mask, scale)
    for index, rows in enumerate(layout.decodes):
        out[rows.tokens] = _attend_one_each(
            queries[rows.tokens],
            _gather(key_cache, rows),
            _gather(value_cache, rows),
            layout.decode_mask(index, window),
            scale,
        )
    return out


def _attend(
    queries: Tensor,  # [count, heads, head_dim]
    keys: Tensor,  # [length, kv_heads, head_dim]
    values: Tensor,  # [length, kv_heads, head_dim]
    mask: Tensor,  # [count, length]
    scale: float,
) -> Tensor:  # [count, heads, head_dim]
    grouped = F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        scale=scale,
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    return grouped[0].transpose(0, 1)


def _attend_one_each(
    queries: Tensor,  # [batch, heads, head_dim]
    keys: Tensor,  # [batch, slots, kv_heads, head_dim]
    values: Tensor,  # [batch, slots, kv_heads, head_dim]
    mask: Tensor,  # [batch, 1, 1, slots]
    scale: float,
) -> Tensor:  # [batch, heads, head_dim]
    batch, heads, head_dim = queries.shape
    kv_heads = keys.shape[2]
    # The heads of a group see the same positions, so they can stand as rows of one query matrix.
    rows = queries.view(batch, kv_heads, heads // kv_heads, head_dim)
    attended = F.scaled_dot_product_attention(
        rows, keys.transpose(1, 2), values.transpose(1, 2), attn_mask=mask, scale=scale
    )
    return attended.reshape(batch, heads, head_dim)


def _gather(cache: Tensor, rows: Decodes) -> Tensor:
    """[batch, width * block_size, kv_heads, head_dim] with zeros in place of unwritten slots."""
    slots = cache.index_select(0, rows.tables).flatten(0, 1)
    slots.index_fill_(0, rows.unwritten, 0)
    return slots.view(len(rows.tokens), -1, *cache.shape[2:])


def _padded(blocks: int) -> int:
    """The width a table of `blocks` is padded to: few different ones, at most a quarter wasted."""
    step = max(1, 1 << max(0, blocks.bit_length() - 3))
    return -(-blocks // step) * step


def _parts(
    rows: list[tuple[int, int, np.ndarray]], most: int
) -> list[list[tuple[int, int, np.ndarray]]]:
    return [rows[i : i + most] for i in range(0, len(rows), most)]


def _decodes(
    rows: list[tuple[int, int, np.ndarray]], width: int, block_size: int, device: torch.device
) -> Decodes:
    tables = np.empty((len(rows), width), np.int64)
    lengths = np.array([length for _, length, _ in rows], np.int64)
    for row, (_, _, table) in enumerate(rows):
        tables[row, : len(table)] = table
        tables[row, len(table) :] = table[0]
    unwritten = np.flatnonzero(np.arange(width * block_size)[None, :] >= lengths[:, None])
    return Decodes(
        tokens=torch.tensor([first for first, _, _ in rows], device=device),
        tables=torch.from_numpy(tables.ravel()).to(device),
        width=width,
        lengths=torch.from_numpy(lengths).to(device),
        unwritten=torch.from_numpy(unwritten).to(device),
    )
