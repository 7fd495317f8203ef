"""The architectures this executor can run, and how each differs from Llama."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


class UnknownModel(ValueError):
    """The model cannot be run here; the message says what is missing and what is known."""


@dataclass(slots=True, frozen=True)
class Traits:
    """What an architecture fixes, and its defaults for keys a config.json may leave out."""

    model_type: str
    attention_bias: tuple[bool, bool] | None = None  # of (q, k, v) and of o; None: the config says
    mlp_bias: bool | None = False  # None: the config says
    qk_norm: bool = False
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden size / heads
    rope_theta: float = 10_000.0
    tied: bool = False
    window: int | None = None
    window_switch: bool = False  # the window counts only with use_sliding_window
    skips_rope: bool = False  # some layers have no rotary embedding


ARCHITECTURES: Mapping[str, Traits] = MappingProxyType(
    {
        "LlamaForCausalLM": Traits("llama", mlp_bias=None),
        "MistralForCausalLM": Traits(
            "mistral", attention_bias=(False, False), kv_heads=8, window=4096
        ),
        "Qwen2ForCausalLM": Traits(
            "qwen2", attention_bias=(True, False), kv_heads=32, window=4096, window_switch=True
        ),
        "Qwen3ForCausalLM": Traits(
            "qwen3", qk_norm=True, kv_heads=32, head_dim=128, window=4096, window_switch=True
        ),
        "SmolLM3ForCausalLM": Traits(
            "smollm3",
            mlp_bias=None,
            kv_heads=4,
            rope_theta=2_000_000.0,
            tied=True,
            window_switch=True,
            skips_rope=True,
        ),
    }
)


def architecture_of(raw: Mapping[str, Any]) -> str:
    """The architecture a config.json names.

    Raises:
        UnknownModel: it is none of `ARCHITECTURES`.
    """
    named = raw.get("architectures")
    names = [str(name) for name in named] if isinstance(named, list) else []
    if not names:
        by_type = {traits.model_type: name for name, traits in ARCHITECTURES.items()}
        names = [by_type.get(str(raw.get("model_type")), str(raw.get("model_type")))]
    for name in names:
        if name in ARCHITECTURES:
            return name
    raise UnknownModel(
        f"architecture {', '.join(names)} is not known; known are {', '.join(ARCHITECTURES)}"
    )
