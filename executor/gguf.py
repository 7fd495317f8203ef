"""GGUF files: their metadata as a config, their tensors as weights, their vocabulary as a tokenizer.

The tokenizer is rebuilt by transformers in a process of its own, once per file: the result is cached, so
that later starts need neither the time nor the import.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from executor.gguf_reader import GgufReader, TensorInfo
from executor.models.config import ModelConfig
from executor.models.registry import UnknownModel
from executor.quantize import QUANTISED, Quantised, of_gguf
from executor.weights import BadModel, Named
from wire.settings import cache_dir

_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
)
_OUTER: Mapping[str, str] = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
)
_INNER: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_PERMUTED = "LlamaForCausalLM"  # the architecture whose q and k rows llama.cpp reorders
_ROPE_DIVISORS = "rope_freqs.weight"  # how Llama 3's scaling is stored, worked out per frequency
_CONVERT = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], gguf_file=sys.argv[2], local_files_only=True)
tokenizer.save_pretrained(sys.argv[3])
"""


class GgufFile:
    """One open GGUF file; the tensors stay on disk until they are asked for."""

    def __init__(self, path: Path) -> None:
        """Map the file.

        Raises:
            BadModel: it is not a GGUF file, or damaged.
        """
        self.path = path
        self._reader = GgufReader(path)
        self._named: dict[str, TensorInfo] | None = None

    def value(self, key: str) -> Any:
        """A metadata value, or None."""
        return self._reader.metadata.get(key)

    def config(self) -> ModelConfig:
        """The model's shapes. A sliding window is not in the metadata of a Mistral, which comes as `llama`.

        Raises:
            UnknownModel: an architecture or rope scaling that is not supported.
            BadModel: metadata that the tensors contradict.
        """
        config = ModelConfig.from_json(self._config_json())
        found = [t for t in self._reader.tensors if t.name == _ROPE_DIVISORS]
        if not found:
            return config
        if found[0].shape != (config.head_dim // 2,):
            raise BadModel(f"{self.path}: {_ROPE_DIVISORS} is {found[0].shape}")
        divisors = tuple(self._reader.floats(found[0]).tolist())
        return replace(config, rope=replace(config.rope, divisors=divisors))

    def _config_json(self) -> dict[str, Any]:
        """The metadata in the words of a config.json."""
        kind = str(self.value("general.architecture"))
        if kind not in _ARCHITECTURES:
            raise UnknownModel(
                f"GGUF architecture {kind} is not known; known are {', '.join(_ARCHITECTURES)}"
            )

        def of(key: str) -> Any:
            return self.value(f"{kind}.{key}")

        shapes = {tensor.name: tensor.shape for tensor in self._reader.tensors}
        if "token_embd.weight" not in shapes:
            raise BadModel(f"{self.path} has no tensor token_embd.weight")
        heads = of("attention.head_count")
        raw = {
            "architectures": [_ARCHITECTURES[kind]],
            "vocab_size": shapes["token_embd.weight"][0],
            "hidden_size": of("embedding_length"),
            "intermediate_size": of("feed_forward_length"),
            "num_hidden_layers": of("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": of("attention.head_count_kv") or heads,
            "head_dim": of("attention.key_length") or of("rope.dimension_count"),
            "max_position_embeddings": of("context_length"),
            "rms_norm_eps": of("attention.layer_norm_rms_epsilon"),
            "rope_theta": of("rope.freq_base") or 10_000.0,
            "tie_word_embeddings": "output.weight" not in shapes,
            "attention_bias": "blk.0.attn_q.bias" in shapes,
        }
        if raw["head_dim"] is None:
            del raw["head_dim"]
        scaling = of("rope.scaling.type")
        if scaling not in (None, "none"):
            raw["rope_scaling"] = {
                "rope_type": scaling,
                "factor": of("rope.scaling.factor"),
                "original_max_position_embeddings": of("rope.scaling.original_context_length"),
                "attention_factor": of("rope.scaling.attn_factor"),
            }
        return raw

    def weights(self, config: ModelConfig) -> Iterator[Named]:
        """Every tensor, dequantized to float32, under its Hugging Face name.

        Raises:
            BadModel: a tensor of an unknown name or type.
        """
        for tensor in self._reader.tensors:
            if tensor.name == _ROPE_DIVISORS:
                continue
            name = _hugging_face_name(tensor.name)
            weight = torch.from_numpy(self._reader.floats(tensor))
            yield name, self._in_order(name, weight, config)

    def rows_of_bytes(self, name: str) -> NDArray[np.uint8] | None:
        """[rows, bytes]: a matrix whose rows are stored as Q8_0, under its Hugging Face name, or None."""
        tensor = self._tensors().get(name)
        if tensor is None or tensor.kind != GGMLQuantizationType.Q8_0:
            return None
        return self._reader.raw(tensor)

    def quantised_matrices(self) -> tuple[int, int]:
        """How many of its matrices are stored in a form the native step has, and how many there are."""
        kinds = [tensor.kind for tensor in self._reader.tensors if len(tensor.shape) == 2]
        return sum(kind in QUANTISED for kind in kinds), len(kinds)

    def quantised(self, name: str, config: ModelConfig) -> Quantised | None:
        """A matrix as it is stored, under its Hugging Face name; None if not in a form the native step has.

        Raises:
            BadModel: as `weights`.
        """
        tensor = self._tensors().get(name)
        if tensor is None or len(tensor.shape) != 2:
            return None
        found = of_gguf(self._reader.raw(tensor), tensor.kind)
        if found is None:
            return None
        order = torch.arange(tensor.shape[0])
        turned = self._in_order(name, order, config)
        return found if turned is order else found.rows(turned.numpy())

    def vector(self, name: str, config: ModelConfig) -> torch.Tensor | None:
        """A norm or bias as it is stored, in float32, under its Hugging Face name, or None."""
        tensor = self._tensors().get(name)
        if tensor is None:
            return None
        return self._in_order(name, torch.from_numpy(self._reader.floats(tensor)), config)

    @staticmethod
    def _in_order(name: str, weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
        """Its rows in Hugging Face's order."""
        return _unpermuted(name, weight, config) if config.architecture == _PERMUTED else weight

    def _tensors(self) -> dict[str, TensorInfo]:
        """By Hugging Face name."""
        if self._named is None:
            self._named = {
                _hugging_face_name(tensor.name): tensor
                for tensor in self._reader.tensors
                if tensor.name != _ROPE_DIVISORS
            }
        return self._named


def _hugging_face_name(name: str) -> str:
    if name in _OUTER:
        return _OUTER[name]
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _INNER:
        return f"model.layers.{parts[1]}.{_INNER[parts[2]]}.{parts[3]}"
    raise BadModel(f"GGUF tensor {name} is not known")


def _unpermuted(name: str, weight: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """Undo llama.cpp's order of q and k rows: it pairs neighbours, Hugging Face pairs halves of a head."""
    if ".q_proj." in name:
        heads = config.heads
    elif ".k_proj." in name:
        heads = config.kv_heads
    else:
        return weight
    pairs = weight.view(heads, config.head_dim // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def tokenizer_folder(path: Path, digest: str) -> Path:
    """A folder with the file's tokenizer.json and tokenizer_config.json, made at the first call.

    Args:
        digest: of the file's content; the key in the cache.

    Raises:
        BadModel: transformers could not rebuild the tokenizer.
    """
    target = cache_dir() / "tokenizers" / digest
    if (target / "tokenizer.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".new-") as scratch:
        made = Path(scratch) / "tokenizer"
        command = [sys.executable, "-c", _CONVERT, str(path.parent), path.name, str(made)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode or not (made / "tokenizer.json").is_file():
            lines = result.stderr.strip().splitlines() or ["it wrote no tokenizer.json"]
            raise BadModel(f"the tokenizer in {path} could not be rebuilt: {lines[-1]}")
        try:
            made.rename(target)
        except OSError:
            # Another process was faster; what it wrote is the same.
            if not (target / "tokenizer.json").is_file():
                raise
    return target


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or an empty one when there is no such file.

    Raises:
        BadModel: the file is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise BadModel(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadModel(f"{path} must hold a JSON object")
    return value
