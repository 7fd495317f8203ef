"""Bandwidth of a step's block copies, K and V in all layers, against torch's own indexing.

    python -m bench.kernels.copy_blocks [--interpret]

The cache is Llama 3 8B's in bfloat16: 32 layers, 8 KV heads of 128, blocks of 16; a block is 2 MiB in all.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.kernels.gpu import Figure, arguments, seconds, table

LAYERS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCKS = 32, 8, 128, 16, 1024
COPIES = (1, 8, 64, 512)
REDUCED = (2,)


def measure(device: torch.device, *, reduced: bool = False) -> Iterator[Figure]:
    """A figure for each number of copies."""
    for copies in REDUCED if reduced else COPIES:
        yield one(copies, 2 if reduced else LAYERS, 8 if reduced else BLOCKS, device)


def one(copies: int, layers: int, blocks: int, device: torch.device) -> Figure:
    """Time the copies of one step, of and to blocks in random order."""
    from kernels.copy_blocks import copy_blocks

    shape = (layers, blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    keys, values = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    sources, targets = torch.randperm(blocks)[: 2 * copies].view(2, copies).to(device)
    taken = seconds(lambda: copy_blocks(keys, values, sources, targets), device)

    def by_torch() -> None:
        for cache in (keys, values):
            cache.index_copy_(1, targets, cache.index_select(1, sources))

    moved = 2 * 2 * copies * keys[:, 0].nbytes  # K and V, read and written
    return Figure("copy_blocks", f"{copies} copies", taken, moved, 0, seconds(by_torch, device))


def main() -> None:
    device = arguments("Bandwidth of block copies.")
    torch.manual_seed(0)
    for line in table(list(measure(device, reduced=device.type == "cpu")), device):
        print(line)


if __name__ == "__main__":
    main()
