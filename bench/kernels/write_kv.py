"""Bandwidth of rotating a step's queries and keys and storing its K and V, against torch's own operations.

    python -m bench.kernels.write_kv [--interpret]

The heads are Llama 3 8B's: 32 query heads, 8 KV heads of 128; one layer of a cache of 4096 blocks of 16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.kernels.gpu import Figure, arguments, seconds, table

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCKS = 32, 8, 128, 16, 4096
TOKENS = (1, 64, 256, 2048, 8192)
REDUCED = (3,)


def measure(device: torch.device, *, reduced: bool = False) -> Iterator[Figure]:
    """A figure for each number of tokens and type of cache."""
    for tokens in REDUCED if reduced else TOKENS:
        for stored in (torch.bfloat16, torch.int8, torch.float8_e4m3fn):
            yield one(tokens, stored, device)


def one(tokens: int, stored: torch.dtype, device: torch.device) -> Figure:
    """Time one step of `tokens` tokens."""
    from kernels.write_kv import write_kv

    fused = torch.randn(tokens, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device=device)
    queries, new_keys, new_values = torch.split(fused, [HEADS, KV_HEADS, KV_HEADS], dim=1)
    shape = (BLOCKS, BLOCK_SIZE, KV_HEADS)
    keys, values = (torch.zeros(*shape, HEAD_DIM, dtype=stored, device=device) for _ in range(2))
    scales = None
    if stored.itemsize == 1:
        scales = torch.ones(shape, device=device), torch.ones(shape, device=device)
    slots = torch.randperm(BLOCKS * BLOCK_SIZE)[:tokens].to(device)
    angles = torch.rand(tokens, HEAD_DIM // 2, device=device) * 100
    cos, sin = angles.cos(), angles.sin()
    taken = seconds(
        lambda: write_kv(
            queries,
            new_keys,
            new_values,
            keys,
            values,
            slots,
            cos=cos,
            sin=sin,
            key_scales=scales[0] if scales else None,
            value_scales=scales[1] if scales else None,
        ),
        device,
    )
    moved = 2 * queries.nbytes + new_keys.nbytes + new_values.nbytes + 2 * cos.nbytes
    moved += tokens * 2 * KV_HEADS * (HEAD_DIM * stored.itemsize + (4 if scales else 0))
    ours = None
    if scales is None:
        ours = _torchs(fused, keys, values, slots, torch.cat((cos, cos), 1), device)
    return Figure(
        "write_kv",
        f"{tokens} tokens, {str(stored).removeprefix('torch.')}",
        taken,
        moved,
        6 * (HEADS + KV_HEADS) * HEAD_DIM // 2 * tokens,
        ours,
    )


def _torchs(
    fused: Tensor, keys: Tensor, values: Tensor, slots: Tensor, cos: Tensor, device: torch.device
) -> float:
    turning, new_values = torch.split(fused, [HEADS + KV_HEADS, KV_HEADS], dim=1)
    factors = cos.to(fused.dtype)[:, None]

    def step() -> None:
        turned = torch.roll(turning, HEAD_DIM // 2, dims=-1)
        turning.mul_(factors).addcmul_(turned, factors)
        keys.flatten(0, 1).index_copy_(0, slots, turning[:, HEADS:])
        values.flatten(0, 1).index_copy_(0, slots, new_values)

    return seconds(step, device)


def main() -> None:
    device = arguments("Bandwidth of writing K and V.")
    torch.manual_seed(0)
    for line in table(list(measure(device, reduced=device.type == "cpu")), device):
        print(line)


if __name__ == "__main__":
    main()
