"""Paged attention for one query per sequence, in Triton: the kernel that every decode step waits for.

It must read each key and value once, at the speed of memory, and do nothing else that takes time:

- The query heads of a KV head are the rows of one small matrix, so that K and V are read once per KV head and
  the products run on tensor cores. Of its 16 rows those past the last head are padding; where a KV head has
  more than 16 heads, programs side by side read it, all but the first from the cache.
- A context is cut into splits that run side by side and are put together by a second kernel (Dao et al.,
  "Flash-Decoding", 2023), so that few sequences fill the device and a long one does not outlast the others.
- How many splits follows from sizes the host knows; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

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

_NO_WINDOW = 2**31 - 1
_ROWS = 16  # of the query matrix: the least that tensor cores take
_MOST_SPLITS = 64
# Positions a split has at least: less, and writing its part of the result costs as much as reading it.
_GRAIN_SPLIT = 256
# What starting a program and putting its part together costs, in positions it could have read instead.
_OVERHEAD = 128
# Programs for each multiprocessor at most: those of short rows have nothing to do but still take a moment.
_MOST_PROGRAMS = 8


def decode(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    options: Options = Options(),  # noqa: B008 (frozen)
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    out: Tensor | None = None,
    splits: int | None = None,
    longest: int | None = None,
) -> Tensor:
    """Attention of one token per row over its sequence, whose last position it is.

    Args:
        queries: [rows, heads, head_dim].
        keys: [num_blocks, block_size, kv_heads, head_dim], one layer's cache, the row's own key included;
            float32, float16, bfloat16, or float8 (e4m3fn, e5m2) and int8 with scales.
        values: the same.
        tables: [rows, width] int32 block ids; those past ceil(length / block_size) are never read.
        lengths: [rows] int32 positions each row sees, itself included. 0 is an empty row: its output is zeros
            and nothing is read for it.
        scale: of the scores, before softmax.
        options: what else the model asks for.
        key_scales: [num_blocks, block_size, kv_heads] float32: a key is what is stored times this.
        value_scales: the same for values.
        out: [rows, heads, head_dim] to write to.
        splits: parts each context is cut into; None: chosen from the sizes.
        longest: the largest of `lengths` or more, if known: without it a choice of splits has to
            think of the whole width of the tables.

    Returns:
        [rows, heads, head_dim], in the queries' dtype.

    Raises:
        ValueError: shapes or types do not fit each other.
    """
    out = torch.empty_like(queries) if out is None else out
    if not len(queries):
        return out
    for call in _calls(
        queries,
        keys,
        values,
        tables,
        lengths,
        scale,
        options,
        (key_scales, value_scales),
        out,
        splits,
        longest,
        architecture(queries.device),
    ):
        call.run()
    return out


# What differs from step to step must not have Triton compile again in the middle of serving.
@triton.jit(
    do_not_specialize=[*VARIED, "group", "window", "grain"],
    do_not_specialize_on_alignment=["tables", "lengths"],
)
def _decode(
    queries: tl.tensor,  # [rows, heads, HEAD_DIM]
    keys: tl.tensor,  # [num_blocks, BLOCK_SIZE, kv_heads, HEAD_DIM]
    values: tl.tensor,
    key_scales: tl.tensor,  # [num_blocks, BLOCK_SIZE, kv_heads] float32 or None
    value_scales: tl.tensor,
    tables: tl.tensor,  # [rows, width] int32
    lengths: tl.tensor,  # [rows] int32
    sinks: tl.tensor,  # [heads] float32 or None
    slopes: tl.tensor,
    out: tl.tensor,  # [rows, heads, HEAD_DIM]
    parts: tl.tensor,  # [rows, heads, splits, head_dim] float32, each part's own result, if splits > 1
    weights: tl.tensor,  # [rows, heads, splits] float32, log2 of each part's softmax denominator
    scale: tl.tensor,
    softcap: tl.tensor,
    window: tl.tensor,
    grain: tl.tensor,  # positions per split are a multiple of this
    group: tl.tensor,  # query heads of a KV head
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
    EXPONENT: tl.constexpr,
    ROUND: tl.constexpr,
    DOT: tl.constexpr,
) -> None:
    # KV heads are the fastest axis: their programs read neighbouring bytes of the same blocks together.
    kv_head = tl.program_id(0) // tl.cdiv(group, ROWS)
    member = (tl.program_id(0) % tl.cdiv(group, ROWS)) * ROWS + tl.arange(0, ROWS)
    row = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    head = kv_head * group + member
    real = member < group

    length = tl.load(lengths + row)
    first, chunk = _share(length, window, grain, splits)
    begin = first + split * chunk
    end = tl.minimum(begin + chunk, length)
    if (splits > 1) & (begin >= end):
        return

    columns = tl.arange(0, PADDED)
    cell = real[:, None] & (columns < head_dim)[None, :]
    at = row * q_row + head[:, None] * q_head + columns[None, :]
    query, scale = as_operand(tl.load(queries + at, mask=cell, other=0.0), scale, DOT)
    slope = None
    if slopes is not None:
        slope = tl.load(slopes + head, mask=real, other=0.0) * LOG2E
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=real, other=0.0) * LOG2E
        peak = tl.where(split == 0, sink, peak)
        total = tl.where(split == 0, 1.0, total)
    acc = tl.zeros([ROWS, PADDED], tl.float32)
    own = tl.zeros([ROWS], tl.int32) + (length - 1)
    key_scales = key_scales + kv_head if key_scales is not None else None
    value_scales = value_scales + kv_head if value_scales is not None else None

    for start in range(begin, end, TILE):
        acc, peak, total = attend_tile(
            acc,
            peak,
            total,
            query,
            own,
            slope,
            keys + kv_head * k_head,
            values + kv_head * v_head,
            key_scales,
            value_scales,
            tables + row * table_row,
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
            start,
            end,
            BLOCK_SIZE,
            WHOLE,
            PADDED,
            TILE,
            True,
            False,
            EXPONENT,
            ROUND,
            DOT,
        )

    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    if splits > 1:
        heads = tl.num_programs(0) // tl.cdiv(group, ROWS) * group
        part = (row * heads + head) * splits + split
        tl.store(parts + part[:, None] * head_dim + columns[None, :], result, mask=cell)
        tl.store(weights + part, peak + tl.log2(total), mask=real)
    else:
        at = row * o_row + head[:, None] * o_head + columns[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=cell)


@triton.jit
def _share(
    length: tl.tensor, window: tl.tensor, grain: tl.tensor, splits: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """The first position a row sees, and how many of them each split takes."""
    first = tl.maximum(length - window, 0)
    chunk = tl.cdiv(tl.cdiv(length - first, splits), grain) * grain
    return first, chunk


@triton.jit(
    do_not_specialize=["window", "grain", "splits"],
    do_not_specialize_on_alignment=["lengths"],
)
def _join(
    parts: tl.tensor,  # [rows, heads, splits, head_dim] float32
    weights: tl.tensor,  # [rows, heads, splits] float32
    lengths: tl.tensor,  # [rows] int32
    out: tl.tensor,  # [rows, heads, head_dim]
    window: tl.tensor,
    grain: tl.tensor,
    splits: tl.tensor,
    head_dim: tl.tensor,
    o_row: tl.tensor,
    o_head: tl.tensor,
    PADDED: tl.constexpr,
    MOST: tl.constexpr,  # splits, up to a power of two
    STEP: tl.constexpr,  # parts read together
) -> None:
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + row)
    first, chunk = _share(length, window, grain, splits)
    base = (row * tl.num_programs(0) + head) * splits
    split = tl.arange(0, MOST)
    weight = tl.load(
        weights + base + split, mask=first + split * chunk < length, other=float("-inf")
    )
    peak = tl.max(weight, 0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp2(weight - shift), 0)
    columns = tl.arange(0, PADDED)
    inside = columns < head_dim
    acc = tl.zeros([PADDED], tl.float32)
    for begin in tl.range(0, tl.cdiv(length - first, tl.maximum(chunk, 1)), STEP, num_stages=3):
        each = begin + tl.arange(0, STEP)
        used = first + each * chunk < length
        share = tl.exp2(tl.load(weights + base + each, mask=used, other=float("-inf")) - shift)
        at = (base + each)[:, None] * head_dim + columns[None, :]
        part = tl.load(parts + at, mask=used[:, None] & inside[None, :], other=0.0)
        acc += tl.sum(part * share[:, None], 0)
    result = acc / tl.where(total > 0, total, 1.0)
    at = row * o_row + head * o_head + columns
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class _Meta:
    tile: int  # positions per iteration
    num_warps: int
    num_stages: int


def _meta(head_dim: int, stored_bytes: int, arch: str) -> _Meta:
    """Sizes of a program: tiles of 16 KB, two of K and two of V, so that one pair is always on the way.

    A multiprocessor needs about 25 KB on the way to keep its share of an H200's memory busy (bandwidth x
    latency). Stages are counted from the load of a block id to the last product: of the five, a tile's ids
    and the tile itself take two each, which leaves the pipeliner two buffers. The 70 KB let two programs
    share a multiprocessor of an A100 and three one of an H100; an MI300's compute unit has 64 KB. What is not
    16 bits wide takes half of it: registers hold no more of float32, nor of what bytes become in them.
    """
    padded = max(16, triton.next_power_of_2(head_dim))
    size = 16384 if stored_bytes == 2 else 8192
    tile = max(16, min(128, size // (padded * stored_bytes)))
    if arch.startswith("gfx"):
        return _Meta(min(tile, 64), 4, 3)
    return _Meta(tile, 4, 5)


def choose_splits(units: int, longest: int, slots: int) -> int:
    """Parts to cut contexts into: the most that cost at most a twentieth more time than the best number.

    More of them than needed even out rows of different lengths, which the host does not know.

    Args:
        units: programs without splitting, rows x KV heads.
        longest: positions of the longest row.
        slots: programs that keep the device's memory busy: one for each multiprocessor.
    """
    most = min(_MOST_SPLITS, -(-longest // _GRAIN_SPLIT), max(1, _MOST_PROGRAMS * slots // units))
    costs = [
        -(-units * splits // slots) * (-(-longest // splits) + _OVERHEAD)
        for splits in range(1, most + 1)
    ]
    limit = min(costs, default=0) * 1.05
    return max((index + 1 for index, cost in enumerate(costs) if cost <= limit), default=1)


@lru_cache
def _slots(device: torch.device) -> int:
    if device.type != "cuda":
        return 16
    return torch.cuda.get_device_properties(device).multi_processor_count


def _calls(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    options: Options,
    scales: tuple[Tensor | None, Tensor | None],
    out: Tensor,
    splits: int | None,
    longest: int | None,
    arch: str,
) -> Iterator[Call]:
    check_places(queries, out, tables, lengths=lengths)
    cache = Cache.of(queries, keys, values, scales, arch)
    arguments, constants = common(queries, cache, tables, scale, options, scales)
    rows, heads, head_dim = queries.shape
    kv_heads, block_size = keys.shape[2], keys.shape[1]
    group = heads // kv_heads
    meta = _meta(head_dim, keys.dtype.itemsize, arch)
    columns = kv_heads * -(-group // _ROWS)
    grain = meta.tile
    if splits is None:
        longest = tables.shape[1] * block_size if longest is None else longest
        if options.window is not None:
            longest = min(longest, options.window)
        splits = choose_splits(rows * columns, longest, _slots(queries.device))
        grain = _GRAIN_SPLIT
    # Without splits too: a tensor or none would be two kinds of kernel.
    whole = splits == 1
    parts = queries.new_empty(0 if whole else (rows, heads, splits, head_dim), dtype=torch.float32)
    weights = parts if whole else parts.new_empty((rows, heads, splits))
    shared: dict[str, Tensor | int | float | None] = {
        "lengths": lengths,
        "out": out,
        "parts": parts,
        "weights": weights,
        "window": _NO_WINDOW if options.window is None else options.window,
        "grain": grain,
        "head_dim": head_dim,
        "o_row": out.stride(0),
        "o_head": out.stride(1),
    }
    yield Call(
        _decode,
        (columns, rows, splits),
        arguments | shared | {"group": group},
        constants | {"ROWS": _ROWS, "TILE": meta.tile},
        meta.num_warps,
        meta.num_stages,
    )
    if splits > 1:
        yield Call(
            _join,
            (heads, rows),
            shared | {"splits": splits},
            {"PADDED": constants["PADDED"], "MOST": _MOST_SPLITS, "STEP": 16},
            num_warps=4,
            num_stages=1,
        )


def launches(arch: str = "sm_90") -> Iterator[Launch]:
    """Every kind of launch `decode` makes on `arch`, for `cases` of models."""
    for case in cases():
        queries = torch.empty(64, case.heads, case.head_dim, dtype=case.dtype, device="meta")
        cache, scales = case.cache(), case.scales()
        tables = torch.empty(64, 128, dtype=torch.int32, device="meta")
        lengths = torch.empty(64, dtype=torch.int32, device="meta")
        for call in _calls(
            queries,
            cache,
            cache,
            tables,
            lengths,
            case.head_dim**-0.5,
            case.options(),
            (scales, scales),
            queries,
            2,
            None,
            arch,
        ):
            yield call.describe(str(case))
