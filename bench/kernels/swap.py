"""Bandwidth of swapping blocks out and in, to a buffer on the device and to the host's memory.

    python -m bench.kernels.swap [--interpret]

The cache is Llama 3 8B's keys in bfloat16: 32 layers, 8 KV heads of 128, blocks of 16. Bytes count what is
read and what is written; over the bus half of them travel, so its own peak (PCIe 5 x16: 64 GB/s) shows as
twice that.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.kernels.gpu import Figure, arguments, seconds, table

LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCKS = 32, 8, 128, 16, 1024
COUNTS = (8, 128)
REDUCED = (2,)


def measure(device: torch.device, *, reduced: bool = False) -> Iterator[Figure]:
    """Figures for each number of blocks: out and in, on the device and over the bus."""
    for count in REDUCED if reduced else COUNTS:
        for pinned in (False,) if device.type == "cpu" else (False, True):
            yield from both(
                count, 2 if reduced else LAYERS, 8 if reduced else BLOCKS, pinned, device
            )


def both(
    count: int, layers: int, blocks: int, pinned: bool, device: torch.device
) -> Iterator[Figure]:
    """Time the way out and the way back of `count` blocks in random order."""
    from kernels.swap import gather_blocks, scatter_blocks

    inner = (BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    cache = torch.zeros(layers, blocks, *inner, dtype=torch.bfloat16, device=device)
    where = {"pin_memory": True} if pinned else {"device": device}
    buffer = torch.zeros(layers, count, *inner, dtype=torch.bfloat16, **where)
    ids = torch.randperm(blocks)[:count].to(device)
    place = "host" if pinned else "device"
    taken = seconds(lambda: gather_blocks(cache, ids, buffer), device)
    torchs = seconds(lambda: buffer.copy_(cache.index_select(1, ids), non_blocking=True), device)
    yield Figure("swap", f"{count} blocks to {place}", taken, 2 * buffer.nbytes, 0, torchs)
    taken = seconds(lambda: scatter_blocks(buffer, ids, cache), device)
    torchs = seconds(
        lambda: cache.index_copy_(1, ids, buffer.to(device, non_blocking=True)), device
    )
    yield Figure("swap", f"{count} blocks from {place}", taken, 2 * buffer.nbytes, 0, torchs)


def main() -> None:
    device = arguments("Bandwidth of swapping blocks.")
    torch.manual_seed(0)
    for line in table(list(measure(device, reduced=device.type == "cpu")), device):
        print(line)


if __name__ == "__main__":
    main()
