"""Runs plans with the native CPU step: one call from token ids to the next tokens."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from typing import Literal

import torch
from msgspec import Struct
from torch import Tensor

from executor.checks import warm_up_plans
from executor.kv import block_bytes, copy_ids
from executor.load import LoadedModel
from executor.models.config import ModelConfig
from executor.native_batch import Batch, Batches, Ints
from executor.native_weights import NativeWeights, model_of
from executor.plan import Drawn, Draws, Plan, Row
from executor.quantize import Weights
from executor.sampler import sample
from kernels.cpu import native
from kernels.cpu.build import Unavailable
from kernels.cpu.features import Variant

_ANGLES = 1024  # positions whose angles are computed at first; doubled when they are not enough


def why_not(loaded: LoadedModel, dtype: torch.dtype, block_size: int = 16) -> str | None:
    """One line that says why the native step cannot run this model here, or None if it can.

    Builds the step if this was not done before, which takes some seconds.
    """
    config = loaded.config
    if loaded.model.device.type != "cpu":
        return f"the native step runs on the CPU, the model is on {loaded.model.device}"
    if dtype not in (torch.bfloat16, torch.float32) or dtype != loaded.model.dtype:
        return f"the native step has no {dtype} cache for {loaded.model.dtype} weights"
    if config.head_dim % 16 or not 16 <= config.head_dim <= native.MOST_HEAD:
        return (
            f"the native step has no heads of {config.head_dim} dimensions: it has multiples of 16 "
            f"up to {native.MOST_HEAD}"
        )
    if dtype == torch.bfloat16:
        if config.hidden % 2 or config.intermediate % 2:
            return "the native step needs even hidden and intermediate sizes in bfloat16"
        if block_size % 2:
            return f"the native step needs an even block size in bfloat16, not {block_size}"
    try:
        native.load()
    except Unavailable as reason:
        return str(reason)
    return None


def choose_weights(
    asked: Literal["auto", "plain", "file", "int8", "w8a8"],
    loaded: LoadedModel,
    dtype: torch.dtype,
) -> Weights:
    """How to hold the weights.

    Raises:
        ValueError: what is asked for does not fit the model or the type; says what does.
    """
    quantised = loaded.file.quantised_matrices() if loaded.file else (0, 0)
    if asked == "plain" or (asked == "auto" and (dtype != torch.bfloat16 or not quantised[0])):
        return "plain"
    if dtype != torch.bfloat16:
        raise ValueError(f"--weights {asked} needs --dtype bfloat16; in float32 weights stay plain")
    if asked == "int8" or asked == "w8a8":
        return asked
    if not quantised[0]:
        raise ValueError(
            "--weights file: the model has no weights in Q4_0, Q4_1 or Q8_0, as GGUF files may; "
            "use --weights int8 or --weights plain"
        )
    return "file"


class NativeKV:
    """K and V of every block, in the layout of the native step."""

    __slots__ = ("memory", "num_blocks")

    def __init__(self, num_blocks: int, nbytes: int) -> None:
        self.num_blocks = num_blocks
        self.memory = native.huge(nbytes)  # [bytes]; pages come from the system as they are written


class _Ready(Struct):
    """A step that lacks nothing but its token ids."""

    plan: Plan
    batch: Batch
    step: native.Step
    logits: Tensor  # [batch.logits or more, vocab]
    best: Ints  # [ends], as all after it filled by the step: the likeliest token of each
    picked: Ints  # [picks]
    owned: tuple[object, ...]  # what else the step points to


class NativeRunner:
    """A model and its KV memory on this CPU. Not for use by several threads at once, but for `prepare`."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device | str,
        dtype: torch.dtype,
        threads: int | None = None,
        weights: Weights = "plain",
        keep: bool = False,
        variant: Variant | None = None,
    ) -> None:
        """Pack the weights and reserve the KV memory. Ask `why_not` first.

        Args:
            num_blocks: of the pool, the null block included.
            block_size: token slots per block.
            device: the CPU.
            dtype: of K and V; the model's own.
            threads: default: as many as torch uses.
            weights: how they are held: as they are, as the GGUF file has them, in 8 bits, or in 8 bits for
                inputs in 8 bits.
            keep: leave the weights in `loaded`, to be used otherwise as well. By default each is dropped
                once it is packed, so that there are never two copies of the model.
            variant: how to build the step; default: the fastest this CPU can run.

        Raises:
            Unavailable: there is no native step here.
            MemoryError: no memory or no thread is to be had.
        """
        self.weights = weights
        self._config = loaded.config
        self._block_size = block_size
        self._dtype = dtype
        self._library = native.load(variant)
        self.kv = NativeKV(num_blocks, num_blocks * self.block_bytes + native.SLACK)
        packed = NativeWeights(self._library, loaded, weights, keep=keep)
        model = model_of(loaded, packed, block_size, num_blocks)
        if not keep:
            native.give_back()
        model.threads = threads or torch.get_num_threads()
        model.kv = self.kv.memory.ctypes.data
        self._engine = native.Engine(self._library, model, (self.kv.memory, packed.owned))
        context, vocab = loaded.config.context_length, loaded.config.vocab_size
        self._batches = Batches(block_size, num_blocks, context, vocab)
        # Questions to tensors cost more, between two steps, than all that is asked.
        self._logits, self._logit_rows = torch.empty(0, vocab), 0
        self._turn(0)
        self._ready: _Ready | None = None  # what was laid out beforehand
        self._laying = threading.Lock()  # `run` lays out too, and `prepare` may come meanwhile

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of one block, all layers."""
        return block_bytes(self._config, self._block_size, self._dtype)

    def prepare(self, plan: Plan) -> None:
        """Lay out the plan that is run next, while another thread may be in `run`.

        Token ids are not looked at; nothing else may change before `run`, which takes another plan as well.

        Raises:
            ValueError: as `run`, but for tokens.
        """
        self._ready = self._lay_out(plan)

    def run(self, plan: Plan) -> Draws:
        """Run one step. Nothing has changed when it raises before the draws.

        Returns:
            One `Drawn` per draw, rows in plan order, then draws in row order.

        Raises:
            ValueError: a token, block or position is out of range, or a table is too short.
            MemoryError: there is none for so many tokens.
        """
        ready, self._ready = self._ready, None
        if ready is None or ready.plan is not plan:
            if not plan.computes:
                return []
            ready = self._lay_out(plan)
        batch = ready.batch
        self._step(ready)
        if not batch.ends:
            return []
        sampled: list[Drawn] = []
        if batch.draws and (hosts := batch.hosts()):
            sampled = sample(ready.logits[: batch.logits], hosts)
        return batch.drawn(ready.best, ready.picked, sampled)

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """[tokens, vocab] float32: after every token of the rows, which are written to KV as in `run`.

        Raises:
            ValueError, MemoryError: as `run`.
        """
        batch = self._batches.of(rows)
        batch.logits = batch.tokens
        batch.ends = batch.kept = array("i", range(batch.tokens))
        ready = self._ready_for(Plan(0, list(rows)), batch)
        self._step(ready)
        return ready.logits[: batch.tokens].clone()

    def warm_up(self) -> None:
        """Run one prompt and one decode step in block 1, so that the first request does not pay for it.

        Only before any block is granted.
        """
        for plan in warm_up_plans(self._block_size, self._config.context_length):
            self.run(plan)

    def _lay_out(self, plan: Plan) -> _Ready:
        with self._laying:
            return self._ready_for(plan, self._batches.of(plan.others, plan.lanes))

    def _ready_for(self, plan: Plan, batch: Batch) -> _Ready:
        if batch.logits > self._logit_rows:
            self._logits = torch.empty(batch.logits, self._config.vocab_size)
            self._logit_rows = batch.logits
        if batch.longest > self._positions:
            self._turn(batch.longest)
        copied = array("i")
        if plan.copies:
            copied = array("i", copy_ids(plan.copies, self.kv.num_blocks).ravel())
        # Filled by the step, whatever is in them.
        best, picked = batch.ends[:], batch.positions[:]
        parts = (
            batch.starts, batch.counts, batch.addresses, copied, batch.ends, batch.kept, best,
            batch.packed, batch.positions, picked,
        )  # fmt: skip
        starts, counts, tables, pairs, ends, kept, likeliest, drawn, positions, tokens = [
            part.buffer_info()[0] for part in parts
        ]
        cosines, sines = self._angles_at
        step = native.step_of(
            tokens=batch.tokens,
            rows=len(batch.starts),
            outputs=len(batch.ends),
            copies=len(plan.copies),
            ids=0,
            ahead=batch.ahead,
            starts=starts,
            counts=counts,
            tables=tables,
            copied=pairs,
            sampled=ends,
            cosines=cosines,
            sines=sines,
            kept=kept,
            logits=self._logits.data_ptr() if batch.logits else 0,
            best=likeliest,
            draws=len(picked),
            drawn=drawn,
            positions=positions,
            picked=tokens,
        )
        return _Ready(plan, batch, step, self._logits, best, picked, (copied, self._angles))

    def _turn(self, positions: int) -> None:
        """Have angles for so many positions."""
        self._angles = cosines, sines = _angles(self._config, positions)
        self._positions = len(cosines)
        self._angles_at = cosines.data_ptr(), sines.data_ptr()

    def _step(self, ready: _Ready) -> None:
        """Put in the tokens, and go."""
        ids = self._batches.ids(ready.plan.others, ready.plan.lanes)
        ready.step[native.IDS] = ids.buffer_info()[0]
        self._engine.run(ready.step)


def _angles(config: ModelConfig, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin of at least so many positions, [positions, head_dim / 2] float32."""
    count = _ANGLES
    while count < positions:
        count *= 2
    count = min(count, config.context_length)
    turns = torch.arange(count).float()[:, None] * config.rope.frequencies(config.head_dim)
    factor = config.rope.attention_factor
    return turns.cos() * factor, turns.sin() * factor
