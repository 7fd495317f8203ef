"""Runs plans with the native CPU step: one call from token ids to the next tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.checks import check_range, check_span, warm_up_plans
from executor.kv import block_bytes, copy_ids
from executor.load import LoadedModel
from executor.models.config import ModelConfig
from executor.models.decoder import Linear
from executor.plan import Draw, Drawn, Plan, Row
from executor.quantize import Narrow, Quantised, Weights, narrow, of_floats, stacked
from executor.sampler import is_greedy, is_plain, sample, uniform
from kernels.cpu import native
from kernels.cpu.build import Unavailable
from kernels.cpu.features import Variant
from wire.memory import NULL_BLOCK, Copy

Ids = NDArray[np.int32]

_EMBEDDING = "model.embed_tokens"
_AT_ONCE = 2048  # rows brought to 8 bits at a time
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


@dataclass(slots=True)
class _Table:
    """A block table as the step reads it."""

    blocks: list[int]
    ids: Ids
    least: int
    most: int
    address: int

    @classmethod
    def of(cls, blocks: list[int]) -> _Table:
        wide = np.array(blocks, np.int64)
        ids = wide.astype(np.int32)  # what does not fit is refused by `least` and `most`
        least, most = (int(wide.min()), int(wide.max())) if blocks else (0, 0)
        return cls(blocks.copy(), ids, least, most, ids.ctypes.data)


@dataclass(slots=True)
class _Batch:
    """The flat rows of one step; owns what a `Step` points to."""

    ids: Ids  # [tokens]
    starts: Ids  # [rows]
    counts: Ids  # [rows]
    tables: list[_Table]  # of each row
    longest: int = 0  # positions of the longest sequence
    arrays: list[object] = field(default_factory=list)


class NativeRunner:
    """A model and its KV memory on this CPU. Not safe for use by several threads at once."""

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
        packed = _Weights(self._library, loaded, weights, keep=keep)
        model = _model(loaded, packed, block_size, num_blocks)
        if not keep:
            native.give_back()
        model.threads = threads or torch.get_num_threads()
        model.kv = self.kv.memory.ctypes.data
        self._engine = native.Engine(self._library, model, (self.kv.memory, packed.owned))
        self._tables: dict[int, _Table] = {}  # of the last step, by sequence
        self._logits = torch.empty(0, loaded.config.vocab_size)
        self._cosines, self._sines = _angles(loaded.config, 0)

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of one block, all layers."""
        return block_bytes(self._config, self._block_size, self._dtype)

    def run(self, plan: Plan) -> list[Drawn]:
        """Run one step. Nothing has changed when it raises before the draws.

        Returns:
            One `Drawn` per draw, rows in plan order, then draws in row order.

        Raises:
            ValueError: a token, block or position is out of range, or a table is too short.
            MemoryError: there is none for so many tokens.
        """
        if not plan.rows and not plan.copies:
            return []
        batch = self._batch(plan.rows)
        ends: list[int] = []  # flat index of the last token of each row with draws
        kept: list[int] = []  # of each such row: its row of logits, -1 if none is wanted
        draws: list[tuple[int, Draw]] = []
        native_draws: list[tuple[int, Draw]] = []  # made inside the step, with their row of logits
        host_draws: list[
            tuple[int, Draw]
        ] = []  # made by the sampler: edited logits, log-probabilities
        rows = 0
        end = -1
        for row in plan.rows:
            end += len(row.tokens)
            if not row.draws:
                continue
            index = len(ends)
            draws.extend((index, draw) for draw in row.draws)
            ends.append(end)
            wanting = [draw for draw in row.draws if not is_greedy(draw)]
            if not wanting:
                kept.append(-1)
                continue
            for draw in wanting:
                (native_draws if is_plain(draw) else host_draws).append((rows, draw))
            kept.append(rows)
            rows += 1
        best, tokens = self._step(batch, plan.copies, ends, kept, rows, native_draws)
        likeliest, picked = best.tolist(), iter(tokens.tolist())
        sampled = iter(sample(self._logits[:rows], host_draws))
        return [
            Drawn(draw.seq, likeliest[index])
            if is_greedy(draw)
            else Drawn(draw.seq, next(picked))
            if is_plain(draw)
            else next(sampled)
            for index, draw in draws
        ]

    def logits(self, rows: Sequence[Row]) -> Tensor:
        """[tokens, vocab] float32: after every token of the rows, which are written to KV as in `run`.

        Raises:
            ValueError, MemoryError: as `run`.
        """
        batch = self._batch(rows)
        count = len(batch.ids)
        self._step(batch, (), range(count), range(count), count, ())
        return self._logits[:count].clone()

    def warm_up(self) -> None:
        """Run one prompt and one decode step in block 1, so that the first request does not pay for it.

        Only before any block is granted.
        """
        for plan in warm_up_plans(self._block_size, self._config.context_length):
            self.run(plan)

    def _step(
        self,
        batch: _Batch,
        copies: Sequence[Copy],
        ends: Sequence[int],
        kept: Sequence[int],
        rows: int,  # of logits
        draws: Sequence[tuple[int, Draw]],  # with their rows of logits
    ) -> tuple[Ids, Ids]:  # [ends]: the likeliest token of each; [draws]
        if rows > len(self._logits):
            self._logits = torch.empty(rows, self._config.vocab_size)
        if batch.longest > len(self._cosines):
            self._cosines, self._sines = _angles(self._config, batch.longest)
        copied = copy_ids(copies, self.kv.num_blocks).astype(np.int32)
        best = np.empty(len(ends), np.int32)
        addresses = np.array([table.address for table in batch.tables], np.uint64)
        sampled, kept_rows = np.array(ends, np.int32), np.array(kept, np.int32)
        drawn = np.array([_drawn(row, draw) for row, draw in draws], native.DRAW)
        tokens = np.empty(len(draws), np.int32)
        step = native.Step(
            len(batch.ids),
            len(batch.tables),
            len(ends),
            len(copied),
            *(
                array.ctypes.data
                for array in (batch.ids, batch.starts, batch.counts, addresses, copied, sampled)
            ),
            self._cosines.data_ptr(),
            self._sines.data_ptr(),
            kept_rows.ctypes.data,
            self._logits.data_ptr(),
            best.ctypes.data,
            len(draws),
            drawn.ctypes.data,
            tokens.ctypes.data,
        )
        self._engine.run(step)
        return best, tokens

    def _batch(self, rows: Sequence[Row]) -> _Batch:
        """The rows as arrays, after a check of every id that will index memory."""
        size, context = self._block_size, self._config.context_length
        tables: list[_Table] = []
        current: dict[int, _Table] = {}
        for row in rows:
            table = self._tables.get(row.seq)
            if table is None or table.blocks != row.blocks:
                table = _Table.of(row.blocks)
            current[row.seq] = table
            tables.append(table)
        counts = np.array([len(row.tokens) for row in rows], np.int64)
        starts = np.array([row.start for row in rows], np.int64)
        ends = starts + counts
        room = np.array([len(table.blocks) for table in tables], np.int64) * size
        wrong = (counts < 1) | (starts < 0) | (ends > context) | (ends > room)
        for index in np.flatnonzero(wrong).tolist():
            check_span(rows[index], len(rows[index].blocks), size, context)
        ids = np.array([token for row in rows for token in row.tokens], np.int64)
        if rows:
            check_range("token", ids, 0, self._config.vocab_size)
            limits = np.array([(table.least, table.most) for table in tables], np.int64)
            check_range("block", limits, NULL_BLOCK + 1, self.kv.num_blocks)
        self._tables = current
        return _Batch(
            ids.astype(np.int32),
            starts.astype(np.int32),
            counts.astype(np.int32),
            tables,
            int(ends.max()) if rows else 0,
        )


def _drawn(row: int, draw: Draw) -> tuple[int, int, float, float, float, float]:
    """A draw as the step reads it, in the order of `native.DRAW`."""
    sampling = draw.sampling
    point = uniform(sampling.seed, draw.choice, draw.position)
    return row, sampling.top_k, sampling.temperature, sampling.top_p, sampling.min_p, point


def _angles(config: ModelConfig, positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin of at least so many positions, [positions, head_dim / 2] float32."""
    count = _ANGLES
    while count < positions:
        count *= 2
    count = min(count, config.context_length)
    turns = torch.arange(count).float()[:, None] * config.rope.frequencies(config.head_dim)
    factor = config.rope.attention_factor
    return turns.cos() * factor, turns.sin() * factor


class _Weights:
    """Copies of a model's weights as the step wants them."""

    def __init__(
        self, library: native.Library, loaded: LoadedModel, weights: Weights, *, keep: bool
    ) -> None:
        self._library = library
        self._loaded = loaded
        self._weights = weights
        self._file = loaded.file if weights == "file" else None
        self._arena = native.Arena()
        self._wide = loaded.model.dtype == torch.float32
        self._keep = keep
        self.owned: list[object] = []  # what the addresses given out point into

    def vector(self, values: Tensor | None, *names: str) -> int | None:
        """Address of a float32 copy, padded with 0 to whole panels.

        Args:
            names: of its parts, as Hugging Face has them.
        """
        if values is None:
            return None
        return self._padded(self._as_stored(values, names))

    def _as_stored(self, values: Tensor, names: Sequence[str]) -> Tensor:
        file, config = self._file, self._loaded.config
        parts = [file.vector(name, config) for name in names] if file else []
        given = [part for part in parts if part is not None]
        return torch.cat(given) if given and len(given) == len(parts) else values

    def _padded(self, values: Tensor) -> int:
        flat = values.float().numpy(force=True).ravel()
        out = np.zeros(-(-len(flat) // self._library.panel) * self._library.panel, np.float32)
        out[: len(flat)] = flat
        self.owned.append(out)
        return out.ctypes.data

    def matrix(self, weight: Tensor, *, pairs: bool = False) -> int:
        """Address of a packed copy of [outputs, inputs]."""
        own = weight.contiguous()
        packed = self._library.pack(
            self._arena, own.data_ptr(), *own.shape, wide=self._wide, pairs=pairs
        )
        self.owned.append(packed)
        return packed.ctypes.data

    def linear(self, linear: Linear, names: Sequence[str], *, pairs: bool = False) -> native.Linear:
        """Packed; the original is dropped.

        Args:
            names: of its parts, as Hugging Face has them, without `.weight` and `.bias`.
        """
        scales = None
        if (eight := self._narrow(linear)) is not None:
            form, address = native.Form.W8A8, self._packed_narrow(eight, pairs=pairs)
            scales = self._by_column(torch.from_numpy(eight.scales), pairs=pairs)
        elif (quantised := self._quantised(linear, names)) is not None:
            form, address = quantised.form, self._packed(quantised, pairs=pairs)
        else:
            form, address = native.Form.UNITS, self.matrix(linear.weight, pairs=pairs)
        bias = linear.bias
        if bias is not None:
            bias = self._as_stored(bias, [f"{name}.bias" for name in names])
        if not self._keep:
            linear.weight = torch.empty(0)
        held = None if bias is None else self._by_column(bias, pairs=pairs)
        return native.Linear(address, held, scales, form)

    def embedding(self, embedding: Tensor) -> tuple[native.Form, int]:
        """Form and address of a row-major copy."""
        raw = self._file.rows_of_bytes(f"{_EMBEDDING}.weight") if self._file else None
        if raw is None:
            rows = embedding.contiguous()
            self.owned.append(rows)
            return native.Form.UNITS, rows.data_ptr()
        if not self._keep:
            self._loaded.model.embedding = torch.empty(0)
        copied = self._arena.take(raw.nbytes)
        copied[:] = raw.ravel()
        self.owned.append(copied)
        return native.Form.BYTES, copied.ctypes.data

    def _narrow(self, linear: Linear) -> Narrow | None:
        if self._weights != "w8a8":
            return None
        parts = torch.split(linear.weight, _AT_ONCE)
        made = [narrow(part.float().numpy(force=True)) for part in parts]
        given = [part for part in made if part is not None]
        if len(given) < len(made):
            return None
        return Narrow(
            np.concatenate([part.weight for part in given]),
            np.concatenate([part.scales for part in given]),
        )

    def _quantised(self, linear: Linear, names: Sequence[str]) -> Quantised | None:
        if self._weights == "int8":
            parts = torch.split(linear.weight, _AT_ONCE)
            return stacked([of_floats(part.float().numpy(force=True)) for part in parts])
        if self._file is None:
            return None
        config = self._loaded.config
        return stacked([self._file.quantised(f"{name}.weight", config) for name in names])

    def _packed(self, matrix: Quantised, *, pairs: bool) -> int:
        packed = self._library.pack_groups(
            self._arena, matrix.form, matrix.weight, matrix.scales, matrix.offsets, pairs=pairs
        )
        self.owned.append(packed)
        return packed.ctypes.data

    def _packed_narrow(self, matrix: Narrow, *, pairs: bool) -> int:
        outputs, inputs = matrix.weight.shape
        packed = self._library.pack(
            self._arena, matrix.weight.ctypes.data, outputs, inputs // 4, wide=True, pairs=pairs
        )
        self.owned.append(packed)
        return packed.ctypes.data

    def _by_column(self, values: Tensor, *, pairs: bool) -> int:
        """Address of a float32 for each column, in packed order."""
        return self._padded(self._in_turns(values) if pairs else values)

    def _in_turns(self, values: Tensor) -> Tensor:
        """Gates and their partners as vectors in turn, each half padded to whole vectors."""
        lanes = self._library.lanes
        halves = values.float().view(2, -1)
        padded = torch.nn.functional.pad(halves, (0, -halves.shape[1] % lanes))
        return padded.view(2, -1, lanes).transpose(0, 1).reshape(-1)


def _model(
    loaded: LoadedModel, weights: _Weights, block_size: int, num_blocks: int
) -> native.Model:
    """All but the threads and the KV memory."""
    config, decoder = loaded.config, loaded.model
    layers = (native.Layer * config.layers)()
    for index, layer in enumerate(decoder.layers):
        at = f"model.layers.{index}"
        layers[index] = native.Layer(
            weights.vector(layer.input_norm, f"{at}.input_layernorm.weight"),
            weights.vector(layer.post_norm, f"{at}.post_attention_layernorm.weight"),
            weights.vector(layer.query_norm, f"{at}.self_attn.q_norm.weight"),
            weights.vector(layer.key_norm, f"{at}.self_attn.k_norm.weight"),
            weights.linear(layer.qkv, [f"{at}.self_attn.{part}_proj" for part in "qkv"]),
            weights.linear(layer.output, [f"{at}.self_attn.o_proj"]),
            weights.linear(layer.gate_up, [f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj"], pairs=True),
            weights.linear(layer.down, [f"{at}.mlp.down_proj"]),
            layer.window or 0,
            layer.rotated,
        )
    form, embedding = weights.embedding(decoder.embedding)
    head = weights.linear(decoder.head, [_EMBEDDING if config.tied else "lm_head"])
    weights.owned.append(layers)
    return native.Model(
        wide=decoder.dtype == torch.float32,
        hidden=config.hidden,
        intermediate=config.intermediate,
        vocab=config.vocab_size,
        layers=config.layers,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        blocks=num_blocks,
        epsilon=config.norm_epsilon,
        scale=config.head_dim**-0.5,
        embedding_form=form,
        embedding=embedding,
        norm=weights.vector(decoder.norm, "model.norm.weight"),
        head=head,
        layer=ctypes.addressof(layers),
    )
