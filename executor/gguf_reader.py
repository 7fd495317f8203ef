"""The GGUF container: metadata and tensor places. Tensor data stays in the mapped file until used.

The `gguf` package has a reader too, but it makes numpy views of every vocabulary entry, which takes
seconds; this one steps over them.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, dequantize
from numpy.typing import NDArray

from executor.weights import BadModel

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}
_AT_ONCE = 1 << 19  # weights dequantized per step of the gguf package's loop over rows


@dataclass(slots=True, frozen=True)
class TensorInfo:
    """Where a tensor lies and what it is."""

    name: str
    shape: tuple[int, ...]  # as torch has it: the fastest dimension last
    kind: GGMLQuantizationType
    offset: int  # bytes from the start of the file
    size: int  # bytes


class GgufReader:
    """One mapped GGUF file.

    Attributes:
        metadata: every value but arrays of strings, which are None.
        tensors: in file order.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            BadModel: the file is not GGUF version 2 or 3, cut short or damaged.
        """
        self.path = path
        with path.open("rb") as file:
            try:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError as error:
                raise BadModel(f"{path} is empty") from error
        self._at = 0
        try:
            self._read_header()
        except (struct.error, ValueError, KeyError, UnicodeDecodeError, RecursionError) as error:
            raise BadModel(f"{path} is not a readable GGUF file: {error}") from error

    def raw(self, tensor: TensorInfo) -> NDArray[np.uint8]:
        """The tensor's bytes, [rows, bytes of a row], a view of the file."""
        found = np.frombuffer(self._data, np.uint8, tensor.size, tensor.offset)
        return found.reshape(int(np.prod(tensor.shape[:-1])), -1)

    def floats(self, tensor: TensorInfo) -> NDArray[np.float32]:
        """The tensor's weights, dequantized, in an array that may be written to.

        Raises:
            BadModel: a type of quantization that is not known.
        """
        raw = self.raw(tensor).ravel()
        if tensor.kind == GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(tensor.shape).copy()
        if tensor.kind == GGMLQuantizationType.F16:
            return raw.view(np.float16).reshape(tensor.shape).astype(np.float32)
        rows = int(np.prod(tensor.shape[:-1]))
        # The package's loop takes 16 rows a time; longer rows make it faster.
        while rows % 2 == 0 and 16 * (tensor.size // rows) < _AT_ONCE:
            rows //= 2
        try:
            flat = dequantize(raw.reshape(rows, -1), tensor.kind)
        except NotImplementedError as error:
            raise BadModel(
                f"{self.path.name}: {tensor.name} is stored as {tensor.kind.name}, which is not known"
            ) from error
        return np.asarray(flat, np.float32).reshape(tensor.shape)

    def _read_header(self) -> None:
        if self._data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        self._at = 4
        version, tensors, values = self._numbers("IQQ")
        if version not in (2, 3):
            raise ValueError(f"version {version}, not 2 or 3")
        self.metadata: dict[str, Any] = {}
        for _ in range(values):
            key = self._string()
            self.metadata[key] = self._value(GGUFValueType(self._numbers("I")[0]))
        found = [self._tensor() for _ in range(tensors)]
        alignment = int(self.metadata.get("general.alignment", 32))
        start = -(-self._at // alignment) * alignment
        self.tensors = [
            TensorInfo(name, shape, kind, start + offset, _size(shape, kind))
            for name, shape, kind, offset in found
        ]
        for tensor in self.tensors:
            if tensor.offset + tensor.size > len(self._data):
                raise ValueError(f"it ends before tensor {tensor.name} does")

    def _numbers(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._data, self._at)
        self._at += struct.calcsize("<" + layout)
        return values

    def _string(self) -> str:
        (length,) = self._numbers("Q")
        start = self._at
        self._skip(length)
        return self._data[start : self._at].decode()

    def _skip(self, count: int) -> None:
        if count > len(self._data) - self._at:
            raise ValueError("it ends in the middle of its header")
        self._at += count

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            return self._numbers(_SCALARS[kind])[0]
        inner, count = self._numbers("IQ")
        inner = GGUFValueType(inner)
        if inner in _SCALARS:
            start = self._at
            self._skip(count * struct.calcsize("<" + _SCALARS[inner]))
            dtype = np.dtype("<" + _SCALARS[inner])
            return np.frombuffer(self._data, dtype, count, start).tolist()
        if inner == GGUFValueType.STRING:
            for _ in range(count):
                self._skip(self._numbers("Q")[0])
            return None
        return [self._value(inner) for _ in range(count)]

    def _tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name = self._string()
        (dimensions,) = self._numbers("I")
        if not 1 <= dimensions <= 4:
            raise ValueError(f"tensor {name} has {dimensions} dimensions")
        shape = tuple(reversed(self._numbers(f"{dimensions}Q")))
        kind, offset = self._numbers("IQ")
        return name, shape, GGMLQuantizationType(kind), offset


def _size(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block, size = GGML_QUANT_SIZES[kind]
    if shape[-1] % block:
        raise ValueError(f"a row of {shape[-1]} weights is not a multiple of {kind.name}'s {block}")
    count = 1
    for length in shape:
        count *= length
    return count // block * size
