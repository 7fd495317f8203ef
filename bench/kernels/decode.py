"""Bandwidth of paged decode attention against the device's and against torch on contiguous keys.

    python -m bench.kernels.decode [--interpret]

The heads are Llama 3 8B's: 32 query heads, 8 KV heads of 128; blocks of 16 in random order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.gpu import Figure, arguments, seconds, table

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
SHAPES = ((64, 2048), (1, 2048), (1, 32_768), (8, 8192), (256, 1024))
REDUCED = ((2, 40),)


def measure(device: torch.device, *, reduced: bool = False) -> Iterator[Figure]:
    """A figure for each batch and context, in bfloat16 and over float8; then rows of mixed length."""
    for rows, context in REDUCED if reduced else SHAPES:
        for stored in (torch.bfloat16, torch.float8_e4m3fn):
            lengths = torch.full((rows,), context)
            yield one(lengths, stored, device, f"{rows} x {context}")
    lengths = torch.randint(1, 60, (3,)) if reduced else torch.randint(128, 8192, (64,))
    yield one(lengths, torch.bfloat16, device, f"{len(lengths)} x {min(lengths)}-{max(lengths)}")


def one(lengths: Tensor, stored: torch.dtype, device: torch.device, shape: str) -> Figure:
    """Time one batch whose rows see `lengths` positions."""
    from kernels.decode import decode

    rows, longest, positions = len(lengths), int(max(lengths)), int(sum(lengths))
    width = -(-longest // BLOCK_SIZE)
    blocks = rows * width + 1
    both = torch.randn(
        2, blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device
    )
    keys, values = both.to(stored)
    scales = None
    if stored.itemsize == 1:
        scales = torch.ones(blocks, BLOCK_SIZE, KV_HEADS, device=device)
    tables = (torch.randperm(blocks - 1) + 1).view(rows, width).int().to(device)
    queries = torch.randn(rows, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    out, lengths = torch.empty_like(queries), lengths.int().to(device)
    taken = seconds(
        lambda: decode(
            queries,
            keys,
            values,
            tables,
            lengths,
            scale=HEAD_DIM**-0.5,
            key_scales=scales,
            value_scales=scales,
            out=out,
            longest=longest,
        ),
        device,
    )
    slot = 2 * KV_HEADS * (HEAD_DIM * stored.itemsize + (4 if scales is not None else 0))
    return Figure(
        "decode",
        f"{shape}, {str(stored).removeprefix('torch.')}",
        taken,
        positions * slot + 2 * queries.nbytes,
        4 * HEADS * HEAD_DIM * positions,
        _torchs(queries, longest, device) if positions == rows * longest else None,
    )


def _torchs(queries: Tensor, context: int, device: torch.device) -> float:
    """The faster of two ways to ask for the same: a group's heads as heads, or as queries of one head."""
    shape = (len(queries), KV_HEADS, context, HEAD_DIM)
    keys, values = torch.randn(2, *shape, dtype=queries.dtype, device=device)
    as_heads, as_rows = queries[:, :, None], queries.view(len(queries), KV_HEADS, -1, HEAD_DIM)
    attend = F.scaled_dot_product_attention
    return min(
        seconds(lambda: attend(as_heads, keys, values, enable_gqa=True), device),
        seconds(lambda: attend(as_rows, keys, values), device),
    )


def main() -> None:
    device = arguments("Bandwidth of paged decode attention.")
    torch.manual_seed(0)
    for line in table(list(measure(device, reduced=device.type == "cpu")), device):
        print(line)


if __name__ == "__main__":
    main()
