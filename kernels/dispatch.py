"""Which code computes attention on which device: the one place where that is decided.

A decoder hands each layer's heads to an `Attention`, which knows where the step's K and V go and what each
token sees: `PagedAttention`, over a set of `Kernels` that read block tables on the device. There are two of
them: Triton's, and plain torch (`kernels.reference`) for wherever those cannot run.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from kernels import reference
from kernels.options import Options

Choice = Literal["torch", "triton"]

LEAST_CAPABILITY = (8, 0)  # of NVIDIA's GPUs: the first with bfloat16 and asynchronous copies


class Unavailable(Exception):
    """Why these kernels cannot run here, and what to do, in one line."""


class Attention(Protocol):
    """The attention of one step's flat tokens."""

    def begin(self, cos: Tensor, sin: Tensor) -> None:
        """Take the rotary angles of each token, [tokens, head_dim / 2] float32, before the first layer."""

    def attend(
        self,
        turning: Tensor,  # [tokens, heads + kv_heads, head_dim]: queries, then keys; may be changed
        values: Tensor,  # [tokens, kv_heads, head_dim]
        key_cache: Tensor,  # one layer, [num_blocks, block_size, kv_heads, head_dim]
        value_cache: Tensor,
        *,
        rotated: bool,
        window: int | None,
        scale: float,
    ) -> Tensor:  # [tokens, heads, head_dim]
        """Rotate queries and keys if `rotated`, store K and V, then attend to all each token may see."""


class WriteKV(Protocol):
    def __call__(
        self,
        queries: Tensor,  # [tokens, heads, head_dim], rotated in place
        new_keys: Tensor,  # [tokens, kv_heads, head_dim]
        new_values: Tensor,
        keys: Tensor,  # [num_blocks, block_size, kv_heads, head_dim]
        values: Tensor,
        slots: Tensor,  # [tokens] int64; -1: store nothing
        *,
        cos: Tensor | None = None,  # [tokens, head_dim / 2] float32; None: no rotation
        sin: Tensor | None = None,
    ) -> None: ...


class Decode(Protocol):
    def __call__(
        self,
        queries: Tensor,  # [rows, heads, head_dim]
        keys: Tensor,
        values: Tensor,
        tables: Tensor,  # [rows, width] int32
        lengths: Tensor,  # [rows] int32; 0: nothing to attend to
        *,
        scale: float,
        options: Options = ...,
        out: Tensor | None = None,
        longest: int | None = None,  # the largest of `lengths`, if known
    ) -> Tensor: ...


class Prefill(Protocol):
    def __call__(
        self,
        queries: Tensor,  # [tokens, heads, head_dim]
        keys: Tensor,
        values: Tensor,
        tables: Tensor,  # [rows, width] int32
        starts: Tensor,  # [rows + 1] int32: row r's queries are starts[r] .. starts[r + 1]
        lengths: Tensor,  # [rows] int32: of the positions, of which the queries are the last
        longest: int,  # most queries of one row
        *,
        scale: float,
        options: Options = ...,
        out: Tensor | None = None,
    ) -> Tensor: ...


class CopyBlocks(Protocol):
    def __call__(
        self,
        keys: Tensor,  # [layers, num_blocks, block_size, kv_heads, head_dim]
        values: Tensor,
        sources: Tensor,  # [copies] int64
        targets: Tensor,
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """What computes on one kind of device, all with block tables that lie there."""

    name: Choice
    write_kv: WriteKV
    decode: Decode
    prefill: Prefill
    copy_blocks: CopyBlocks


TORCH = Kernels(
    "torch", reference.write_kv, reference.decode, reference.prefill, reference.copy_blocks
)
"""Plain torch, for any device."""


def kernels_for(choice: Choice, device: torch.device) -> Kernels:
    """The kernels to launch on `device`.

    Raises:
        Unavailable: they cannot run there.
    """
    if reason := why_not(choice, device):
        raise Unavailable(reason)
    if choice == "torch":
        return TORCH
    from kernels.copy_blocks import copy_blocks
    from kernels.decode import decode
    from kernels.prefill import prefill
    from kernels.write_kv import write_kv

    return Kernels(choice, write_kv, decode, prefill, copy_blocks)


def why_not(choice: Choice, device: torch.device) -> str | None:
    """One line that says why `choice` cannot compute on `device`, or None if it can."""
    if choice != "triton":
        return None
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed: pip install 'pagekeeper[gpu]', or use --kernels torch"
    if device.type == "cpu":
        if interpreted():
            return None
        return (
            "Triton compiles for GPUs and the device is a CPU: use --kernels auto, or set "
            "TRITON_INTERPRET=1 to run the kernels in Triton's interpreter, thousands of times slower"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY and torch.version.hip is None:
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}, the kernels need {LEAST_CAPABILITY[0]}."
            f"{LEAST_CAPABILITY[1]} or more (Ampere, 2020): use --kernels torch --dtype float32"
        )
    return None


def interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(slots=True)
class PagedAttention:
    """`Attention` by kernels that read block tables on the device.

    Rows with one token come first in the flat batch and go to `decode`, the rest to one launch of `prefill`:
    a single query would leave most of a prefill tile empty, and only `decode` splits a long context.
    """

    kernels: Kernels
    slots: Tensor  # [tokens] int64, where each token's K and V go; -1: nowhere
    tables: Tensor  # [rows, width] int32
    lengths: Tensor  # [rows] int32, positions each row sees, its own included; 0: an empty row
    single: int  # rows with one token
    longest_single: int | None = None  # the largest of their lengths, if known
    starts: Tensor | None = (
        None  # [rows - single + 1] int32, into the tokens behind the single ones
    )
    longest: int = 0  # most tokens of one of the other rows
    cos: Tensor | None = None
    sin: Tensor | None = None

    def begin(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin

    def attend(
        self,
        turning: Tensor,
        values: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        *,
        rotated: bool,
        window: int | None,
        scale: float,
    ) -> Tensor:
        kv_heads = key_cache.shape[2]
        queries, keys = torch.split(turning, [turning.shape[1] - kv_heads, kv_heads], dim=1)
        cos, sin = (self.cos, self.sin) if rotated else (None, None)
        self.kernels.write_kv(
            queries, keys, values, key_cache, value_cache, self.slots, cos=cos, sin=sin
        )
        options, single = Options(window=window), self.single
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        if single:
            self.kernels.decode(
                queries[:single],
                key_cache,
                value_cache,
                self.tables[:single],
                self.lengths[:single],
                scale=scale,
                options=options,
                out=out[:single],
                longest=self.longest_single,
            )
        if self.starts is not None:
            self.kernels.prefill(
                queries[single:],
                key_cache,
                value_cache,
                self.tables[single:],
                self.starts,
                self.lengths[single:],
                self.longest,
                scale=scale,
                options=options,
                out=out[single:],
            )
        return out
