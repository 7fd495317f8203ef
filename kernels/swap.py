"""Move blocks between the device and one contiguous buffer, for preemption by swapping.

The buffer may be pinned memory of the host: the device then reads and writes it over the bus itself, with no
copy in between and no call per block. (Kwon et al., "PagedAttention", SOSP 2023, section 4.5.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.copy_blocks import CHUNK, WARPS, as_words
from kernels.launch import Call, Launch


def gather_blocks(cache: Tensor, blocks: Tensor, out: Tensor) -> None:
    """Copy blocks of every layer to a buffer: `out[:, i] = cache[:, blocks[i]]`.

    Args:
        cache: [layers, num_blocks, block_size, kv_heads, head_dim], contiguous, of any type. Scales
            [layers, num_blocks, block_size, kv_heads] are moved the same way.
        blocks: [count] int64 or int32 block ids on the cache's device, in range; one may occur many times.
        out: [layers, count, ...] like the cache, contiguous, on the device or in pinned memory. Pinned memory
            holds the blocks once the stream has been waited for.

    Raises:
        ValueError: shapes or types that do not fit together, or a buffer the device cannot reach.
    """
    _move(cache, blocks, out, True)


def scatter_blocks(buffer: Tensor, blocks: Tensor, cache: Tensor) -> None:
    """Copy blocks of every layer back from a buffer: `cache[:, blocks[i]] = buffer[:, i]`.

    Args:
        buffer: [layers, count, ...] as `gather_blocks` filled it.
        blocks: [count] int64 or int32 block ids on the cache's device, in range, none twice.
        cache: [layers, num_blocks, ...], contiguous; other blocks stay as they are.

    Raises:
        ValueError: shapes or types that do not fit together, or a buffer the device cannot reach.
    """
    _move(cache, blocks, buffer, False)


@triton.jit(
    do_not_specialize=["stride", "num_blocks", "count"],
    do_not_specialize_on_alignment=["blocks"],
)
def _swap(
    cache: tl.tensor,  # [layers, num_blocks, words] int32
    buffer: tl.tensor,  # [layers, count, words] int32
    blocks: tl.tensor,  # [count]
    stride: tl.tensor,  # elements from one id to the next
    num_blocks: tl.tensor,
    count: tl.tensor,
    words: tl.tensor,  # of one block in one layer
    CHUNK: tl.constexpr,
    OUT: tl.constexpr,  # from cache to buffer, not the other way
) -> None:
    """A chunk of one block in one layer."""
    chunks = tl.cdiv(words, CHUNK)
    index = tl.program_id(0) // chunks
    word = tl.program_id(0) % chunks * CHUNK + tl.arange(0, CHUNK)
    inside = word < words
    layer = tl.program_id(1).to(tl.int64)
    in_cache = (
        cache + (layer * num_blocks + tl.load(blocks + index * stride).to(tl.int64)) * words + word
    )
    in_buffer = buffer + (layer * count + index) * words + word
    if OUT:
        tl.store(in_buffer, tl.load(in_cache, mask=inside), mask=inside)
    else:
        tl.store(in_cache, tl.load(in_buffer, mask=inside), mask=inside)


def _move(cache: Tensor, blocks: Tensor, buffer: Tensor, out: bool) -> None:
    fitting = (cache.shape[0], len(blocks), *cache.shape[2:])
    if buffer.shape != fitting or buffer.dtype != cache.dtype:
        raise ValueError(
            f"a buffer of {buffer.dtype} {list(buffer.shape)} does not fit; "
            f"{len(blocks)} blocks of this cache are {cache.dtype} {list(fitting)}"
        )
    if cache.device != buffer.device and not buffer.is_pinned():
        raise ValueError(
            f"the buffer is in memory that {cache.device} cannot reach; allocate it with pin_memory=True"
        )
    if buffer.numel():
        _call(cache, blocks, buffer, out).run()


def _call(cache: Tensor, blocks: Tensor, buffer: Tensor, out: bool) -> Call:
    cache_words = as_words(cache, "cache")
    layers, num_blocks, words = cache_words.shape
    return Call(
        _swap,
        (len(blocks) * triton.cdiv(words, CHUNK), layers),
        {
            "cache": cache_words,
            "buffer": as_words(buffer, "buffer"),
            "blocks": blocks,
            "stride": blocks.stride(0),
            "num_blocks": num_blocks,
            "count": len(blocks),
            "words": words,
        },
        {"CHUNK": CHUNK, "OUT": out},
        num_warps=WARPS,
        num_stages=1,
    )


def launches(arch: str = "sm_90") -> Iterator[Launch]:
    """What a runner launches, the same on every `arch`: both ways, with Llama 3 8B's blocks."""
    with torch.device("meta"):
        cache = torch.empty(32, 1023, 16, 8, 128, dtype=torch.bfloat16)
        buffer = torch.empty(32, 9, 16, 8, 128, dtype=torch.bfloat16)
        blocks = torch.empty(9, dtype=torch.int64)
    yield _call(cache, blocks, buffer, True).describe("Llama 3 8B, bfloat16, to the buffer")
    yield _call(cache, blocks, buffer, False).describe("Llama 3 8B, bfloat16, from the buffer")
