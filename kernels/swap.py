"""Move blocks between the device and one contiguous buffer, for preemption by swapping.

The buffer may be pinned memory of the host: the device then reads and writes it over the bus itself, with no
copy in between and no call per block. (Kwon et al., "PagedAttention", SOSP 2023, section 4.5.)
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from kernels.copy_blocks import CHUNK, WARPS, as_words
from kernels.launch import Launch


@triton.jit
def swap_kernel(
    cache: tl.tensor,  # [layers, num_blocks, WORDS] int32
    buffer: tl.tensor,  # [layers, count, WORDS] int32
    blocks: tl.tensor,  # [count]
    stride: tl.tensor,  # elements from one id to the next
    num_blocks: tl.tensor,
    count: tl.tensor,
    WORDS: tl.constexpr,  # of one block in one layer
    CHUNK: tl.constexpr,
    OUT: tl.constexpr,  # from cache to buffer, not the other way
) -> None:
    """A chunk of one block in one layer."""
    CHUNKS: tl.constexpr = (WORDS + CHUNK - 1) // CHUNK
    index = tl.program_id(0) // CHUNKS
    word = tl.program_id(0) % CHUNKS * CHUNK + tl.arange(0, CHUNK)
    inside = word < WORDS
    layer = tl.program_id(1).to(tl.int64)
    in_cache = (
        cache + (layer * num_blocks + tl.load(blocks + index * stride).to(tl.int64)) * WORDS + word
    )
    in_buffer = buffer + (layer * count + index) * WORDS + word
    if OUT:
        tl.store(in_buffer, tl.load(in_cache, mask=inside), mask=inside)
    else:
        tl.store(in_cache, tl.load(in_buffer, mask=inside), mask=inside)


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
    _swap(cache, blocks, out, True)


def scatter_blocks(buffer: Tensor, blocks: Tensor, cache: Tensor) -> None:
    """Copy blocks of every layer back from a buffer: `cache[:, blocks[i]] = buffer[:, i]`.

    Args:
        buffer: [layers, count, ...] as `gather_blocks` filled it.
        blocks: [count] int64 or int32 block ids on the cache's device, in range, none twice.
        cache: [layers, num_blocks, ...], contiguous; other blocks stay as they are.

    Raises:
        ValueError: shapes or types that do not fit together, or a buffer the device cannot reach.
    """
    _swap(cache, blocks, buffer, False)


def _swap(cache: Tensor, blocks: Tensor, buffer: Tensor, out: bool) -> None:
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
    if not buffer.numel():
        return
    cache_words, buffer_words = as_words(cache, "cache"), as_words(buffer, "buffer")
    layers, num_blocks, words = cache_words.shape
    swap_kernel[(len(blocks) * triton.cdiv(words, CHUNK), layers)](
        cache_words,
        buffer_words,
        blocks,
        blocks.stride(0),
        num_blocks,
        len(blocks),
        WORDS=words,
        CHUNK=CHUNK,
        OUT=out,
        num_warps=WARPS,
    )


def launches() -> Iterator[Launch]:
    """What a runner launches: Llama-3-8B in bf16 with blocks of 16, both ways."""
    for note, out in (("to the buffer", True), ("from the buffer", False)):
        yield Launch(
            name="swap",
            function=swap_kernel,
            signature={
                "cache": "*i32",
                "buffer": "*i32",
                "blocks": "*i64",
                **dict.fromkeys(("stride", "num_blocks", "count"), "i32"),
            },
            constants={"WORDS": 16 * 8 * 128 // 2, "CHUNK": CHUNK, "OUT": out},
            num_warps=WARPS,
            note=note,
            aligned=frozenset({"cache", "buffer"}),
        )
