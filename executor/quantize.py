"""Quantised weights as the native step takes them: as a GGUF file has them, or made here of plain ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from kernels.cpu.native import GROUP, TURNED, Form

Bytes = NDArray[np.uint8]
Halves = NDArray[np.float16]
Floats = NDArray[np.float32]

# How the native step holds weights: in the type of K and V, as the GGUF file has them, in 8 bits, or in 8
# bits for inputs in 8 bits.
Weights = Literal["plain", "file", "int8", "w8a8"]

# Kinds of matrices in GGUF files that are taken as they are.
QUANTISED = frozenset(
    {GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0}
)
_ZERO = 128  # added to weights of 8 bits


@dataclass(slots=True, frozen=True)
class Quantised:
    """A matrix in groups of 32 inputs: offset + scale * weight, or scale * (weight - 128) without offsets."""

    form: Form
    weight: Bytes  # [outputs, groups * 32]
    scales: Halves  # [outputs, groups]
    offsets: Halves | None  # [outputs, groups], of NIBBLES

    def floats(self) -> Floats:
        """[outputs, groups * 32]: what it stands for."""
        shape = (*self.scales.shape, GROUP)
        scales = self.scales.astype(np.float32)[..., None]
        whole = self.weight.reshape(shape).astype(np.float32)
        if self.offsets is None:
            found = scales * (whole - _ZERO)
        else:
            found = scales * whole + self.offsets.astype(np.float32)[..., None]
        return found.reshape(self.weight.shape)

    def rows(self, order: NDArray[np.int64]) -> Quantised:
        """Its outputs in another order."""
        offsets = None if self.offsets is None else self.offsets[order]
        return Quantised(self.form, self.weight[order], self.scales[order], offsets)


@dataclass(slots=True, frozen=True)
class Narrow:
    """A matrix for inputs in 8 bits that have been `turned`: scale * (weight - 128)."""

    weight: Bytes  # [outputs, inputs padded with 0 to whole 64s]
    scales: Floats  # [outputs]


def stacked(parts: Sequence[Quantised | None]) -> Quantised | None:
    """One matrix of the outputs of all, or None if they are not all quantised alike."""
    given = [part for part in parts if part is not None]
    if len(given) < len(parts) or len({part.form for part in given}) != 1:
        return None
    offsets = [part.offsets for part in given if part.offsets is not None]
    return Quantised(
        given[0].form,
        np.concatenate([part.weight for part in given]),
        np.concatenate([part.scales for part in given]),
        np.concatenate(offsets) if offsets else None,
    )


def of_gguf(raw: Bytes, kind: GGMLQuantizationType) -> Quantised | None:
    """A matrix as llama.cpp stores it, exactly; None for kinds the native step does not have.

    Args:
        raw: [outputs, bytes].
    """
    outputs = len(raw)
    if kind == GGMLQuantizationType.Q8_0:
        blocks = raw.reshape(outputs, -1, 2 + GROUP)
        weight = blocks[..., 2:] ^ np.uint8(0x80)  # two's complement, with 128 added
        return _checked(Form.BYTES, weight.reshape(outputs, -1), _halves(blocks, 0), None)
    if kind == GGMLQuantizationType.Q4_1:
        blocks = raw.reshape(outputs, -1, 4 + GROUP // 2)
        return _checked(Form.NIBBLES, _nibbles(blocks, 4), _halves(blocks, 0), _halves(blocks, 2))
    if kind == GGMLQuantizationType.Q4_0:
        blocks = raw.reshape(outputs, -1, 2 + GROUP // 2)
        scales = _halves(blocks, 0)
        with np.errstate(over="ignore"):
            offsets = scales * np.float16(-8)  # exact, or infinite and then refused
        return _checked(Form.NIBBLES, _nibbles(blocks, 2), scales, offsets)
    return None


def of_floats(weight: Floats) -> Quantised | None:
    """The nearest 8-bit matrix, inputs padded with 0 to whole groups; None if its scales do not fit.

    Args:
        weight: [outputs, inputs].
    """
    outputs, inputs = weight.shape
    padded = np.pad(weight, ((0, 0), (0, -inputs % GROUP))).reshape(outputs, -1, GROUP)
    with np.errstate(over="ignore"):
        scales = (np.abs(padded).max(axis=-1) / 127).astype(np.float16)
    divisors = np.where(scales > 0, scales, 1).astype(np.float32)[..., None]
    with np.errstate(invalid="ignore"):
        whole = np.clip(np.rint(padded / divisors), -127, 127)
        weights = (whole + _ZERO).astype(np.uint8)
    return _checked(Form.BYTES, weights.reshape(outputs, -1), scales, None)


def narrow(weight: Floats) -> Narrow | None:
    """The nearest 8-bit matrix with one scale for each output; None if a weight is not finite.

    Args:
        weight: [outputs, inputs].
    """
    inputs = weight.shape[1]
    with np.errstate(over="ignore", invalid="ignore"):
        # Turning inputs makes them 8 times as long, and so do weights: 64 is taken back here.
        found = turned(np.pad(weight, ((0, 0), (0, -inputs % TURNED)))) / TURNED
    scales = np.abs(found).max(axis=-1) / np.float32(127)
    if not np.isfinite(scales).all():
        return None
    divisors = np.where(scales > 0, scales, 1)[:, None]
    whole = np.clip(np.rint(found / divisors), -127, 127)
    return Narrow((whole + _ZERO).astype(np.uint8), scales)


def turned(values: Floats) -> Floats:
    """Hadamard's transform of each 64 numbers of rows, as the native step turns inputs: 8 times as long.

    Numbers that stick out are spread over their block, so that 8 bits resolve the others (Ashkboos et al.,
    "QuaRot", 2024).

    Args:
        values: [rows, a multiple of 64].
    """
    signs = np.ones((1, 1), np.float32)
    while len(signs) < TURNED:
        signs = np.kron(np.array([[1, 1], [1, -1]], np.float32), signs)
    found: Floats = (values.reshape(-1, TURNED) @ signs).reshape(values.shape)
    return found


def _halves(blocks: Bytes, at: int) -> Halves:
    """[outputs, groups] from 2 bytes of each block."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2")[..., 0]


def _nibbles(blocks: Bytes, at: int) -> Bytes:
    """[outputs, groups * 32]: the low halves of 16 bytes, then their high halves."""
    packed = blocks[..., at : at + GROUP // 2]
    both = np.concatenate((packed & 0x0F, packed >> 4), axis=-1)
    return both.reshape(len(blocks), -1)


def _checked(form: Form, weight: Bytes, scales: Halves, offsets: Halves | None) -> Quantised | None:
    finite = np.isfinite(scales).all() and (offsets is None or np.isfinite(offsets).all())
    return Quantised(form, weight, scales, offsets) if finite else None
