"""What a model may ask of attention beyond softmax(scale * Q K^T) V. The same for every kernel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Options:
    """Each is off when None. Applied to a score in this order: scale, soft-cap, ALiBi, mask, sink."""

    window: int | None = None
    """Positions a token sees, itself included (Beltagy et al., "Longformer", 2020); None: all before it."""
    softcap: float | None = None
    """c: a scaled score s becomes c * tanh(s / c) (Gemma 2, 2024)."""
    sinks: Tensor | None = None
    """[heads] float32: the logit of a key without a value, one more term of softmax's denominator
    (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023)."""
    slopes: Tensor | None = None
    """[heads] float32: a score falls by slope * distance (Press et al., "ALiBi", ICLR 2022)."""
