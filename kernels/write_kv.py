"""Store the keys and values of a step's tokens in their blocks, turned by rotary embedding on the way.

One launch does what a model would do in four: rotate queries, rotate keys, scale to the cache's type,
scatter. Rotation is that of Su et al., "RoFormer" (2021), in the halves convention of Llama: the pair
(i, i + head_dim / 2) turns by its token's angle. The cache is that of Kwon et al., "PagedAttention" (SOSP
2023).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import fp8
from kernels.launch import Launch

LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
"""The largest number each quantised type holds: a head is scaled so that its largest value becomes this."""

_SMALLEST = tl.constexpr(1e-30)  # of a scale: a head of zeros is still divided by something


@triton.jit
def _store(
    low: tl.tensor,  # [HALF] float32
    high: tl.tensor,  # [HALF] float32
    inside: tl.tensor,  # [HALF] bool
    at: tl.tensor,  # [HALF] places of the lower half in the cache
    scale_at: tl.tensor,  # place of the scale
    HALF_DIM: tl.constexpr,
    LARGEST_VALUE: tl.constexpr,
    FP8: tl.constexpr,
) -> None:
    """Write one head of one token, scaled where the cache is quantised."""
    if LARGEST_VALUE > 0:
        size = tl.maximum(tl.max(tl.abs(low)), tl.max(tl.abs(high)))
        # Maxima pass over NaN. A head with one, or with infinity, gets NaN as scale and so stays visible.
        scale = tl.maximum(size / LARGEST_VALUE, _SMALLEST) + tl.sum(low * 0 + high * 0)
        tl.store(scale_at, scale)
        low, high = low / scale, high / scale
        if FP8:
            low, high = fp8.encode(low), fp8.encode(high)
        else:
            low, high = tl.floor(low + 0.5), tl.floor(high + 0.5)
    tl.store(at, low.to(at.dtype.element_ty), mask=inside)
    tl.store(at + HALF_DIM, high.to(at.dtype.element_ty), mask=inside)


@triton.jit
def write_kv_kernel(
    queries: tl.tensor,  # [tokens, heads, head_dim], changed in place
    new_keys: tl.tensor,  # [tokens, kv_heads, head_dim]
    new_values: tl.tensor,  # [tokens, kv_heads, head_dim]
    keys: tl.tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    values: tl.tensor,  # [num_blocks, block_size, kv_heads, head_dim]
    slots: tl.tensor,  # [tokens] int64
    cos: tl.tensor,  # [tokens, head_dim / 2] float32
    sin: tl.tensor,  # [tokens, head_dim / 2] float32
    key_scales: tl.tensor,  # [num_blocks, block_size, kv_heads] float32
    value_scales: tl.tensor,  # [num_blocks, block_size, kv_heads] float32
    query_stride: tl.tensor,  # elements from one token to the next
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of one KV head
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,  # GROUP, rounded up to a power of two
    HALF: tl.constexpr,  # head_dim / 2, rounded up to a power of two
    ROTATE: tl.constexpr,
    LARGEST_VALUE: tl.constexpr,  # of a quantised cache; 0: it holds values as they are
    FP8: tl.constexpr,  # the cache holds the bits of float8_e4m3fn
) -> None:
    """One token and one KV head: its key, its value, and the query heads that read them."""
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        dims = tl.arange(0, HALF)
        inside = dims < HALF_DIM
        at = new_keys + token * key_stride + kv_head * HEAD_DIM + dims
        low = tl.load(at, mask=inside, other=0).to(tl.float32)
        high = tl.load(at + HALF_DIM, mask=inside, other=0).to(tl.float32)
        at = new_values + token * value_stride + kv_head * HEAD_DIM + dims
        value_low = tl.load(at, mask=inside, other=0).to(tl.float32)
        value_high = tl.load(at + HALF_DIM, mask=inside, other=0).to(tl.float32)
        if ROTATE:
            at = token * HALF_DIM + dims
            c = tl.load(cos + at, mask=inside, other=0)
            s = tl.load(sin + at, mask=inside, other=0)
            low, high = low * c - high * s, high * c + low * s
            row = tl.arange(0, ROWS)[:, None]
            each = (row < GROUP) & inside[None, :]
            at = queries + token * query_stride + (kv_head * GROUP + row) * HEAD_DIM + dims[None, :]
            first = tl.load(at, mask=each, other=0).to(tl.float32)
            second = tl.load(at + HALF_DIM, mask=each, other=0).to(tl.float32)
            turned = first * c[None, :] - second * s[None, :]
            tl.store(at, turned.to(at.dtype.element_ty), mask=each)
            turned = second * c[None, :] + first * s[None, :]
            tl.store(at + HALF_DIM, turned.to(at.dtype.element_ty), mask=each)
        head = slot * KV_HEADS + kv_head
        at = keys + head * HEAD_DIM + dims
        _store(low, high, inside, at, key_scales + head, HALF_DIM, LARGEST_VALUE, FP8)
        at = values + head * HEAD_DIM + dims
        _store(value_low, value_high, inside, at, value_scales + head, HALF_DIM, LARGEST_VALUE, FP8)


def write_kv(
    queries: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Store the K and V of each token in its slot, and rotate queries and keys when angles are given.

    Arithmetic is in float32 and rounded once, to the type of the queries or of the cache.

    Args:
        queries: [tokens, heads, head_dim]; rotated in place, or left alone without `cos`.
        new_keys: [tokens, kv_heads, head_dim], not rotated; left as they are. Like queries and values these
            may be views of one fused tensor: a token's heads must be contiguous, tokens may be apart.
        new_values: [tokens, kv_heads, head_dim].
        keys: [num_blocks, block_size, kv_heads, head_dim] of one layer, contiguous: float32, float16 or
            bfloat16; or float8_e4m3fn or int8, and then each head of a slot is divided by its own scale.
        values: as keys.
        slots: [tokens] int64, block * block_size + offset, no slot twice. -1: a row of padding, for which
            nothing is written, its query included.
        cos: [tokens, head_dim / 2] float32, contiguous, of each token's angles.
        sin: as cos.
        key_scales: [num_blocks, block_size, kv_heads] float32, for a quantised cache only: a key is
            `stored * scale`. A head that holds NaN or infinity gets NaN as its scale.
        value_scales: as key_scales.

    Raises:
        ValueError: shapes, types or strides that do not fit together.
    """
    check(queries, new_keys, new_values, keys, values, slots, cos, sin, key_scales, value_scales)
    if not len(slots):
        return
    case = Case.of(queries, keys, rotate=cos is not None)
    write_kv_kernel[(len(slots), case.kv_heads)](
        queries,
        new_keys,
        new_values,
        _bits(keys),
        _bits(values),
        slots,
        # Where one is not used, any pointer does.
        slots if cos is None else cos,
        slots if sin is None else sin,
        slots if key_scales is None else key_scales,
        slots if value_scales is None else value_scales,
        queries.stride(0),
        new_keys.stride(0),
        new_values.stride(0),
        **case.constants(),
        num_warps=case.warps(),
    )


def _bits(cache: Tensor) -> Tensor:
    """The cache as the kernel sees it: not every device has float8."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


@dataclass(frozen=True, slots=True)
class Case:
    """What a launch is specialised on."""

    heads: int
    kv_heads: int
    head_dim: int
    cache: torch.dtype
    rotate: bool

    @classmethod
    def of(cls, queries: Tensor, keys: Tensor, *, rotate: bool) -> Case:
        return cls(queries.shape[1], keys.shape[2], keys.shape[3], keys.dtype, rotate)

    def constants(self) -> dict[str, Any]:
        """The kernel's constant parameters."""
        group = self.heads // self.kv_heads
        return {
            "KV_HEADS": self.kv_heads,
            "GROUP": group,
            "HEAD_DIM": self.head_dim,
            "ROWS": triton.next_power_of_2(group),
            "HALF": triton.next_power_of_2(self.head_dim // 2),
            "ROTATE": self.rotate,
            "LARGEST_VALUE": LARGEST.get(self.cache, 0.0),
            "FP8": self.cache == torch.float8_e4m3fn,
        }

    def warps(self) -> int:
        """One for each 512 values of the queries' tile, so that a thread has 16 at a time; 1 to 8."""
        sizes = self.constants()
        values = 2 * sizes["HALF"] * (sizes["ROWS"] if self.rotate else 1)
        return int(min(8, max(1, values // 512)))


def check(
    queries: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> None:
    """Raise ValueError unless the arguments of `write_kv` fit together; looks at no element."""
    tokens, heads, head_dim = queries.shape
    blocks, block_size, kv_heads, _ = keys.shape
    expected = {
        "new_keys": (new_keys, (tokens, kv_heads, head_dim)),
        "new_values": (new_values, (tokens, kv_heads, head_dim)),
        "keys": (keys, (blocks, block_size, kv_heads, head_dim)),
        "values": (values, (blocks, block_size, kv_heads, head_dim)),
        "slots": (slots, (tokens,)),
        "cos": (cos, (tokens, head_dim // 2)),
        "sin": (sin, (tokens, head_dim // 2)),
        "key_scales": (key_scales, (blocks, block_size, kv_heads)),
        "value_scales": (value_scales, (blocks, block_size, kv_heads)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}; {list(shape)} fits the others"
            )
    if head_dim % 2 or heads % kv_heads:
        raise ValueError(
            f"{heads} query heads of size {head_dim} do not fit {kv_heads} KV heads: the size must be even "
            "and the query heads a multiple of the KV heads"
        )
    for name, tensor in {
        "queries": queries,
        "new_keys": new_keys,
        "new_values": new_values,
    }.items():
        if tokens and tensor.stride()[1:] != (head_dim, 1):
            raise ValueError(
                f"{name} has strides {tensor.stride()}; the heads of a token must be contiguous"
            )
    for name in ("keys", "values", "slots", "cos", "sin", "key_scales", "value_scales"):
        tensor = expected[name][0]
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin come together; one of them is None")
    if slots.dtype != torch.int64:
        raise ValueError(f"slots are {slots.dtype}; they must be torch.int64")
    for name in ("cos", "sin", "key_scales", "value_scales"):
        tensor = expected[name][0]
        if tensor is not None and tensor.dtype != torch.float32:
            raise ValueError(f"{name} is {tensor.dtype}; it must be torch.float32")
    quantised = keys.dtype in LARGEST
    if values.dtype != keys.dtype:
        raise ValueError(f"keys are {keys.dtype} and values {values.dtype}; they must be the same")
    if not quantised and not keys.dtype.is_floating_point:
        raise ValueError(
            f"a cache of {keys.dtype} is not known; quantised ones are float8_e4m3fn and int8"
        )
    if quantised != (key_scales is not None) or quantised != (value_scales is not None):
        raise ValueError(
            f"a cache of {keys.dtype} {'needs' if quantised else 'takes no'} key_scales and value_scales"
        )


def launches() -> Iterator[Launch]:
    """What a runner launches for Llama-3-8B, Qwen2.5-0.5B, Phi-2 and Gemma-2, by type of cache."""
    cases = [
        ("llama-3-8b", Case(32, 8, 128, torch.bfloat16, True), "bf16"),
        ("llama-3-8b int8 KV", Case(32, 8, 128, torch.int8, True), "bf16"),
        ("llama-3-8b fp8 KV", Case(32, 8, 128, torch.float8_e4m3fn, True), "bf16"),
        ("qwen2.5-0.5b fp16", Case(14, 2, 64, torch.float16, True), "fp16"),
        ("phi-2 fp16", Case(32, 32, 80, torch.float16, True), "fp16"),
        ("gemma-2-9b", Case(16, 8, 256, torch.bfloat16, True), "bf16"),
        ("no rotation fp32", Case(9, 3, 64, torch.float32, False), "fp32"),
    ]
    for note, case, computed in cases:
        quantised = case.cache in LARGEST
        stored = {torch.float8_e4m3fn: "u8", torch.int8: "i8"}.get(case.cache, computed)
        unused = "*i64"
        yield Launch(
            name="write_kv",
            function=write_kv_kernel,
            signature={
                **dict.fromkeys(("queries", "new_keys", "new_values"), f"*{computed}"),
                **dict.fromkeys(("keys", "values"), f"*{stored}"),
                "slots": "*i64",
                **dict.fromkeys(("cos", "sin"), "*fp32" if case.rotate else unused),
                **dict.fromkeys(("key_scales", "value_scales"), "*fp32" if quantised else unused),
                **dict.fromkeys(("query_stride", "key_stride", "value_stride"), "i32"),
            },
            constants=case.constants(),
            num_warps=case.warps(),
            note=note,
            aligned=frozenset(write_kv_kernel.arg_names) - case.constants().keys(),
        )
