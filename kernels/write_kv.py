"""Store the keys and values of a step's tokens in their blocks, turned by rotary embedding on the way.

One launch does what a model would do in four: rotate queries, rotate keys, scale to the cache's type,
scatter. Rotation is that of Su et al., "RoFormer" (2021), in the halves convention of Llama: the pair
(i, i + head_dim / 2) turns by its token's angle. The cache is that of Kwon et al., "PagedAttention" (SOSP
2023).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import fp8
from kernels.launch import Call, Launch, short
from kernels.reference import LARGEST

_SMALLEST = tl.constexpr(1e-30)  # of a scale: a head of zeros is still divided by something


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
            bfloat16; or float8 (e4m3fn, e5m2) or int8, and then each head of a slot is divided by its own
            scale, so that its largest value becomes the type's largest.
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
    _check(queries, new_keys, new_values, keys, values, slots, cos, sin, key_scales, value_scales)
    if len(slots):
        _call(
            queries, new_keys, new_values, keys, values, slots, cos, sin, key_scales, value_scales
        ).run()


@triton.jit(do_not_specialize=["kv_heads", "group"])
def _write_kv(
    queries: tl.tensor,  # [tokens, heads, HEAD_DIM], changed in place
    new_keys: tl.tensor,  # [tokens, kv_heads, HEAD_DIM]
    new_values: tl.tensor,  # [tokens, kv_heads, HEAD_DIM]
    keys: tl.tensor,  # [num_blocks * block_size, kv_heads, HEAD_DIM]
    values: tl.tensor,  # [num_blocks * block_size, kv_heads, HEAD_DIM]
    slots: tl.tensor,  # [tokens] int64
    cos: tl.tensor,  # [tokens, HEAD_DIM / 2] float32, or None
    sin: tl.tensor,  # [tokens, HEAD_DIM / 2] float32, or None
    key_scales: tl.tensor,  # [num_blocks * block_size, kv_heads] float32, or None
    value_scales: tl.tensor,  # [num_blocks * block_size, kv_heads] float32, or None
    q_token: tl.tensor,  # elements from one token to the next
    k_token: tl.tensor,
    v_token: tl.tensor,
    kv_heads: tl.tensor,
    group: tl.tensor,  # query heads of one KV head
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,  # query heads turned together
    HALF: tl.constexpr,  # HEAD_DIM / 2 up to a power of two
    LARGEST_VALUE: tl.constexpr,  # of a quantised cache
    EXPONENT: tl.constexpr,  # bits of it in float8, of which the cache holds the bits; 0: not float8
) -> None:
    """One token and one KV head: its key, its value, and the query heads that read them."""
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    slot = tl.load(slots + token)
    if slot >= 0:
        dims = tl.arange(0, HALF)
        inside = dims < HALF_DIM
        at = new_keys + token * k_token + kv_head * HEAD_DIM + dims
        low = tl.load(at, mask=inside, other=0).to(tl.float32)
        high = tl.load(at + HALF_DIM, mask=inside, other=0).to(tl.float32)
        at = new_values + token * v_token + kv_head * HEAD_DIM + dims
        value_low = tl.load(at, mask=inside, other=0).to(tl.float32)
        value_high = tl.load(at + HALF_DIM, mask=inside, other=0).to(tl.float32)
        if cos is not None:
            at = token * HALF_DIM + dims
            c = tl.load(cos + at, mask=inside, other=0)
            s = tl.load(sin + at, mask=inside, other=0)
            low, high = low * c - high * s, high * c + low * s
            for start in range(0, group, ROWS):
                member = start + tl.arange(0, ROWS)[:, None]
                each = (member < group) & inside[None, :]
                row = kv_head * group + member
                place = queries + token * q_token + row * HEAD_DIM + dims[None, :]
                first = tl.load(place, mask=each, other=0).to(tl.float32)
                second = tl.load(place + HALF_DIM, mask=each, other=0).to(tl.float32)
                turned = first * c[None, :] - second * s[None, :]
                tl.store(place, turned.to(place.dtype.element_ty), mask=each)
                turned = second * c[None, :] + first * s[None, :]
                tl.store(place + HALF_DIM, turned.to(place.dtype.element_ty), mask=each)
        head = slot * kv_heads + kv_head
        at = keys + head * HEAD_DIM + dims
        _store(low, high, inside, at, key_scales, head, HALF_DIM, LARGEST_VALUE, EXPONENT)
        at = values + head * HEAD_DIM + dims
        _store(
            value_low, value_high, inside, at, value_scales, head, HALF_DIM, LARGEST_VALUE, EXPONENT
        )


@triton.jit
def _store(
    low: tl.tensor,  # [HALF] float32
    high: tl.tensor,  # [HALF] float32
    inside: tl.tensor,  # [HALF] bool
    at: tl.tensor,  # [HALF] places of the lower half in the cache
    scales: tl.tensor,  # or None
    head: tl.tensor,  # place of its scale
    HALF_DIM: tl.constexpr,
    LARGEST_VALUE: tl.constexpr,
    EXPONENT: tl.constexpr,
) -> None:
    """Write one head of one token, scaled where the cache is quantised."""
    if scales is not None:
        size = tl.maximum(tl.max(tl.abs(low)), tl.max(tl.abs(high)))
        # Maxima pass over NaN. A head with one, or with infinity, gets NaN as scale and so stays visible.
        scale = tl.maximum(size / LARGEST_VALUE, _SMALLEST) + tl.sum(low * 0 + high * 0)
        tl.store(scales + head, scale)
        low, high = low / scale, high / scale
        if EXPONENT == 4:
            low, high = fp8.encode(low), fp8.encode(high)
        elif EXPONENT == 5:
            low, high = fp8.encode_e5m2(low), fp8.encode_e5m2(high)
        else:
            low, high = tl.floor(low + 0.5), tl.floor(high + 0.5)
    tl.store(at, low.to(at.dtype.element_ty), mask=inside)
    tl.store(at + HALF_DIM, high.to(at.dtype.element_ty), mask=inside)


def _call(
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
) -> Call:
    tokens, heads, head_dim = queries.shape
    kv_heads = keys.shape[2]
    group = heads // kv_heads
    rows = 1 if cos is None else (2 if group <= 2 else 8)
    half = triton.next_power_of_2(head_dim // 2)
    exponent = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}.get(keys.dtype, 0)
    return Call(
        _write_kv,
        (tokens, kv_heads),
        {
            "queries": queries,
            "new_keys": new_keys,
            "new_values": new_values,
            # As bits, because not every device knows the type.
            "keys": keys.view(torch.uint8) if exponent else keys,
            "values": values.view(torch.uint8) if exponent else values,
            "slots": slots,
            "cos": cos,
            "sin": sin,
            "key_scales": key_scales,
            "value_scales": value_scales,
            "q_token": queries.stride(0),
            "k_token": new_keys.stride(0),
            "v_token": new_values.stride(0),
            "kv_heads": kv_heads,
            "group": group,
        },
        {
            "HEAD_DIM": head_dim,
            "ROWS": rows,
            "HALF": half,
            "LARGEST_VALUE": LARGEST.get(keys.dtype, 0.0),
            "EXPONENT": exponent,
        },
        # 256 values of the queries' tile to a warp, 8 to a thread: of 16 bits, as many as it loads at once.
        num_warps=min(8, max(1, 2 * half * rows // 256)),
        num_stages=1,
    )


def _check(
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
    """Raise ValueError unless everything fits together; looks at no element."""
    tokens, heads, head_dim = queries.shape
    blocks, block_size, kv_heads, _ = keys.shape
    new = (tokens, kv_heads, head_dim)
    cache = (blocks, block_size, kv_heads, head_dim)
    for name, tensor, shape, dtype in (
        ("new_keys", new_keys, new, None),
        ("new_values", new_values, new, None),
        ("keys", keys, cache, None),
        ("values", values, cache, keys.dtype),
        ("slots", slots, (tokens,), torch.int64),
        ("cos", cos, (tokens, head_dim // 2), torch.float32),
        ("sin", sin, (tokens, head_dim // 2), torch.float32),
        ("key_scales", key_scales, cache[:3], torch.float32),
        ("value_scales", value_scales, cache[:3], torch.float32),
    ):
        if tensor is None:
            continue
        if tensor.shape != shape or dtype not in (None, tensor.dtype):
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}; it must be "
                f"{list(shape) if dtype is None else f'{dtype} {list(shape)}'} to fit the others"
            )
        if shape != new and not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")
    if head_dim % 2 or heads % kv_heads:
        raise ValueError(
            f"{heads} query heads of size {head_dim} do not fit {kv_heads} KV heads: the size must be even "
            "and the query heads a multiple of the KV heads"
        )
    for name, tensor in (
        ("queries", queries),
        ("new_keys", new_keys),
        ("new_values", new_values),
    ):
        if tokens and tensor.stride()[1:] != (head_dim, 1):
            raise ValueError(
                f"{name} has strides {tensor.stride()}; the heads of a token must be contiguous"
            )
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin come together; one of them is None")
    quantised = keys.dtype in LARGEST
    if not quantised and keys.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(
            f"a cache of {keys.dtype} is not known; it may be of float32, float16, bfloat16, or of one byte: "
            "float8_e4m3fn, float8_e5m2, int8"
        )
    if quantised != (key_scales is not None) or quantised != (value_scales is not None):
        raise ValueError(
            f"a cache of {keys.dtype} {'needs' if quantised else 'takes no'} key_scales and value_scales"
        )


def launches(arch: str = "sm_90") -> Iterator[Launch]:
    """Every kind of launch `write_kv` makes, the same on every `arch`.

    First what a runner launches, by types, sizes of heads and groups, rotated or not; then other types once.
    """
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    kinds = [
        (group, head_dim, dtype, dtype, turned)
        for dtype in (bf16, fp32)
        for head_dim in (64, 80, 96, 128, 256)
        for group, turned in ((4, True), (1, True), (4, False))
    ]
    kinds += [(4, 128, fp16, fp16, True), (1, 128, fp16, fp16, False)]
    kinds += [(4, 128, bf16, stored, True) for stored in LARGEST]
    for group, head_dim, dtype, stored, turned in kinds:
        kv_heads, heads = 8, 8 * group
        with torch.device("meta"):
            fused = torch.empty(64, heads + 2 * kv_heads, head_dim, dtype=dtype)
            cache = torch.empty(1024, 16, kv_heads, head_dim, dtype=stored)
            slots = torch.empty(64, dtype=torch.int64)
            angles = torch.empty(64, head_dim // 2) if turned else None
            scales = torch.empty(1024, 16, kv_heads) if stored in LARGEST else None
        queries, keys, values = torch.split(fused, [heads, kv_heads, kv_heads], dim=1)
        note = f"{short(dtype)}{'' if stored == dtype else f' over {short(stored)}'}"
        note += f", {heads}/{kv_heads} heads of {head_dim}{'' if turned else ', not rotated'}"
        yield _call(
            queries, keys, values, cache, cache, slots, angles, angles, scales, scales
        ).describe(note)
