"""Tiny random models with a byte tokenizer, written as model folders: a whole stack with no download.

A token below 256 is the byte of that value; `SPECIAL` follow. Weights are scaled so that logits spread by
about 2: greedy choices are rarely near-ties, and sampled text is not one letter for ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from executor.models.config import ModelConfig
from executor.models.decoder import Decoder

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")  # ids 256, 257, 258, 259
END = 258
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "smollm3": "SmolLM3ForCausalLM",
    }
)


def config_json(architecture: str, **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model; an override of `...` leaves its key out."""
    raw = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": 256 + len(SPECIAL),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": END,
        "pad_token_id": 259,
        "torch_dtype": "float32",
        **overrides,
    }
    return {key: value for key, value in raw.items() if value is not ...}


def write_tiny_model(
    path: Path, architecture: str = "llama", *, seed: int = 0, shards: int = 1, **overrides: Any
) -> Path:
    """Write a model folder: config.json, safetensors, tokenizer.json, tokenizer_config.json.

    Args:
        path: the folder; made when it is not there.
        architecture: a key of `ARCHITECTURES`.
        seed: of the random weights.
        shards: files the weights are split into; above 1 with an index.
        overrides: keys of config.json; `...` leaves one out.
    """
    path.mkdir(parents=True, exist_ok=True)
    raw = config_json(architecture, **overrides)
    (path / "config.json").write_text(json.dumps(raw))
    _write_weights(path, _random_weights(raw, seed), shards)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[0],
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[3],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": raw["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def byte_tokenizer() -> Tokenizer:
    """One token per byte, and the special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # ByteLevel writes printable Latin-1 bytes as themselves and the others, in order, from U+0100 on.
    plain = [ord(letter) for letter in letters if ord(letter) < 256]
    others = [byte for byte in range(256) if byte not in plain]
    vocab = {chr(byte): byte for byte in plain}
    vocab |= {chr(256 + index): byte for index, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return tokenizer


def _random_weights(raw: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    decoder = Decoder(ModelConfig.from_json(raw), torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, place in decoder.parameters().items():
        noise = torch.randn(place.shape, generator=generator)
        if "norm" in name:
            weights[name] = 1 + 0.1 * noise
        elif name.endswith(".bias"):
            weights[name] = 0.3 * noise
        elif "embed" in name:
            weights[name] = noise * (2 / place.shape[1] ** 0.5 if raw["tie_word_embeddings"] else 1)
        else:
            gain = 2.0 if "lm_head" in name else 1.3
            weights[name] = noise * gain / place.shape[1] ** 0.5
    return weights


def _write_weights(path: Path, weights: Mapping[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(dict(weights), path / "model.safetensors", metadata={"format": "pt"})
        return
    where = {
        name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors"
        for i, name in enumerate(weights)
    }
    for file in sorted(set(where.values())):
        part = {name: weight for name, weight in weights.items() if where[name] == file}
        save_file(part, path / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": where}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
