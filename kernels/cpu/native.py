"""ctypes twin of step.cpp's interface. The structures must match field by field.

Calls release the GIL. Pointers are not checked here: whoever makes a `Step` has checked every id in it.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import struct
import weakref
from array import array
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_double, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kernels.cpu.build import Unavailable, best_variant, forget, library
from kernels.cpu.features import Variant

MOST_HEAD = 256  # dimensions of a head
SLACK = 64  # bytes behind the KV memory: a vector of keys may reach past the last block
_HUGE = 2 << 20  # bytes of a huge page
_LINE = 64  # bytes of a cache line
_CHUNK = 32 << 20  # bytes an arena takes from the system at once
GROUP = 32  # inputs of a quantised weight that share a scale
TURNED = 64  # inputs that are turned together for W8A8

Bytes = NDArray[np.uint8]
Halves = NDArray[np.float16]
Floats = NDArray[np.float32]


class Form(enum.IntEnum):
    """How the weights of a product are stored."""

    UNITS = 0  # bfloat16 or float32
    NIBBLES = 1  # offset + scale * (0 .. 15)
    BYTES = 2  # scale * (-128 .. 127)
    W8A8 = 3  # scale of the output * (-127 .. 127), for inputs in 8 bits


class Linear(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("form", c_int64),
    )


class Layer(Structure):
    _fields_ = (
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv", Linear),
        ("output", Linear),
        ("gate_up", Linear),
        ("down", Linear),
        ("window", c_int64),
        ("rotated", c_int64),
    )


class Model(Structure):
    _fields_ = (
        ("wide", c_int64),
        ("hidden", c_int64),
        ("intermediate", c_int64),
        ("vocab", c_int64),
        ("layers", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("block_size", c_int64),
        ("blocks", c_int64),
        ("threads", c_int64),
        ("epsilon", c_double),
        ("scale", c_double),
        ("embedding_form", c_int64),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("head", Linear),
        ("layer", c_void_p),
        ("kv", c_void_p),
    )


# `Step` of step.cpp, in 64 bits a field, in the order of `step_of`. (ctypes' structures take longer to make.)
Step: TypeAlias = "array[int]"
TOKENS, ROWS, OUTPUTS, COPIES, IDS, DRAWS = 0, 1, 2, 3, 4, 16  # places in it


def step_of(
    *,
    tokens: int,
    rows: int,
    outputs: int,
    copies: int,
    ids: int,
    ahead: int,
    starts: int,
    counts: int,
    tables: int,
    copied: int,
    sampled: int,
    cosines: int,
    sines: int,
    kept: int,
    logits: int,
    best: int,
    draws: int,
    drawn: int,
    positions: int,
    picked: int,
) -> Step:
    """A step; what points to memory is an address."""
    return array(
        "q",
        (
            tokens, rows, outputs, copies, ids, ahead, starts, counts, tables, copied, sampled, cosines,
            sines, kept, logits, best, draws, drawn, positions, picked,
        ),
    )  # fmt: skip


# One draw from a row of logits, as the step reads it. top_k 0 keeps all; `stream`: see `executor.sampler`.
DRAW = np.dtype(
    [
        ("row", np.int64),
        ("top_k", np.int64),
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_p", np.float64),
        ("stream", np.uint64),
    ]
)
pack_draw = struct.Struct("=qqdddQ").pack  # one of them


def huge(nbytes: int) -> Bytes:
    """Zeroed memory, taken from the system page by page as it is written; huge pages if it is large.

    Raises:
        MemoryError: the system does not promise so much.
    """
    if nbytes < _HUGE:
        room = np.zeros(nbytes + _LINE, np.uint8)
        skipped = -room.ctypes.data % _LINE
        return room[skipped : skipped + nbytes]
    try:
        pages = mmap.mmap(-1, nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"the system has no {nbytes / 2**30:.1f} GiB to give") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(pages, np.uint8)
    skipped = -whole.ctypes.data % _HUGE
    return whole[skipped : skipped + nbytes]


class Arena:
    """Memory for many weights in few huge pages."""

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> Bytes:
        """Zeroed, and beginning on a cache line; what is left of a chunk that is too small is given up."""
        if nbytes > len(self._free):
            self._free = huge(max(nbytes, _CHUNK))
        taken, self._free = self._free[:nbytes], self._free[-(-nbytes // _LINE) * _LINE :]
        return taken


class Library:
    """A build of step.cpp, loaded."""

    def __init__(self, path: Path, variant: Variant) -> None:
        """
        Raises:
            Unavailable: the file cannot be loaded.
        """
        self.variant = variant
        try:
            loaded = ctypes.CDLL(str(path))
            loaded.pk_lanes.restype = c_int64  # any file of the name will not do
        except (OSError, AttributeError) as error:
            raise Unavailable(f"the native step cannot be loaded: {error}") from error
        loaded.pk_packed.argtypes = [c_int64, c_int64, c_int64]
        loaded.pk_packed.restype = c_int64
        loaded.pk_pack.argtypes = [c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64]
        loaded.pk_pack.restype = None
        loaded.pk_packed_groups.argtypes = [c_int64, c_int64, c_int64]
        loaded.pk_packed_groups.restype = c_int64
        loaded.pk_pack_groups.argtypes = [*[c_void_p] * 4, *[c_int64] * 4]
        loaded.pk_pack_groups.restype = None
        loaded.pk_pick.argtypes = [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p]
        loaded.pk_pick.restype = c_int32
        loaded.pk_start.argtypes = [POINTER(Model)]
        loaded.pk_start.restype = c_void_p
        loaded.pk_step.argtypes = [c_void_p, c_void_p]
        loaded.pk_step.restype = c_int32
        loaded.pk_stop.argtypes = [c_void_p]
        loaded.pk_stop.restype = None
        self._loaded = loaded
        self.lanes = int(loaded.pk_lanes())
        self.panel = 2 * self.lanes

    def pack(
        self,
        arena: Arena,
        weight: int,
        columns: int,
        inner: int,
        *,
        wide: bool,
        pairs: bool = False,
    ) -> Bytes:
        """A packed copy of a weight.

        Args:
            arena: where the copy goes.
            weight: address of [columns, inner] of bfloat16, or of float32 or what else is a unit of 32 bits
                (wide), contiguous.
            pairs: the first half of the columns are gates, the second half their partners.
        """
        out = arena.take(4 * int(self._loaded.pk_packed(self._padded(columns, pairs), inner, wide)))
        self._loaded.pk_pack(out.ctypes.data, weight, columns, inner, wide, pairs)
        return out

    def pack_groups(
        self,
        arena: Arena,
        form: Form,
        weight: Bytes,
        scales: Halves,
        offsets: Halves | None,
        *,
        pairs: bool = False,
    ) -> Bytes:
        """A packed copy of a quantised weight.

        Args:
            arena: where the copy goes.
            form: NIBBLES, or BYTES, which have no offsets.
            weight: [columns, groups * 32], 0 to 15 or 128 more than the weight.
            scales: [columns, groups].
            offsets: as scales.
            pairs: as in `pack`.

        Raises:
            ValueError: the shapes do not fit each other or the form.
        """
        columns, groups = scales.shape
        second = None if offsets is None else offsets.shape
        wanted = scales.shape if form == Form.NIBBLES else None
        if weight.shape != (columns, groups * GROUP) or second != wanted:
            raise ValueError(
                f"{form.name}: weight {weight.shape}, scales {scales.shape} and offsets {second} do not fit"
            )
        size = self._loaded.pk_packed_groups(self._padded(columns, pairs), groups, form)
        out = arena.take(int(size))
        given = (weight, scales, scales if offsets is None else offsets)
        own = [np.ascontiguousarray(part) for part in given]
        self._loaded.pk_pack_groups(
            out.ctypes.data, *(part.ctypes.data for part in own), columns, groups, form, pairs
        )
        return out

    def pick(
        self, logits: Floats, draws: NDArray[np.void], positions: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """[draws]: the token of each, as a step would draw it; -1 where a row is not finite.

        Args:
            logits: [rows, vocab], contiguous.
            draws: [draws] of `DRAW`.
            positions: [draws], of the tokens drawn.

        Raises:
            MemoryError: there was none.
        """
        tokens = np.empty(len(draws), np.int32)
        addresses = (draws.ctypes.data, positions.ctypes.data, len(draws), tokens.ctypes.data)
        if self._loaded.pk_pick(logits.ctypes.data, logits.shape[1], *addresses):
            raise MemoryError(f"no memory for draws from {logits.shape[1]} tokens")
        return tokens

    def _padded(self, columns: int, pairs: bool) -> int:
        """Columns of a packed weight before they are padded to whole panels."""
        return 2 * (-(-(columns // 2) // self.lanes) * self.lanes) if pairs else columns


class Engine:
    """A model's weights and KV memory, and the threads that run steps over them."""

    def __init__(self, loaded: Library, model: Model, keep: Sequence[object]) -> None:
        """Start the threads.

        Args:
            keep: what owns the memory that `model` points to.

        Raises:
            MemoryError: no memory or no thread is to be had.
        """
        self._step = loaded._loaded.pk_step
        self._keep = tuple(keep)
        self._engine = loaded._loaded.pk_start(byref(model))
        if not self._engine:
            raise MemoryError("the native step could not start: no memory or no threads left")
        weakref.finalize(self, loaded._loaded.pk_stop, self._engine)

    def run(self, step: Step) -> None:
        """Run one step; not by two threads at once.

        Raises:
            MemoryError: there was none for this many tokens; nothing has changed.
        """
        if self._step(self._engine, step.buffer_info()[0]):
            raise MemoryError(f"no memory for a native step of {step[TOKENS]} tokens")


def give_back() -> None:
    """Return freed memory to the system, where the C library keeps it for itself otherwise."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def load(variant: Variant | None = None) -> Library:
    """Build if need be, and load. What cannot be loaded from the cache is built again, once.

    Args:
        variant: default: the fastest this CPU can run.

    Raises:
        Unavailable: there is none here; says why.
    """
    chosen = variant or best_variant()
    path = library(chosen)
    try:
        return Library(path, chosen)
    except Unavailable:
        if not forget(path):
            raise
    return Library(library(chosen), chosen)
