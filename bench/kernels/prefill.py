"""Rate of paged prefill attention against the device's and against torch on contiguous keys.

    python -m bench.kernels.prefill [--interpret]

The heads are Llama 3 8B's: 32 query heads, 8 KV heads of 128; blocks of 16 in random order, bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.kernels.gpu import Figure, arguments, seconds, table

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
# Tokens of each row, and the positions each sees with them.
SHAPES = (
    ("a prompt of 2048", [2048], [2048]),
    ("a prompt of 16384", [16_384], [16_384]),
    ("8 prompts of 512", [512] * 8, [512] * 8),
    ("2048 more after 16384", [2048], [18_432]),
    ("a prompt of 2048 beside 63 decodes at 2048", [1] * 63 + [2048], [2048] * 64),
)
REDUCED = (("a prompt of 40", [40], [40]), ("2 rows", [1, 9], [20, 30]))


def measure(device: torch.device, *, reduced: bool = False) -> Iterator[Figure]:
    """A figure for each shape."""
    for shape, counts, lengths in REDUCED if reduced else SHAPES:
        yield one(shape, counts, lengths, device)


def one(shape: str, counts: list[int], lengths: list[int], device: torch.device) -> Figure:
    """Time one batch whose rows have `counts` tokens at the end of `lengths` positions."""
    from kernels.prefill import prefill

    rows, tokens, width = len(counts), sum(counts), -(-max(lengths) // BLOCK_SIZE)
    blocks = rows * width + 1
    keys, values = torch.randn(
        2, blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device
    )
    tables = (torch.randperm(blocks - 1) + 1).view(rows, width).int().to(device)
    queries = torch.randn(tokens, HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)
    seen = torch.tensor(lengths, dtype=torch.int32, device=device)
    out = torch.empty_like(queries)
    taken = seconds(
        lambda: prefill(
            queries,
            keys,
            values,
            tables,
            starts,
            seen,
            max(counts),
            scale=HEAD_DIM**-0.5,
            out=out,
        ),
        device,
    )
    pairs = sum(
        count * length - count * (count - 1) // 2
        for count, length in zip(counts, lengths, strict=True)
    )
    return Figure(
        "prefill",
        shape,
        taken,
        sum(lengths) * 4 * KV_HEADS * HEAD_DIM + 2 * queries.nbytes,
        4 * HEADS * HEAD_DIM * pairs,
        _torchs(queries, rows, device) if counts == lengths else None,
    )


def _torchs(queries: Tensor, rows: int, device: torch.device) -> float:
    own = queries.view(rows, -1, HEADS, HEAD_DIM).transpose(1, 2)
    shape = (rows, KV_HEADS, own.shape[2], HEAD_DIM)
    keys, values = torch.randn(2, *shape, dtype=queries.dtype, device=device)
    return seconds(
        lambda: F.scaled_dot_product_attention(own, keys, values, is_causal=True, enable_gqa=True),
        device,
    )


def main() -> None:
    device = arguments("Rate of paged prefill attention.")
    torch.manual_seed(0)
    for line in table(list(measure(device, reduced=device.type == "cpu")), device):
        print(line)


if __name__ == "__main__":
    main()
