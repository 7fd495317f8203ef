"""What the attention kernels share: one tile of keys and values, read through a block table and folded in.

A tile is TILE consecutive positions of one sequence for one KV head, whatever the block size: each position
finds its own block, so tiles stay large where blocks are small. The running state of a query row is (peak,
total, acc): the largest score so far, the sum of 2^(score - peak), and that sum with values as weights
(Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention",
NeurIPS 2022). Scores are in units of log2, so that softmax needs exp2 alone.

Offsets into a cache are int64: a block id times a block's elements passes 2^31 in any large pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import fp8
from kernels.launch import INTERPRETER, short
from kernels.options import Options

LOG2E = tl.constexpr(1.4426950408889634)

VARIED = ("ks_block", "ks_slot", "vs_block", "vs_slot", "table_row", "block_bits")
"""Parameters of every attention kernel of which no value (1, or a multiple of 16) may make another kind."""


@triton.jit
def as_operand(
    query: tl.tensor,  # [ROWS, PADDED], as it is stored
    scale: tl.tensor,
    DOT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """A query in DOT, and the scale of its scores: [ROWS, 1] where each row needs its own."""
    if query.dtype == tl.bfloat16 and tl.float16 == DOT:
        # bfloat16 reaches from 1e-38 to 1e38, float16 to 65504: each row's largest number is brought to 2^14
        # or more, by a power of two, which changes no digit. Of zeros and of infinity, any power does.
        query = query.to(tl.float32)
        largest = tl.max(tl.abs(query), 1, keep_dims=True)
        exponent = tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 27), 254)
        power = (exponent << 23).to(tl.float32, bitcast=True)
        query *= 16384.0 / power
        scale *= power * (1.0 / 16384.0)
    return query.to(DOT), scale


@triton.jit
def attend_tile(
    acc: tl.tensor,  # [ROWS, PADDED] float32
    peak: tl.tensor,  # [ROWS] float32
    total: tl.tensor,  # [ROWS] float32
    query: tl.tensor,  # [ROWS, PADDED] DOT
    own: tl.tensor,  # [ROWS] int32, the position of each query
    slope: tl.tensor,  # [ROWS] float32 or None
    keys: tl.tensor,  # pointer to this KV head of the first slot
    values: tl.tensor,
    key_scales: tl.tensor,  # the same, or None
    value_scales: tl.tensor,
    table: tl.tensor,  # pointer to this row's table
    scale: tl.tensor,  # or [ROWS, 1]: see `as_operand`
    softcap: tl.tensor,  # or None
    window: tl.tensor,  # or None
    k_block: tl.tensor,  # strides, in elements
    k_slot: tl.tensor,
    v_block: tl.tensor,
    v_slot: tl.tensor,
    ks_block: tl.tensor,
    ks_slot: tl.tensor,
    vs_block: tl.tensor,
    vs_slot: tl.tensor,
    head_dim: tl.tensor,
    block_bits: tl.tensor,  # log2 of the block size, where that is a power of two
    start: tl.tensor,  # the tile's first position
    end: tl.tensor,  # no position from here on is read
    BLOCK_SIZE: tl.constexpr,  # 0: a power of two
    WHOLE: tl.constexpr,  # head_dim is PADDED
    PADDED: tl.constexpr,  # head_dim up to a power of two
    TILE: tl.constexpr,
    TAIL: tl.constexpr,  # the tile may pass `end`
    CAUSAL: tl.constexpr,  # the tile may hold positions some query does not see
    EXPONENT: tl.constexpr,  # bits of it in float8 that is read as bits; 0: the type is known
    ROUND: tl.constexpr,  # what probabilities are rounded to
    DOT: tl.constexpr,  # what is multiplied
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    positions = start + tl.arange(0, TILE)
    inside = positions < end
    if BLOCK_SIZE == 0:
        index = positions >> block_bits
        slot = positions - (index << block_bits)
    else:
        index = positions // BLOCK_SIZE
        slot = positions % BLOCK_SIZE
    if TAIL:
        block = tl.load(table + index, mask=inside, other=0).to(tl.int64)
    else:
        block = tl.load(table + index).to(tl.int64)
    if value_scales is not None:
        # In units of the tile's largest: in 16 bits scales of small values vanish and large ones overflow.
        # Found here, where few registers are in use: the threads have to wait for each other.
        scales = tl.load(value_scales + block * vs_block + slot * vs_slot, mask=inside, other=0.0)
        largest = tl.max(scales, 0)
        unit = tl.where(largest > 0, largest, 1.0)

    key = _read(
        keys, block * k_block + slot * k_slot, inside, head_dim, WHOLE, PADDED, TAIL, EXPONENT, DOT
    )
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if key_scales is not None:
        at = block * ks_block + slot * ks_slot
        scores *= tl.load(key_scales + at, mask=inside, other=0.0)[None, :]
    factor = scale  # of scores, in the exponent below: there it takes no instruction of its own
    if key_scales is not None or softcap is not None or slope is not None:
        scores *= scale
        factor = 1.0
    if softcap is not None:
        scores = softcap * _tanh(scores)
    if slope is not None:
        scores += slope[:, None] * (positions[None, :] - own[:, None]).to(tl.float32)
    if CAUSAL:
        seen = inside[None, :] & (positions[None, :] <= own[:, None])
        if window is not None:
            seen = seen & (positions[None, :] > own[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    elif TAIL:
        scores = tl.where(inside[None, :], scores, float("-inf"))

    highest = tl.maximum(peak, tl.max(scores, 1) * factor)
    # A row that has seen nothing yet keeps its peak at -inf, and -inf - -inf is NaN.
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores * factor - shift[:, None])
    fade = tl.exp2(peak - shift)
    total = total * fade + tl.sum(weights, 1)
    acc = acc * fade[:, None]

    # Where a slot is unwritten it is not loaded: it may hold NaN, and 0 * NaN is NaN.
    value = _read(
        values,
        block * v_block + slot * v_slot,
        inside,
        head_dim,
        WHOLE,
        PADDED,
        TAIL,
        EXPONENT,
        DOT,
    )
    if value_scales is not None:
        weights *= (scales / unit)[None, :]
        acc += unit * tl.dot(weights.to(ROUND).to(DOT), value, input_precision="ieee")
    else:
        acc = tl.dot(weights.to(ROUND).to(DOT), value, acc, input_precision="ieee")
    return acc, highest, total


@triton.jit
def _read(
    cache: tl.tensor,
    offsets: tl.tensor,  # [TILE] int64
    inside: tl.tensor,  # [TILE] bool, what may be read
    head_dim: tl.tensor,
    WHOLE: tl.constexpr,
    PADDED: tl.constexpr,
    TAIL: tl.constexpr,
    EXPONENT: tl.constexpr,
    DOT: tl.constexpr,
) -> tl.tensor:
    columns = tl.arange(0, PADDED)
    pointers = cache + offsets[:, None] + columns[None, :]
    if not WHOLE:
        within = (columns < head_dim)[None, :]
        if TAIL:
            within = within & inside[:, None]
        stored = tl.load(pointers, mask=within, other=0.0)
    elif TAIL:
        stored = tl.load(pointers, mask=inside[:, None], other=0.0)
    else:
        stored = tl.load(pointers)
    if EXPONENT == 4:
        return fp8.decode(stored).to(DOT)
    if EXPONENT == 5:  # the upper byte of a float16
        return (stored.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(DOT)
    if stored.dtype == tl.int8 and tl.float16 == DOT:
        # A number's low bits in the mantissa of 1024.0 are an addition; the unit that converts is too slow.
        shifted = (stored.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        return shifted.to(tl.float16, bitcast=True) - 1152.0
    return stored.to(DOT)


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    small = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))  # e^(-2|x|): cannot overflow
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


@dataclass(frozen=True, slots=True)
class Cache:
    """One layer's K and V as a kernel wants them, with what follows from their types.

    Raises `ValueError` where a kernel would read nonsense.
    """

    keys: Tensor
    values: Tensor
    exponent: int  # bits of it in float8 that is read as bits; 0: the type is known
    dtype: torch.dtype  # of what is multiplied
    rounded: torch.dtype  # what probabilities are rounded to before

    @classmethod
    def of(
        cls,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        scales: tuple[Tensor | None, Tensor | None],
        arch: str,
    ) -> Cache:
        if keys.shape != values.shape or keys.dtype != values.dtype:
            raise ValueError(
                f"keys are {tuple(keys.shape)} {keys.dtype}, values {tuple(values.shape)} {values.dtype}: "
                "both must be the same"
            )
        heads, head_dim = queries.shape[-2:]
        kv_heads = keys.shape[2]
        if heads % kv_heads or keys.shape[3] != head_dim:
            raise ValueError(
                f"{heads} heads of {head_dim} cannot read {kv_heads} KV heads of {keys.shape[3]}: "
                "heads must be a multiple of KV heads, and of the same size"
            )
        for name, given in zip(("key_scales", "value_scales"), scales, strict=True):
            _check_scales(name, given, keys)
        if queries.stride(-1) != 1 or keys.stride(-1) != 1 or values.stride(-1) != 1:
            raise ValueError(
                "the elements of a head must lie side by side in queries, keys and values"
            )
        exponent = 0
        if keys.dtype == torch.float8_e5m2:
            exponent = 5
        elif keys.dtype == torch.float8_e4m3fn and not arch.startswith(_WITH_E4M3):
            exponent = 4
        if exponent:
            keys, values = keys.view(torch.uint8), values.view(torch.uint8)
        dtype = rounded = queries.dtype
        if keys.dtype.itemsize == 1 and dtype == torch.bfloat16:
            # One byte becomes float16 at once, but bfloat16 by way of it at a sixteenth of the rate, which
            # would take longer than reading it. All of its values are exact in both.
            dtype = rounded = torch.float16
        elif dtype == torch.bfloat16 and arch == INTERPRETER:
            dtype = (
                torch.float32
            )  # it multiplies bfloat16 as integers, so there that is widened first
        return cls(keys, values, exponent, dtype, rounded)


def _check_scales(name: str, scales: Tensor | None, cache: Tensor) -> None:
    needed = cache.dtype.itemsize == 1
    if needed != (scales is not None):
        raise ValueError(
            f"a cache of {cache.dtype} {'needs' if needed else 'takes no'} key_scales and value_scales, "
            f"but {name} {'is None' if scales is None else f'is {list(scales.shape)}'}"
        )
    if scales is None:
        return
    if (scales.dtype, scales.device) != (torch.float32, cache.device):
        raise ValueError(
            f"{name} is {scales.dtype} on {scales.device}: it must be torch.float32 on {cache.device}, "
            "where the cache is"
        )
    if scales.shape != cache.shape[:3]:
        raise ValueError(
            f"{name} is {list(scales.shape)}: it must be {list(cache.shape[:3])}, a number for each head "
            "of each slot of the cache"
        )
    if scales.shape[2] > 1 and scales.stride(2) != 1:
        raise ValueError(
            f"{name} has strides {scales.stride()}: the KV heads of a slot must lie side by side, "
            "with a last stride of 1"
        )


def check_places(queries: Tensor, out: Tensor, tables: Tensor, **vectors: Tensor) -> None:
    """Raise ValueError unless tables, lengths and results lie as the kernels step through them."""
    if out.shape != queries.shape or out.stride(-1) != 1:
        raise ValueError(
            f"out is {list(out.shape)} with strides {out.stride()}: it must be {list(queries.shape)} as the "
            "queries are, the elements of a head side by side"
        )
    if tables.shape[1] > 1 and tables.stride(1) != 1:
        raise ValueError(
            f"tables have strides {tables.stride()}: a row's ids must lie side by side"
        )
    for name, vector in vectors.items():
        if len(vector) > 1 and vector.stride(0) != 1:
            raise ValueError(
                f"{name} have a stride of {vector.stride(0)}: they must lie side by side"
            )


# Devices with an instruction for it. Others take fewer for bits than Triton does for the type.
_WITH_E4M3 = ("sm_89", "sm_9", "sm_1")

TRITON_DTYPE = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def common(
    queries: Tensor,
    cache: Cache,
    tables: Tensor,
    scale: float,
    options: Options,
    scales: tuple[Tensor | None, Tensor | None],
) -> tuple[dict[str, Tensor | int | float | None], dict[str, object]]:
    """Arguments and constants every attention kernel takes."""
    if scale <= 0 or (options.softcap is not None and options.softcap <= 0):
        raise ValueError(
            f"scale is {scale} and softcap {options.softcap}: both must be above 0 (no cap: None)"
        )
    key_scales, value_scales = scales
    softcap = options.softcap
    head_dim, block_size = queries.shape[-1], cache.keys.shape[1]
    padded = max(16, triton.next_power_of_2(head_dim))
    even = block_size & (block_size - 1) == 0
    arguments: dict[str, Tensor | int | float | None] = {
        "queries": queries,
        "keys": cache.keys,
        "values": cache.values,
        "key_scales": key_scales,
        "value_scales": value_scales,
        "tables": tables,
        "sinks": options.sinks,
        "slopes": options.slopes,
        # Scores in log2: folded into the scale, or into the cap where there is one.
        "scale": scale * LOG2E.value if softcap is None else scale / softcap,
        "softcap": None if softcap is None else softcap * LOG2E.value,
        "window": options.window,
        "q_row": queries.stride(0),
        "q_head": queries.stride(1),
        "k_block": cache.keys.stride(0),
        "k_slot": cache.keys.stride(1),
        "k_head": cache.keys.stride(2),
        "v_block": cache.values.stride(0),
        "v_slot": cache.values.stride(1),
        "v_head": cache.values.stride(2),
        "ks_block": 0 if key_scales is None else key_scales.stride(0),
        "ks_slot": 0 if key_scales is None else key_scales.stride(1),
        "vs_block": 0 if value_scales is None else value_scales.stride(0),
        "vs_slot": 0 if value_scales is None else value_scales.stride(1),
        "table_row": tables.stride(0),
        "head_dim": head_dim,
        "block_bits": block_size.bit_length() - 1,
    }
    constants: dict[str, object] = {
        # Few kinds to compile: all block sizes that are powers of two are one, and heads by what they fill.
        "BLOCK_SIZE": 0 if even else block_size,
        "WHOLE": head_dim == padded,
        "PADDED": padded,
        "EXPONENT": cache.exponent,
        "ROUND": TRITON_DTYPE[cache.rounded],
        "DOT": TRITON_DTYPE[cache.dtype],
    }
    return arguments, constants


@dataclass(frozen=True, slots=True)
class Case:
    """A model's attention, as far as a kernel is compiled for it."""

    note: str
    dtype: torch.dtype  # of queries
    stored: torch.dtype  # of the cache
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    slopes: bool = False

    def __str__(self) -> str:
        asked = [f"window {self.window}"] if self.window is not None else []
        asked += [f"cap {self.softcap:g}"] if self.softcap is not None else []
        asked += ["sinks"] * self.sinks + ["ALiBi"] * self.slopes
        stored = "" if self.stored == self.dtype else f" over {short(self.stored)}"
        sizes = (
            f"{self.heads}/{self.kv_heads} heads of {self.head_dim}, blocks of {self.block_size}"
        )
        return ", ".join([self.note, f"{short(self.dtype)}{stored}", sizes, *asked])

    def options(self) -> Options:
        logits = torch.empty(self.heads, dtype=torch.float32, device="meta")
        return Options(
            window=self.window,
            softcap=self.softcap,
            sinks=logits if self.sinks else None,
            slopes=logits if self.slopes else None,
        )

    def cache(self) -> Tensor:
        shape = (1024, self.block_size, self.kv_heads, self.head_dim)
        return torch.empty(shape, dtype=self.stored, device="meta")

    def scales(self) -> Tensor | None:
        if self.stored.itemsize > 1:
            return None
        return torch.empty(1024, self.block_size, self.kv_heads, device="meta")


def cases() -> Iterator[Case]:
    """What models ask for, in real sizes.

    First all that a runner launches: types and sizes of heads, with a sliding window and without. Heads and
    their groups, and blocks of a power of two, make no further kinds. Then each other type and option once.
    """
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    for dtype in (bf16, fp32):
        for window in (None, 4096):
            yield Case("SmolLM2 135M", dtype, dtype, 9, 3, 64, window=window)
            yield Case("Danube 1.8B", dtype, dtype, 32, 8, 80, window=window)
            yield Case("Llama 3 8B", dtype, dtype, 32, 8, 128, window=window)
            yield Case("Gemma 2 9B", dtype, dtype, 16, 8, 256, window=window)
    yield Case("Llama 3 8B", fp16, fp16, 32, 8, 128)
    for stored in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8):
        yield Case("Llama 3 8B", bf16, stored, 32, 8, 128)
    yield Case("Gemma 2 9B", bf16, bf16, 16, 8, 256, window=4096, softcap=50.0)
    yield Case("gpt-oss 20B", bf16, bf16, 64, 8, 64, window=128, sinks=True)
    yield Case("Bloom 7B", fp16, fp16, 32, 32, 128, slopes=True)
    yield Case(
        "all options",
        fp16,
        torch.float8_e4m3fn,
        *(32, 8, 96),
        window=512,
        softcap=30.0,
        sinks=True,
        slopes=True,
    )
