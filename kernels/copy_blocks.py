"""Copy whole blocks: everything copy-on-write orders in one step, for all layers, K and V, in one launch.

The copies run in no order, side by side. That is right because of what memd promises of the copies of one
step: no block is a target twice and no target is a source, so no copy reads what another writes. A block may
be the source of many. (Kwon et al., "PagedAttention", SOSP 2023, section 4.5: fused block copy.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launch import Call, Launch

# Words of four bytes that a program moves: 64 bytes for each thread of four warps, in 16-byte pieces.
CHUNK = 2048
WARPS = 4


def copy_blocks(
    keys: Tensor,
    values: Tensor,
    sources: Tensor,
    targets: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
) -> None:
    """Copy block `sources[i]` to block `targets[i]` in every layer, bit for bit.

    No block may be a target twice or both a target and a source; ids must be in range. None of this is looked
    at here, because that would wait for the device: the ids are checked before they reach it.

    Args:
        keys: [layers, num_blocks, block_size, kv_heads, head_dim], contiguous, of any type.
        values: as keys.
        sources: [copies] int64 or int32 block ids; a column of a wider tensor will do.
        targets: [copies], of the same type.
        key_scales: [layers, num_blocks, block_size, kv_heads] of a quantised cache.
        value_scales: as key_scales.

    Raises:
        ValueError: shapes or types that do not fit together.
    """
    if sources.shape != targets.shape or sources.ndim != 1:
        raise ValueError(
            f"sources {list(sources.shape)} and targets {list(targets.shape)} must be lists of one length"
        )
    if (key_scales is None) != (value_scales is None):
        raise ValueError("key_scales and value_scales come together; one of them is None")
    if keys.shape != values.shape or keys.dtype != values.dtype:
        raise ValueError(
            f"keys are {keys.dtype} {list(keys.shape)} and values {values.dtype} {list(values.shape)}; they "
            "must be alike"
        )
    for name, scales in (("key_scales", key_scales), ("value_scales", value_scales)):
        if scales is not None and scales.shape != keys.shape[:4]:
            raise ValueError(
                f"{name} have shape {list(scales.shape)}; {list(keys.shape[:4])} fits the keys"
            )
    if len(sources) and keys.shape[0]:
        _call(keys, values, sources, targets, key_scales, value_scales).run()


# Of every model, pool and list of ids there is one kind: nothing is compiled in the middle of serving.
@triton.jit(
    do_not_specialize=["source_stride", "target_stride", "num_blocks", "scale_words"],
    do_not_specialize_on_alignment=["sources", "targets"],
)
def _copy_blocks(
    keys: tl.tensor,  # [layers, num_blocks, words] int32
    values: tl.tensor,  # [layers, num_blocks, words] int32
    key_scales: tl.tensor,  # [layers, num_blocks, scale_words] int32, or None
    value_scales: tl.tensor,  # [layers, num_blocks, scale_words] int32, or None
    sources: tl.tensor,  # [copies]
    targets: tl.tensor,  # [copies]
    source_stride: tl.tensor,  # elements from one id to the next
    target_stride: tl.tensor,
    num_blocks: tl.tensor,
    words: tl.tensor,  # of one block in one layer
    scale_words: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    """A chunk of one block in one layer, K and V; the first chunk's program moves the scales too."""
    chunks = tl.cdiv(words, CHUNK)
    copy = tl.program_id(0) // chunks
    part = tl.program_id(0) % chunks
    first = tl.program_id(1).to(tl.int64) * num_blocks
    source = first + tl.load(sources + copy * source_stride).to(tl.int64)
    target = first + tl.load(targets + copy * target_stride).to(tl.int64)
    word = part * CHUNK + tl.arange(0, CHUNK)
    inside = word < words
    key = tl.load(keys + source * words + word, mask=inside)
    value = tl.load(values + source * words + word, mask=inside)
    tl.store(keys + target * words + word, key, mask=inside)
    tl.store(values + target * words + word, value, mask=inside)
    if key_scales is not None and part == 0:
        for start in range(0, scale_words, CHUNK):
            word = start + tl.arange(0, CHUNK)
            inside = word < scale_words
            key = tl.load(key_scales + source * scale_words + word, mask=inside)
            value = tl.load(value_scales + source * scale_words + word, mask=inside)
            tl.store(key_scales + target * scale_words + word, key, mask=inside)
            tl.store(value_scales + target * scale_words + word, value, mask=inside)


def as_words(cache: Tensor, name: str) -> Tensor:
    """[layers, num_blocks, words] int32: the same memory, whatever its type.

    Raises:
        ValueError: it is not contiguous, or a block is not a whole number of words.
    """
    if not cache.is_contiguous():
        raise ValueError(f"{name} has strides {cache.stride()}; it must be contiguous")
    rows = cache.view(*cache.shape[:2], -1)
    if rows.shape[2] * cache.dtype.itemsize % 4:
        raise ValueError(
            f"a block of {name} has {rows.shape[2] * cache.dtype.itemsize} bytes; it must be a multiple of 4"
        )
    return rows.view(torch.int32)


def _call(
    keys: Tensor,
    values: Tensor,
    sources: Tensor,
    targets: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
) -> Call:
    key_words = as_words(keys, "keys")
    layers, num_blocks, words = key_words.shape
    key_scale_words = None if key_scales is None else as_words(key_scales, "key_scales")
    value_scale_words = None if value_scales is None else as_words(value_scales, "value_scales")
    return Call(
        _copy_blocks,
        (len(sources) * triton.cdiv(words, CHUNK), layers),
        {
            "keys": key_words,
            "values": as_words(values, "values"),
            "key_scales": key_scale_words,
            "value_scales": value_scale_words,
            "sources": sources,
            "targets": targets,
            "source_stride": sources.stride(0),
            "target_stride": targets.stride(0),
            "num_blocks": num_blocks,
            "words": words,
            "scale_words": 0 if key_scale_words is None else key_scale_words.shape[2],
        },
        {"CHUNK": CHUNK},
        num_warps=WARPS,
        num_stages=1,
    )


def launches(arch: str = "sm_90") -> Iterator[Launch]:
    """What a runner launches, the same on every `arch`: without scales and with them."""
    with torch.device("meta"):
        plain = torch.empty(32, 1024, 16, 8, 128, dtype=torch.bfloat16)
        quantised = torch.empty(32, 1023, 16, 8, 128, dtype=torch.int8)
        scales = torch.empty(32, 1023, 16, 8)
        ids = torch.empty(4, dtype=torch.int64)
        pairs = torch.empty(4, 2, dtype=torch.int64)
    yield _call(plain, plain, ids, ids, None, None).describe("Llama 3 8B, bfloat16")
    yield _call(quantised, quantised, pairs[:, 0], pairs[:, 1], scales, scales).describe(
        "Llama 3 8B, int8 or float8, ids in pairs"
    )
