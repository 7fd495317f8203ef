"""Runs plans where block tables lie on the device: with Triton's kernels on a GPU.

A step's life: table entries that changed are sent, and the step's numbers, in one pinned buffer; the forward
pass, recorded as a graph when all rows decode, and the draws are launched; then the host waits once, for the
tokens. On CPU tensors, under Triton's interpreter, all of this runs but the pinning and the graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor.checks import check_range, check_span, warm_up_plans
from executor.device_sampler import UNSURE, likeliest, sample_there
from executor.graphs import Graphs, Recorder
from executor.kv import KVCache, block_bytes, copy_ids
from executor.load import LoadedModel
from executor.models.decoder import Batch
from executor.plan import Draw, Drawn, Plan, Row
from executor.sampler import sample
from executor.seats import EMPTY, Ids, Seating, Seats
from executor.staging import Staging, put
from kernels.dispatch import Kernels, PagedAttention
from wire.memory import Copy
from wire.sampling import Sampling

_WIDTH_STEP = 16  # table widths in use are multiples of it: kernels are compiled for few of them
_NOWHERE = -1  # the slot of a token that is not stored


@dataclass(slots=True, frozen=True)
class _Shape:
    """What the launches of a step must know on the host."""

    rows: int
    single: int  # rows of one token, which come first
    tokens: int
    width: int  # of the tables, in blocks
    longest_single: int  # positions of the longest of these
    longest: int  # tokens of the longest other row
    ends: Ids  # [rows] flat index of each row's last token


class GpuRunner:
    """A model, its KV tensors and block tables on one device. Not safe for use by several threads at once."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        num_blocks: int,
        block_size: int,
        device: torch.device | str,
        dtype: torch.dtype,
        kernels: Kernels,
        step_tokens: int = 512,
        sequences: int = 256,
        context: int | None = None,
        record: Recorder | None = None,
    ) -> None:
        """Allocate the KV tensors and the step's buffers.

        Args:
            num_blocks: of the pool, the null block included.
            block_size: token slots per block.
            dtype: of K and V; the model's own.
            kernels: what computes attention there.
            step_tokens: most tokens of one step.
            sequences: most sequences of one step.
            context: most positions of a sequence; default, and at most: the model's.
            record: how to record steps that only decode; None: they are launched piece by piece.

        Raises:
            ValueError: another dtype than the model's.
            MemoryError: the device has not that much.
        """
        if dtype != loaded.model.dtype:
            raise ValueError(
                f"K and V in {dtype} need a model in {dtype}, not {loaded.model.dtype}"
            )
        self._model = loaded.model
        self._config = loaded.config
        self._block_size = block_size
        self._dtype = dtype
        self._device = torch.device(device)
        self._kernels = kernels
        self._step_tokens = max(step_tokens, sequences)
        self._most_tokens = max(self._step_tokens, block_size)  # the warm-up fills a block
        self.kv = KVCache(
            loaded.config,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
            device=self._device,
            copy_blocks=kernels.copy_blocks,
        )
        self._context = min(context or loaded.config.context_length, loaded.config.context_length)
        width = min(-(-self._context // block_size), num_blocks - 1)
        width = -(-width // _WIDTH_STEP) * _WIDTH_STEP
        self._seats = Seats(sequences, width, num_blocks)
        self._tables = torch.zeros(sequences + 1, width, dtype=torch.int32, device=self._device)
        tokens, rows = self._most_tokens, sequences
        sizes = dict.fromkeys(("ids", "positions", "slots"), tokens)
        sizes |= {"seats": rows, "lengths": rows, "starts": rows + 1}
        self._staging = Staging(sizes, self._device)
        self._fetched = torch.empty(0, dtype=torch.int64)  # where tokens arrive on the host
        self._graphs = Graphs(self._decode, sequences, record) if record is not None else None

    @property
    def block_bytes(self) -> int:
        """Bytes of K and V of one block, all layers."""
        return block_bytes(self._config, self._block_size, self._dtype)

    def prepare(self, plan: Plan) -> None:
        """Nothing of a plan is laid out before its tokens are known."""

    @torch.inference_mode()
    def run(self, plan: Plan) -> list[Drawn]:
        """Run one step. Nothing has changed when it raises a ValueError.

        Returns:
            One `Drawn` per draw, rows in plan order, then draws in row order.

        Raises:
            ValueError: a token, block or position is out of range, or a table is too short.
            torch.OutOfMemoryError: the device has no memory for so many tokens.
        """
        # Rows of one token first: what `PagedAttention` asks for.
        planned = plan.rows  # built from lanes, so asked for once
        order = sorted(range(len(planned)), key=lambda index: len(planned[index].tokens) > 1)
        rows = [planned[index] for index in order]
        self._check(rows)
        copy_ids(plan.copies, self.kv.num_blocks)  # checked before anything changes
        seating = self._seats.place(rows)
        try:
            self._write_tables(seating)
            self.kv.copy(plan.copies)
            if not rows:
                return []
            place_of = {index: place for place, index in enumerate(order)}
            draws = [
                (place_of[index], draw) for index, row in enumerate(planned) for draw in row.draws
            ]
            return self._drawn(*self._logits(rows, seating.seats, draws))
        except BaseException:
            self._seats.forget()
            raise

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row]) -> Tensor:
        """[tokens, vocab] float32: after every token of the rows, those of one token first; written to KV as
        in `run`.

        Raises:
            ValueError: as `run`.
        """
        ordered = sorted(rows, key=lambda row: len(row.tokens) > 1)
        self._check(ordered)
        seating = self._seats.place(ordered)
        self._write_tables(seating)
        return self._model.logits(self._mixed(self._stage(ordered, seating.seats)))

    def warm_up(self, on_progress: Callable[[float], None] = lambda share: None) -> None:
        """Compile what steps launch and record the graphs. Only before any block is granted.

        Args:
            on_progress: called with the share of the graphs that are recorded.
        """
        for plan in warm_up_plans(self._block_size, self._context):
            self.run(plan)
        if self._device.type == "cuda":
            for plan in self.variants():
                self.run(plan)
        for share in self._recording():
            on_progress(share)

    def variants(self) -> Iterator[Plan]:
        """Steps that together launch every variant of the kernels: a copy, a short chunk, a long one, and a
        token after a context as long as can be, which is cut into splits. In blocks 1 and 2."""
        if self.kv.num_blocks > 2:
            yield Plan(0, [], [Copy(1, 2)])
        most = min(self._seats.width * self._block_size, self._context)
        for start, tokens in ((0, 2), (0, self._step_tokens), (most - 1, 1)):
            count = min(tokens, self._step_tokens, most)
            table = [1] * -(-(start + count) // self._block_size)
            yield Plan(0, [Row(1, start, [0] * count, table)])

    def largest_step(self) -> None:
        """Run a step that takes as much memory as any, and record the largest graph."""
        size, count = self._block_size, self._seats.count
        room = min((self.kv.num_blocks - 1) * size, self._context)
        chunk = min(self._step_tokens - count + 1, room)
        blocks = list(range(1, -(-chunk // size) + 1))
        hot = Sampling(seed=0)
        rows = [
            Row(seq, 0, [0] * (chunk if seq == 0 else 1), blocks, (Draw(seq, 0, 1, hot, (), ()),))
            for seq in range(count)
        ]
        self.run(Plan(0, rows))
        next(iter(self._recording()), None)
        self._seats.forget()

    # ------------------------------------------------------------ inside

    def _recording(self) -> Iterator[float]:
        if self._graphs is None:
            return
        self._pad(0, self._seats.count)
        self._staging.send()
        for done, of in self._graphs.capture():
            yield done / of

    def _check(self, rows: Sequence[Row]) -> None:
        """Everything that will index memory, but the blocks, which `Seats` checks when they are new."""
        tokens = 0
        for row in rows:
            check_span(row, len(row.blocks), self._block_size, self._context)
            tokens += len(row.tokens)
        if tokens > self._most_tokens:
            raise ValueError(f"{tokens} tokens in one step; the most is {self._most_tokens}")
        if rows:
            ids = np.array([token for row in rows for token in row.tokens], np.int64)
            check_range("token", ids, 0, self._config.vocab_size)

    def _write_tables(self, seating: Seating) -> None:
        """Bring the tables on the device up to date; only what changed travels."""
        if len(seating.places):
            changes = put(np.stack((seating.places, seating.entries)), self._device)
            self._tables.view(-1).index_copy_(0, changes[0], changes[1].int())

    def _stage(self, rows: Sequence[Row], seats: Ids) -> _Shape:
        """Write the step's numbers and start sending them."""
        host, size = self._staging.host, self._block_size
        counts = np.array([len(row.tokens) for row in rows], np.int64)
        starts = np.array([row.start for row in rows], np.int64)
        ends = np.cumsum(counts) - 1
        tokens, single = int(ends[-1]) + 1, int((counts == 1).sum())
        positions = np.arange(tokens) + np.repeat(starts - (ends + 1 - counts), counts)
        blocks = [
            row.blocks[place // size]
            for row in rows
            for place in range(row.start, row.start + len(row.tokens))
        ]
        host["ids"][:tokens] = [token for row in rows for token in row.tokens]
        host["positions"][:tokens] = positions
        host["slots"][:tokens] = np.array(blocks, np.int64) * size + positions % size
        host["seats"][: len(rows)] = seats
        host["lengths"][: len(rows)] = starts + counts
        host["starts"][0] = 0
        host["starts"][1 : len(rows) - single + 1] = ends[single:] + 1 - single
        longest_single = int((starts + counts)[:single].max()) if single else 0
        longest = int(counts.max()) if single < len(rows) else 0
        width = -(-int((starts + counts).max()) // size)
        width = min(self._seats.width, -(-width // _WIDTH_STEP) * _WIDTH_STEP)
        return _Shape(len(rows), single, tokens, width, longest_single, longest, ends)

    def _pad(self, rows: int, upto: int) -> None:
        """Make decode rows from `rows` on that read nothing and are stored nowhere."""
        host = self._staging.host
        for name, value in (
            ("ids", 0),
            ("positions", 0),
            ("slots", _NOWHERE),
            ("seats", EMPTY),
            ("lengths", 0),
        ):
            host[name][rows:upto] = value

    def _logits(
        self, rows: Sequence[Row], seats: Ids, draws: list[tuple[int, Draw]]
    ) -> tuple[Tensor, list[tuple[int, Draw]]]:
        """[any, vocab] logits, and the draws with their row of these in place of their row of the plan."""
        shape = self._stage(rows, seats)
        bucket = None
        if self._graphs is not None and shape.single == shape.rows:
            bucket = self._graphs.bucket(shape.rows)
        if self._graphs is not None and bucket is not None:
            self._pad(shape.rows, bucket)
            self._staging.send()
            return self._graphs.replay(bucket), draws
        hidden = self._mixed(shape)
        drawing = sorted({place for place, _ in draws})
        index = {place: row for row, place in enumerate(drawing)}
        last = put(shape.ends[drawing], self._device)
        return self._model.logits(hidden[last]), [(index[place], draw) for place, draw in draws]

    def _mixed(self, shape: _Shape) -> Tensor:
        """[tokens, hidden] of a step of any kind, whose numbers are staged."""
        self._staging.send()
        sent, tokens = self._staging.device, shape.tokens
        attention = PagedAttention(
            self._kernels,
            slots=sent["slots"][:tokens],
            tables=self._tables[:, : shape.width].index_select(0, sent["seats"][: shape.rows]),
            lengths=sent["lengths"][: shape.rows].int(),
            single=shape.single,
            longest_single=shape.longest_single,
            longest=shape.longest,
        )
        if shape.single < shape.rows:
            attention.starts = sent["starts"][: shape.rows - shape.single + 1].int()
        batch = Batch(sent["ids"][:tokens], sent["positions"][:tokens], attention)
        return self._model.forward(batch, self.kv.keys, self.kv.values)

    @torch.inference_mode()
    def _decode(self, rows: int) -> Tensor:
        """[rows, vocab] logits of a step that only decodes: what a graph records."""
        sent = self._staging.device
        attention = PagedAttention(
            self._kernels,
            slots=sent["slots"][:rows],
            tables=self._tables.index_select(0, sent["seats"][:rows]),
            lengths=sent["lengths"][:rows].int(),
            single=rows,
        )
        batch = Batch(sent["ids"][:rows], sent["positions"][:rows], attention)
        return self._model.logits(self._model.forward(batch, self.kv.keys, self.kv.values))

    def _drawn(self, logits: Tensor, draws: list[tuple[int, Draw]]) -> list[Drawn]:
        """The tokens, on the host: the one place where a step waits for its device."""
        found = self._fetch(sample_there(logits, likeliest(logits), draws)) if draws else []
        if self._device.type == "cuda" and not draws:
            torch.cuda.current_stream(self._device).synchronize()
        unsure = [index for index, token in enumerate(found) if token == UNSURE]
        drawn = [Drawn(draw.seq, token) for (_, draw), token in zip(draws, found, strict=True)]
        if unsure:
            rows = sorted({draws[index][0] for index in unsure})
            table = logits[put(np.array(rows, np.int64), self._device)].cpu()
            again = sample(table, [(rows.index(draws[i][0]), draws[i][1]) for i in unsure])
            for index, one in zip(unsure, again, strict=True):
                drawn[index] = one
        return drawn

    def _fetch(self, tokens: Tensor) -> list[int]:
        if self._device.type != "cuda":
            return tokens.tolist()
        if len(self._fetched) < len(tokens):
            self._fetched = torch.empty(2 * len(tokens), dtype=torch.int64, pin_memory=True)
        self._fetched[: len(tokens)].copy_(tokens, non_blocking=True)
        torch.cuda.current_stream(self._device).synchronize()
        return self._fetched[: len(tokens)].tolist()
