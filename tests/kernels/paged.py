"""Sequences in a paged cache of which every other slot is poison, for the tests of attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from kernels.options import Options
from kernels.reference import quantised

QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
NAN = float("nan")

# How far results of about 1 may be from float32's. The interpreter cuts bfloat16 off where devices round.
CLOSE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


@dataclass(slots=True)
class Paged:
    """One layer's cache and the tables of some sequences in it. What they do not own is NaN."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None
    tables: Tensor
    lengths: Tensor

    def owned(self) -> Tensor:
        """[num_blocks, block_size] bool: the slots that hold something."""
        size = self.keys.shape[1]
        mine = torch.zeros(self.keys.shape[:2], dtype=torch.bool)
        for table, length in zip(self.tables, self.lengths.tolist(), strict=True):
            for index in range(-(-length // size)):
                mine[int(table[index]), : length - index * size] = True
        return mine

    def spread(self) -> Paged:
        """The same in tensors of which no two have the same strides."""
        size, heads = self.values.shape[1:3]
        many = self.values.repeat(1, 3, 2, 1) if self.values.dtype not in QUANTISED else None
        if many is None:  # torch repeats bytes, not float8
            many = self.values.view(torch.uint8).repeat(1, 3, 2, 1).view(self.values.dtype)
        values = many[:, :size, :heads]
        key_scales, value_scales = (
            None if scales is None else torch.cat([scales] * times, dim=2)[..., :heads]
            for scales, times in ((self.key_scales, 2), (self.value_scales, 3))
        )
        return Paged(self.keys, values, key_scales, value_scales, self.tables, self.lengths)

    @classmethod
    def random(
        cls,
        lengths: list[int],
        *,
        kv_heads: int = 2,
        head_dim: int = 64,
        block_size: int = 16,
        stored: torch.dtype = torch.float32,
        order: list[int] | None = None,  # block ids to use, none twice; None: shuffled ones
        key_size: float = 1.0,
        value_size: float = 1.0,
    ) -> Paged:
        needed = [-(-length // block_size) for length in lengths]
        if order is None:
            order = (torch.randperm(sum(needed) + 3) + 1).tolist()
        blocks = max(order, default=0) + 2
        shape = (blocks, block_size, kv_heads, head_dim)
        # Past a row's blocks its table names blocks of poison: the null block and one that nobody owns.
        tables = torch.zeros(len(lengths), max(needed) + 2, dtype=torch.int32)
        tables[:, 1::2] = blocks - 1
        owned = torch.zeros(blocks, block_size, dtype=torch.bool)
        for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
            mine, order = order[:count], order[count:]
            tables[row, :count] = torch.tensor(mine, dtype=torch.int32)
            for index, block in enumerate(mine):
                owned[block, : length - index * block_size] = True
        sizes = (key_size, value_size)
        pairs = [_filled(torch.randn(shape) * size, owned, stored) for size in sizes]
        (keys, key_scales), (values, value_scales) = pairs
        counts = torch.tensor(lengths, dtype=torch.int32)
        return cls(keys, values, key_scales, value_scales, tables, counts)

    def scales(self) -> dict[str, Any]:
        return {"key_scales": self.key_scales, "value_scales": self.value_scales}


def _filled(content: Tensor, owned: Tensor, stored: torch.dtype) -> tuple[Tensor, Tensor | None]:
    if stored not in QUANTISED:
        return content.masked_fill(~owned[..., None, None], NAN).to(stored), None
    values, scales = quantised(content, stored)
    poison = 0x7F  # NaN in both kinds of float8
    values.view(torch.uint8)[~owned] = poison
    return values, scales.masked_fill(~owned[..., None], NAN)


def options(heads: int, **asked: float | bool | None) -> Options:
    """Options by name: a window and a soft-cap as numbers, sinks and slopes as True."""
    window, softcap = asked.get("window"), asked.get("softcap")
    return Options(
        window=None if window is None else int(window),
        softcap=softcap,
        sinks=torch.randn(heads) if asked.get("sinks") else None,
        slopes=2 ** -(torch.arange(heads) % 8 + 1).float() if asked.get("slopes") else None,
    )


def assert_close(got: Tensor, wanted: Tensor) -> None:
    """Equal as far as the type of `got` allows."""
    close = CLOSE[got.dtype]
    torch.testing.assert_close(got.float(), wanted.float(), rtol=close, atol=close)


def assert_close_for_their_size(got: Tensor, wanted: Tensor) -> None:
    """Each head's error is as small beside the largest number in it as 16 bits of `got` allow."""
    error = (got.float() - wanted.float()).abs().amax(-1) / wanted.float().abs().amax(-1)
    assert error.max() < {torch.float16: 2e-3, torch.bfloat16: 1e-2}[got.dtype]


class Watched:
    """A paged cache's tables amid other memory, and what kernels load of them and of the cache."""

    def __init__(self, paged: Paged, monkeypatch: pytest.MonkeyPatch) -> None:
        rows, width = paged.tables.shape
        # Ids past the end name no block at all.
        self._memory = torch.full((rows + 2, width + 64), 2**31 - 1, dtype=torch.int32)
        self.tables = self._memory[1:-1, :width]
        self.tables.copy_(paged.tables)
        self._read: list[NDArray[np.uint64]] = []
        load = InterpreterBuilder.create_masked_load

        def watched(builder: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
            self._read.append(pointers.data[mask.data])
            return load(builder, pointers, mask, *rest)

        monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watched)

    def slots_read(self, cache: Tensor) -> Tensor:
        """[num_blocks, block_size] bool: which slots of keys, values or scales anything was read of."""
        places = np.concatenate(self._read).astype(np.int64) - cache.data_ptr()
        inside = places[(places >= 0) & (places < cache.nbytes)]
        size = cache[0, 0].nbytes
        read = np.zeros(cache.shape[0] * cache.shape[1], bool)
        read[inside // size] = True
        return torch.from_numpy(read).view(cache.shape[:2])

    def entries_read(self) -> list[list[int]]:
        """Of each row, the columns that were read; other memory around the tables must not be among them."""
        places = (np.unique(np.concatenate(self._read)) - self._memory.data_ptr()) // 4
        read = np.zeros(self._memory.numel(), bool)
        read[places[places < read.size]] = True
        rows = read.reshape(self._memory.shape)
        assert not rows[[0, -1]].any()
        return [np.flatnonzero(row).tolist() for row in rows[1:-1]]
