"""The K and V tensors of a pool: the memory behind memd's block ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.models.config import ModelConfig
from executor.staging import put
from kernels.dispatch import TORCH, CopyBlocks
from wire.memory import Copy


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: K and V of `block_size` tokens in all layers."""
    per_token = 2 * config.layers * config.kv_heads * config.head_dim
    return per_token * block_size * dtype.itemsize


def copy_ids(copies: Sequence[Copy], num_blocks: int) -> NDArray[np.int64]:
    """[copies, 2]: source and target of each, checked.

    Raises:
        ValueError: a block id is out of range, or a target is also a source or a target twice.
    """
    ids = np.array([(copy.source, copy.target) for copy in copies], np.int64).reshape(-1, 2)
    if ids.size and (ids.min() < 1 or ids.max() >= num_blocks):
        wrong = ids.min() if ids.min() < 1 else ids.max()
        raise ValueError(f"copy names block {wrong}; blocks are 1 to {num_blocks - 1}")
    written = set(ids[:, 1].tolist())
    if len(written) != len(copies) or not written.isdisjoint(ids[:, 0].tolist()):
        raise ValueError("a copy's target is also a source or a target of another copy")
    return ids


class KVCache:
    """K and V of every block, for all layers.

    Both are [layers, num_blocks, block_size, kv_heads, head_dim]: one layer is contiguous, so is one block
    of it, and a token's heads lie side by side the way the projections produce them. The memory is not
    initialised: whoever reads must know which slots are written.
    """

    __slots__ = ("_copy_blocks", "keys", "num_blocks", "values")

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        copy_blocks: CopyBlocks = TORCH.copy_blocks,
    ) -> None:
        """Allocate.

        Args:
            copy_blocks: what makes the copies.

        Raises:
            MemoryError: the device has not that much.
        """
        shape = (config.layers, num_blocks, block_size, config.kv_heads, config.head_dim)
        self.num_blocks = num_blocks
        self._copy_blocks = copy_blocks
        try:
            self.keys: Tensor = torch.empty(shape, dtype=dtype, device=device)
            self.values: Tensor = torch.empty(shape, dtype=dtype, device=device)
        except RuntimeError as error:
            size = num_blocks * block_bytes(config, block_size, dtype)
            raise MemoryError(
                f"{num_blocks} KV blocks take {size} bytes, which {device} does not have"
                f"{_free(device)}; ask for fewer blocks or less memory"
            ) from error

    def copy(self, copies: Sequence[Copy]) -> None:
        """Make the block copies of one step.

        Raises:
            ValueError: a block id is out of range, or a target is also a source or a target twice.
        """
        if not copies:
            return
        ids = put(copy_ids(copies, self.num_blocks).T.copy(), self.keys.device)
        self._copy_blocks(self.keys, self.values, ids[0], ids[1])


def _free(device: torch.device) -> str:
    """What a GPU has left, for a message."""
    if device.type != "cuda":
        return ""
    free, total = torch.cuda.mem_get_info(device)
    return f": {free} of its {total} bytes are free"
