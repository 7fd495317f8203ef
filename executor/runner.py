"""Runs plans: block copies, one forward pass over all rows, then the draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from executor.checks import check_range, check_span, warm_up_plans
from executor.kv import KVCache, block_bytes
from executor.load import LoadedModel
from executor.models.decoder import Batch
from executor.plan import Draw, Drawn, Plan, Row
from executor.sampler import sample
from kernels.dispatch import TORCH, PagedAttention
from kernels.reference import padded
from wire.memory import NULL_BLOCK


class Runner:
    """A model and its KV tensors on one device. Not safe for use by several threads at once."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        """Allocate the KV tensors.

        Args:
            num_blocks: of the pool, the null block included.
            block_size: token slots per block.
            dtype: of K and V; the model's own.

        Raises:
            ValueError: another dtype than the model's.
        """
        if dtype != loaded.model.dtype:
            raise ValueError(
                f"K and V in {dtype} need a model in {dtype}, not {loaded.model.dtype}"
            )
        self._model = loaded.model
        self._config = loaded.config
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._dtype = dtype
        self._device = torch.device(device)
        self.kv = KVCache(
            loaded.config,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
            device=self._device,
        )

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of one block, all layers."""
        return block_bytes(self._config, self._block_size, self._dtype)

    def prepare(self, plan: Plan) -> None:
        """Nothing of a plan is laid out before its tokens are known."""

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[Drawn]:
        """Run one step. Nothing has changed when it raises.

        Returns:
            One `Drawn` per draw, rows in plan order, then draws in row order.

        Raises:
            ValueError: a token, block or position is out of range, or a table is too short.
        """
        rows = plan.rows
        laid = self._batch(rows) if rows else None
        self.kv.copy(plan.copies)
        if laid is None:
            return []
        batch, places = laid
        hidden = self._model.forward(batch, self.kv.keys, self.kv.values)
        ends: list[int] = []  # where the last token of each row with draws is in the batch
        draws: list[tuple[int, Draw]] = []
        end = -1
        for row in rows:
            end += len(row.tokens)
            if row.draws:
                draws.extend((len(ends), draw) for draw in row.draws)
                ends.append(int(places[end]))
        if not ends:
            return []
        last = torch.tensor(ends, device=self._device)
        return sample(self._model.logits(hidden[last]), draws)

    @torch.inference_mode()
    def compute(self, rows: Sequence[Row]) -> torch.Tensor:
        """[tokens, hidden]: the model's state after its last layer for every token of the rows.

        Raises:
            ValueError: as `run`.
        """
        batch, places = self._batch(rows)
        hidden = self._model.forward(batch, self.kv.keys, self.kv.values)
        return hidden[torch.from_numpy(places).to(self._device)]

    def warm_up(self) -> None:
        """Run one prompt and one decode step in block 1, so that the first request does not pay for it.

        Only before any block is granted.
        """
        for plan in warm_up_plans(self._block_size, self._config.context_length):
            self.run(plan)

    def _batch(self, rows: Sequence[Row]) -> tuple[Batch, NDArray[np.int64]]:
        """The rows' tensors, after a check of every id that will index one, and the place in them of each
        token: rows of one token come first, as `PagedAttention` asks."""
        size = self._block_size
        counts = np.array([len(row.tokens) for row in rows], np.int64)
        starts = np.array([row.start for row in rows], np.int64)
        tables = [np.array(row.blocks, np.int64) for row in rows]
        for row, table in zip(rows, tables, strict=True):
            check_span(row, len(table), size, self._config.context_length)
        ids = np.array([token for row in rows for token in row.tokens], np.int64)
        check_range("token", ids, 0, self._config.vocab_size)
        check_range("block", np.concatenate(tables), NULL_BLOCK + 1, self._num_blocks)
        ends = np.cumsum(counts)
        positions = np.arange(len(ids)) + np.repeat(starts - (ends - counts), counts)
        # Where each row's table starts in all tables laid end to end.
        offsets = np.cumsum([0] + [len(table) for table in tables[:-1]])
        blocks = np.concatenate(tables)[np.repeat(offsets, counts) + positions // size]
        slots = blocks * size + positions % size

        order = np.argsort(counts > 1, kind="stable")  # of rows
        by = np.argsort(np.repeat(counts > 1, counts), kind="stable")  # of tokens
        lengths = (starts + counts)[order]
        single = int((counts == 1).sum())
        every = np.zeros((len(rows), padded(max(map(len, tables)))), np.int32)
        for place, index in enumerate(order):
            every[place, : len(tables[index])] = tables[index]
        chunks = np.cumsum([0, *counts[order[single:]]])

        def sent(array: NDArray[Any], dtype: type = np.int64) -> torch.Tensor:
            return torch.from_numpy(array.astype(dtype)).to(self._device)

        attention = PagedAttention(
            TORCH,
            slots=sent(slots[by]),
            tables=sent(every, np.int32),
            lengths=sent(lengths, np.int32),
            single=single,
            starts=sent(chunks, np.int32) if single < len(rows) else None,
            longest=int(counts.max()),
        )
        return Batch(sent(ids[by]), sent(positions[by]), attention), np.argsort(by)
