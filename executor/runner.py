"""Runs plans: block copies, one forward pass over all rows, then the draws."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from executor.checks import check_range, check_span, warm_up_plans
from executor.kv import KVCache, block_bytes
from executor.load import LoadedModel
from executor.models.decoder import Batch
from executor.plan import Draw, Drawn, Plan, Row
from executor.sampler import sample
from kernels.dispatch import TorchAttention
from kernels.reference import Layout
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
        batch = self._batch(plan.rows) if plan.rows else None
        self.kv.copy(plan.copies)
        if batch is None:
            return []
        hidden = self._model.forward(batch, self.kv.keys, self.kv.values)
        ends: list[int] = []  # flat index of the last token of each row with draws
        draws: list[tuple[int, Draw]] = []
        end = -1
        for row in plan.rows:
            end += len(row.tokens)
            if row.draws:
                draws.extend((len(ends), draw) for draw in row.draws)
                ends.append(end)
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
        return self._model.forward(self._batch(rows), self.kv.keys, self.kv.values)

    def warm_up(self) -> None:
        """Run one prompt and one decode step in block 1, so that the first request does not pay for it.

        Only before any block is granted.
        """
        for plan in warm_up_plans(self._block_size, self._config.context_length):
            self.run(plan)

    def _batch(self, rows: Sequence[Row]) -> Batch:
        """The rows' tensors, after a check of every id that will index one."""
        size = self._block_size
        counts = [len(row.tokens) for row in rows]
        starts = [row.start for row in rows]
        tables = [np.array(row.blocks, np.int64) for row in rows]
        for row, table in zip(rows, tables, strict=True):
            check_span(row, len(table), size, self._config.context_length)
        ids = np.array([token for row in rows for token in row.tokens], np.int64)
        check_range("token", ids, 0, self._config.vocab_size)
        check_range("block", np.concatenate(tables), NULL_BLOCK + 1, self._num_blocks)
        positions = np.concatenate(
            [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        )
        # Where each row's table starts in all tables laid end to end.
        offsets = np.cumsum([0] + [len(table) for table in tables[:-1]])
        blocks = np.concatenate(tables)[np.repeat(offsets, counts) + positions // size]
        slots = blocks * size + positions % size
        layout = Layout.build(starts, counts, tables, size, self._dtype, self._device)
        return Batch(
            ids=torch.from_numpy(ids).to(self._device),
            positions=torch.from_numpy(positions).to(self._device),
            attention=TorchAttention(layout, torch.from_numpy(slots).to(self._device)),
        )
