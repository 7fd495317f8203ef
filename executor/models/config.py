"""What a decoder must know of a model, read from a Hugging Face config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from executor.models.registry import ARCHITECTURES, Traits, UnknownModel, architecture_of
from executor.models.rope import Rope


@dataclass(slots=True, frozen=True)
class ModelConfig:
    """Shapes and switches of one decoder-only model of the Llama family."""

    architecture: str
    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int  # most positions of one sequence
    norm_epsilon: float
    rope: Rope
    tied: bool  # the output projection is the embedding
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # of each layer: positions seen, itself included; None: all
    rotated: tuple[bool, ...]  # of each layer: whether it has a rotary embedding

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Read a decoded config.json.

        Raises:
            UnknownModel: an architecture or feature that is not supported, or a key missing.
        """
        architecture = architecture_of(raw)
        traits = ARCHITECTURES[architecture]
        _refuse_features(raw)
        heads = _number(raw, "num_attention_heads")
        hidden = _number(raw, "hidden_size")
        kv_heads = int(raw.get("num_key_value_heads", traits.kv_heads) or heads)
        head_dim = int(raw.get("head_dim", traits.head_dim) or hidden // heads)
        if heads % kv_heads or head_dim % 2:
            raise UnknownModel(
                f"{heads} heads over {kv_heads} KV heads of {head_dim} dimensions: heads must be "
                "a multiple of KV heads, and the dimensions even"
            )
        context_length = _number(raw, "max_position_embeddings")
        layers = _number(raw, "num_hidden_layers")
        bias = bool(raw.get("attention_bias", False))
        qkv_bias, output_bias = traits.attention_bias or (bias, bias)
        rotated = _rotated(raw, traits, layers)
        return cls(
            architecture=architecture,
            vocab_size=_number(raw, "vocab_size"),
            hidden=hidden,
            intermediate=_number(raw, "intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            context_length=context_length,
            norm_epsilon=float(raw.get("rms_norm_eps", 1e-6)),
            rope=Rope.from_json(raw, traits.rope_theta, context_length),
            tied=bool(raw.get("tie_word_embeddings", traits.tied)),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            mlp_bias=bool(raw.get("mlp_bias", False))
            if traits.mlp_bias is None
            else traits.mlp_bias,
            qk_norm=traits.qk_norm,
            windows=_windows(raw, traits, rotated),
            rotated=rotated,
        )


def _number(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnknownModel(f"config.json: {key} must be a whole number above 0, not {value!r}")
    return value


def _refuse_features(raw: Mapping[str, Any]) -> None:
    if (activation := raw.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnknownModel(f"config.json: hidden_act {activation!r} is not supported; silu is")
    if raw.get("quantization_config"):
        raise UnknownModel(
            "config.json: quantization_config is set, but quantized safetensors are not supported; "
            "use the unquantized model or a GGUF file"
        )


def _rotated(raw: Mapping[str, Any], traits: Traits, layers: int) -> tuple[bool, ...]:
    if not traits.skips_rope:
        return (True,) * layers
    listed = raw.get("no_rope_layers")  # despite its name, 1 means that the layer is rotated
    if listed is None:
        every = int(raw.get("no_rope_layer_interval", 4))
        return tuple((layer + 1) % every != 0 for layer in range(layers))
    if len(listed) < layers:
        raise UnknownModel(f"config.json: no_rope_layers has {len(listed)} entries, not {layers}")
    return tuple(bool(entry) for entry in listed[:layers])


def _windows(
    raw: Mapping[str, Any], traits: Traits, rotated: tuple[bool, ...]
) -> tuple[int | None, ...]:
    layers = len(rotated)
    window = raw.get("sliding_window", traits.window)
    if (traits.window_switch and not raw.get("use_sliding_window", False)) or not window:
        return (None,) * layers
    if traits.model_type in ("llama", "mistral"):
        return (int(window) if traits.model_type == "mistral" else None,) * layers
    kinds = raw.get("layer_types")
    if kinds is None and traits.skips_rope:
        kinds = ["full_attention" if turns else "sliding_attention" for turns in rotated]
    elif kinds is None:
        first = int(raw.get("max_window_layers", 28))
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if len(kinds) < layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise UnknownModel(f"config.json: layer_types {kinds} is not supported")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds[:layers])
