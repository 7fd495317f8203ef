"""Rotary position embedding (Su et al., "RoFormer", 2021) and the ways to stretch it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor.models.registry import UnknownModel

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(slots=True, frozen=True)
class Rope:
    """The frequencies of one model, as parameters."""

    kind: str
    theta: float
    factor: float = 1.0
    original_context: int = 0  # tokens the model was trained on before stretching (llama3, yarn)
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cos and sin
    divisors: tuple[float, ...] = ()  # of each frequency, where a file gives them worked out

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], default_theta: float, context_length: int) -> Rope:
        """Read `rope_parameters`, or the older `rope_scaling` beside `rope_theta`, of a config.json.

        Raises:
            UnknownModel: a kind of scaling that is not in `KINDS`, or a part of the head unrotated.
        """
        given: dict[str, Any] = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        kind = str(given.get("rope_type") or given.get("type") or "default")
        if kind not in KINDS:
            raise UnknownModel(f"rope type {kind!r} is not known; known are {', '.join(KINDS)}")
        partial = given.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
        if partial not in (None, 1, 1.0):
            raise UnknownModel(f"partial_rotary_factor {partial} is not supported; only 1 is")
        theta = given.get("rope_theta") or raw.get("rope_theta") or default_theta
        original = int(
            raw.get("original_max_position_embeddings")
            or given.get("original_max_position_embeddings")
            or context_length
        )
        factor = given.get("factor")
        if factor is None:
            factor = context_length / original if kind == "yarn" else 1.0
        return cls(
            kind=kind,
            theta=float(theta),
            factor=float(factor),
            original_context=original,
            low_freq_factor=float(given.get("low_freq_factor") or 1.0),
            high_freq_factor=float(given.get("high_freq_factor") or 4.0),
            beta_fast=float(given.get("beta_fast") or 32.0),
            beta_slow=float(given.get("beta_slow") or 1.0),
            truncate=bool(given.get("truncate", True)),
            attention_factor=_attention_factor(given, float(factor)) if kind == "yarn" else 1.0,
        )

    def frequencies(self, head_dim: int) -> Tensor:
        """[head_dim / 2] float32: radians per position of each pair of dimensions.

        `dynamic` (NTK) changes the base with the length of a sequence once it is longer than the model's
        context. Keys in shared blocks cannot depend on who reads them, and no sequence here outgrows the
        context, so it is `default`.
        """
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        plain = 1.0 / (self.theta**exponents)
        if self.divisors:
            plain = plain / torch.tensor(self.divisors)
        match self.kind:
            case "linear":
                return plain / self.factor
            case "llama3":
                return self._llama3(plain)
            case "yarn":
                return self._yarn(exponents, head_dim)
            case _:
                return plain

    def _llama3(self, plain: Tensor) -> Tensor:
        """Long waves slowed by `factor`, short ones kept, those between blended (Llama 3.1, 2024)."""
        waves = 2 * math.pi / plain
        longest, shortest = (
            self.original_context / self.low_freq_factor,
            self.original_context / self.high_freq_factor,
        )
        blend = (self.original_context / waves - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        blended = (1 - blend) * plain / self.factor + blend * plain
        scaled = torch.where(waves > longest, plain / self.factor, blended)
        return torch.where(waves < shortest, plain, scaled)

    def _yarn(self, exponents: Tensor, head_dim: int) -> Tensor:
        """Interpolated where a wave turns less than `beta_slow` times in the trained context, kept where
        it turns more than `beta_fast` times, a ramp between (Peng et al., "YaRN", 2023)."""

        def dimension(turns: float) -> float:
            wave = self.original_context / (turns * 2 * math.pi)
            return head_dim * math.log(wave) / (2 * math.log(self.theta))

        low, high = dimension(self.beta_fast), dimension(self.beta_slow)
        if self.truncate:
            low, high = float(math.floor(low)), float(math.ceil(high))
        low, high = max(low, 0.0), min(high, float(head_dim - 1))
        if low == high:
            high += 0.001
        steps = torch.arange(head_dim // 2, dtype=torch.float32)
        kept = 1 - ((steps - low) / (high - low)).clamp(0, 1)
        powers = self.theta**exponents
        return (1.0 / (self.factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def _attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """Yarn's temperature on attention, folded into cos and sin."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    mscale, mscale_all = given.get("mscale"), given.get("mscale_all_dim")
    if mscale and mscale_all:
        return scale(float(mscale)) / scale(float(mscale_all))
    return scale(1.0)
