"""Paged flash attention for chunks of queries over cached context, in Triton: one launch for a mixed batch.

A program takes a few consecutive tokens of one sequence and all query heads that read one KV head: together
they are the rows of its query matrix, so that K and V are read once for all of them and short chunks of
grouped heads still fill it. It walks the keys a tile at a time with softmax online (Dao et al.,
"FlashAttention-2", 2023): first the tiles that all of its tokens see whole, without masks, then those on the
diagonal. Nothing but the sizes of the tensors is known on the host: programs find their sequence by
themselves, and there are at most as many too many as there are sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import Call, Launch, architecture
from kernels.options import Options
from kernels.tiles import (
    LOG2E,
    VARIED,
    Cache,
    as_operand,
    attend_tile,
    cases,
    check_places,
    common,
)


def prefill(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    *,
    scale: float,
    options: Options = Options(),  # noqa: B008 (frozen)
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of the last tokens of each row's sequence over all of it.

    Args:
        queries: [tokens, heads, head_dim], row after row.
        keys: [num_blocks, block_size, kv_heads, head_dim], one layer's cache, the rows' own keys included;
            float32, float16, bfloat16, or float8 (e4m3fn, e5m2) and int8 with scales.
        values: the same.
        tables: [rows, width] int32 block ids; those past ceil(length / block_size) are never read.
        starts: [rows + 1] int32: row r's queries are those from starts[r] to starts[r + 1], maybe none. They
            are the last of its `lengths[r]` positions. Tokens from starts[rows] on are not written.
        lengths: [rows] int32, positions of each row with its queries.
        longest: most queries of a row, or more: what a program's share is chosen by.
        scale: of the scores, before softmax.
        options: what else the model asks for.
        key_scales: [num_blocks, block_size, kv_heads] float32: a key is what is stored times this.
        value_scales: the same for values.
        out: [tokens, heads, head_dim] to write to.

    Returns:
        [tokens, heads, head_dim], in the queries' dtype.

    Raises:
        ValueError: shapes or types do not fit each other.
    """
    out = torch.empty_like(queries) if out is None else out
    if len(queries) and len(lengths):
        _call(
            queries,
            keys,
            values,
            tables,
            starts,
            lengths,
            longest,
            scale,
            options,
            (key_scales, value_scales),
            out,
            architecture(queries.device),
        ).run()
    return out


# What differs from step to step must not have Triton compile again in the middle of serving.
@triton.jit(
    do_not_specialize=[*VARIED, "rows", "group", "share", "window"],
    do_not_specialize_on_alignment=["tables", "starts", "lengths"],
)
def _prefill(
    queries: tl.tensor,  # [tokens, heads, HEAD_DIM]
    keys: tl.tensor,  # [num_blocks, BLOCK_SIZE, kv_heads, HEAD_DIM]
    values: tl.tensor,
    key_scales: tl.tensor,  # [num_blocks, BLOCK_SIZE, kv_heads] float32 or None
    value_scales: tl.tensor,
    tables: tl.tensor,  # [rows, width] int32
    starts: tl.tensor,  # [rows + 1] int32
    lengths: tl.tensor,  # [rows] int32
    sinks: tl.tensor,  # [heads] float32 or None
    slopes: tl.tensor,
    out: tl.tensor,  # [tokens, heads, HEAD_DIM]
    scale: tl.tensor,
    softcap: tl.tensor,  # or None
    window: tl.tensor,  # or None
    rows: tl.tensor,
    group: tl.tensor,  # query heads of a KV head
    share: tl.tensor,  # of these, a program's: all, or ROWS where there are more
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_block: tl.tensor,
    k_slot: tl.tensor,
    k_head: tl.tensor,
    v_block: tl.tensor,
    v_slot: tl.tensor,
    v_head: tl.tensor,
    ks_block: tl.tensor,
    ks_slot: tl.tensor,
    vs_block: tl.tensor,
    vs_slot: tl.tensor,
    table_row: tl.tensor,
    head_dim: tl.tensor,
    block_bits: tl.tensor,
    o_row: tl.tensor,
    o_head: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
    WHOLE: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,  # of the query matrix
    TILE: tl.constexpr,
    SEARCH: tl.constexpr,  # sequences looked at together
    EXPONENT: tl.constexpr,
    ROUND: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    # Longest first: a chunk's last tokens see the most, and the rest fills the gaps they leave.
    chunk = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1) // tl.cdiv(group, share)
    tokens = ROWS // share  # of a program
    row = _row(starts, rows, chunk, tokens, SEARCH)
    start = tl.load(starts + row)
    count = tl.load(starts + row + 1) - start
    skipped = (chunk - start // tokens - row) * tokens  # tokens of the row before this program's
    if skipped >= count:
        return
    length = tl.load(lengths + row)
    before = length - count + skipped  # positions before this program's first token

    each = tl.arange(0, ROWS)
    token = skipped + each // share
    member = tl.program_id(1) % tl.cdiv(group, share) * share + each % share
    head = kv_head * group + member
    own = length - count + token
    real = (each < tokens * share) & (token < count) & (member < group)
    columns = tl.arange(0, PADDED)
    cell = real[:, None] & (columns < head_dim)[None, :]
    place = (start + token).to(tl.int64)
    at = place[:, None] * q_row + head[:, None] * q_head + columns[None, :]
    query, scale = as_operand(tl.load(queries + at, mask=cell, other=0.0), scale, DOT)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + head, mask=real, other=0.0) * LOG2E
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        peak = tl.load(sinks + head, mask=real, other=0.0) * LOG2E
        total += 1.0
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    keys += kv_head * k_head
    values += kv_head * v_head
    key_scales = key_scales + kv_head if key_scales is not None else None
    value_scales = value_scales + kv_head if value_scales is not None else None
    table = tables + row.to(tl.int64) * table_row

    # Positions in three parts: what the window hides from some tokens, what all see, the diagonal.
    end = tl.minimum(before + tokens, length)
    begin = before * 0
    inner = begin
    if window is not None:
        begin = tl.maximum(before + 1 - window, 0)
        inner = begin + tl.cdiv(tl.maximum(before + tokens - window, 0) - begin, TILE) * TILE
    diagonal = inner + tl.maximum(before + 1 - inner, 0) // TILE * TILE
    for part in tl.static_range(3):
        if part != 0 or window is not None:
            low = begin if part == 0 else (inner if part == 1 else diagonal)
            high = tl.minimum(inner, end) if part == 0 else (diagonal if part == 1 else end)
            for first in range(low, high, TILE):
                acc, peak, total = attend_tile(
                    acc,
                    peak,
                    total,
                    query,
                    own,
                    slope,
                    keys,
                    values,
                    key_scales,
                    value_scales,
                    table,
                    scale,
                    softcap,
                    window,
                    k_block,
                    k_slot,
                    v_block,
                    v_slot,
                    ks_block,
                    ks_slot,
                    vs_block,
                    vs_slot,
                    head_dim,
                    block_bits,
                    first,
                    end,
                    BLOCK_SIZE,
                    WHOLE,
                    PADDED,
                    TILE,
                    part != 1,
                    part != 1,
                    EXPONENT,
                    ROUND,
                    DOT,
                )

    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    at = place[:, None] * o_row + head[:, None] * o_head + columns[None, :]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=cell)


@triton.jit
def _row(
    starts: tl.tensor,
    rows: tl.tensor,
    chunk: tl.tensor,
    tokens: tl.tensor,
    SEARCH: tl.constexpr,
) -> tl.tensor:
    """The row of a program: row r owns those from starts[r] // tokens + r on, which is enough for each."""
    row = chunk * 0 - 1
    for first in range(0, rows, SEARCH):
        each = first + tl.arange(0, SEARCH)
        start = tl.load(starts + each, mask=each < rows, other=0)
        row += tl.sum(((each < rows) & (start // tokens + each <= chunk)).to(tl.int32), 0)
    return row


_SHORT = 32  # rows of the query matrix for chunks that need no more: 8 tokens of 4 grouped heads


@dataclass(frozen=True, slots=True)
class _Meta:
    rows: int  # of the query matrix
    tile: int  # keys per iteration
    num_warps: int
    num_stages: int


def _kinds(head_dim: int, element_bytes: int, stored_bytes: int, arch: str) -> tuple[_Meta, ...]:
    """Sizes of a program, by what its registers and shared memory hold: for short chunks, then for others.

    128 rows let K and V cross from the L2 cache slowly enough for tensor cores to run at their rate: 64 rows
    would ask twice the bandwidth of it. Eight warps share sums that would not fit into the registers of four.
    Tiles are 16 KB of K and of V; five stages keep the next pair on the way (see `kernels.decode`). Short
    chunks get fewer rows, so that they do not multiply zeros. float32 has no tensor cores to feed. Where
    bytes become numbers on the way, registers of some hold half a tile.
    """
    wide = max(16, triton.next_power_of_2(head_dim)) * element_bytes
    amd, ampere = arch.startswith("gfx"), arch.startswith("sm_8")
    stages = 2 if amd else 5
    if element_bytes == 4:
        return (_Meta(_SHORT, 16, 4 if amd else 8, stages),)
    most, tile = 128, min(128, 16384 // wide)
    if wide > 256 and (amd or ampere):
        most = 64
    if ampere and wide >= 256:
        tile //= 2
    if arch.startswith("sm_10"):
        tile = min(tile, 64)  # scores of 128 x 128 leave no registers there
    small = tile // 2 if stored_bytes == 1 else tile
    return (
        _Meta(_SHORT, tile if ampere else small, 4, stages),
        _Meta(most, small if amd or ampere else tile, 4 if amd else 8, stages),
    )


def _call(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    starts: Tensor,
    lengths: Tensor,
    longest: int,
    scale: float,
    options: Options,
    scales: tuple[Tensor | None, Tensor | None],
    out: Tensor,
    arch: str,
) -> Call:
    check_places(queries, out, tables, starts=starts, lengths=lengths)
    cache = Cache.of(queries, keys, values, scales, arch)
    arguments, constants = common(queries, cache, tables, scale, options, scales)
    tokens, heads, head_dim = queries.shape
    rows, kv_heads = len(lengths), keys.shape[2]
    group = heads // kv_heads
    *shorter, meta = _kinds(head_dim, cache.dtype.itemsize, keys.dtype.itemsize, arch)
    for kind in shorter:
        if longest * group <= kind.rows:
            meta = kind
    share = min(group, meta.rows)
    return Call(
        _prefill,
        (tokens // (meta.rows // share) + rows, kv_heads * -(-group // share)),
        arguments
        | {
            "starts": starts,
            "lengths": lengths,
            "out": out,
            "rows": rows,
            "group": group,
            "share": share,
            "o_row": out.stride(0),
            "o_head": out.stride(1),
        },
        constants | {"ROWS": meta.rows, "TILE": meta.tile, "SEARCH": 256},
        meta.num_warps,
        meta.num_stages,
    )


def launches(arch: str = "sm_90") -> Iterator[Launch]:
    """Every kind of launch `prefill` makes on `arch`, for `cases` of models."""
    for case in cases():
        cache, scales = case.cache(), case.scales()
        for tokens, note in ((2048, "prompts"), (2, "short chunks")):
            queries = torch.empty(
                tokens, case.heads, case.head_dim, dtype=case.dtype, device="meta"
            )
            tables = torch.empty(2, 128, dtype=torch.int32, device="meta")
            yield _call(
                queries,
                cache,
                cache,
                tables,
                tables[0],
                tables[0, :2],
                tokens,
                case.head_dim**-0.5,
                case.options(),
                (scales, scales),
                queries,
                arch,
            ).describe(f"{case}, {note}")
