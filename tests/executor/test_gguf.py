from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from tokenizers import Tokenizer

from executor.gguf import GgufFile, tokenizer_folder
from executor.load import load_model
from executor.models.config import ModelConfig
from executor.models.decoder import Decoder
from executor.models.registry import UnknownModel
from executor.weights import BadModel, fill
from tests.executor.oracle import quiet
from tests.tiny import CHAT_TEMPLATE, byte_tokenizer, write_tiny_model

HEADS, KV_HEADS = 4, 2
INNER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def permuted(weight: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of q or k as llama.cpp's converter for Llama writes them."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    _, _, layer, *inner, kind = name.split(".")
    return f"blk.{layer}.{INNER['.'.join(inner)]}.{kind}"


def write_gguf(
    path: Path,
    folder: Path,
    architecture: str,
    kind: gguf.GGMLQuantizationType,
    tensors: Mapping[str, NDArray[Any]] = MappingProxyType({}),
    each: Callable[[str], gguf.GGMLQuantizationType] | None = None,
) -> Path:
    """A GGUF file of the model in `folder`, by the package's own writer.

    Args:
        kind: of all matrices, unless `each` tells that of a name.
    """
    raw = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(raw["rope_theta"])
    writer.add_key_length(16)
    vocab = byte_tokenizer().get_vocab()
    # The format asks for merges, so there is one.
    tokens = [*sorted(vocab, key=lambda token: vocab[token]), "ab"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(258)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in load_file(folder / "model.safetensors").items():
        weight = tensor.numpy()
        if architecture == "llama" and ".q_proj." in name:
            weight = permuted(weight, HEADS)
        if architecture == "llama" and ".k_proj." in name:
            weight = permuted(weight, KV_HEADS)
        matrix = each(name) if each and weight.ndim > 1 else kind
        stored = gguf.GGMLQuantizationType.F32 if weight.ndim == 1 else matrix
        packed = gguf.quantize(weight, stored)
        writer.add_tensor(gguf_name(name), packed, raw_dtype=stored)
    for name, extra in tensors.items():
        writer.add_tensor(name, extra)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def loaded(path: Path) -> Decoder:
    file = GgufFile(path)
    config = file.config()
    decoder = Decoder(config, torch.float32, torch.device("cpu"))
    fill(decoder, file.weights(config), quiet)
    return decoder


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_config_and_weights_are_those_of_the_model_folder(
    tmp_path: Path, architecture: str, tied: bool
) -> None:
    overrides: dict[str, Any] = {"tie_word_embeddings": tied}
    if architecture == "qwen3":
        overrides["attention_bias"] = False
    folder = write_tiny_model(tmp_path / "m", architecture, **overrides)
    path = write_gguf(tmp_path / "m.gguf", folder, architecture, gguf.GGMLQuantizationType.F32)
    decoder = loaded(path)
    raw = json.loads((folder / "config.json").read_text())
    # GGUF holds the epsilon in 32 bits.
    raw["rms_norm_eps"] = float(np.float32(raw["rms_norm_eps"]))
    assert decoder.config == ModelConfig.from_json(raw)
    wanted = load_file(folder / "model.safetensors")
    ours = decoder.parameters()
    assert ours.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert torch.equal(ours[name], weight), name


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_quantized_weights_are_dequantized_as_the_gguf_package_does(
    tmp_path: Path, kind: str
) -> None:
    stored = gguf.GGMLQuantizationType[kind]
    folder = write_tiny_model(tmp_path / "m", "qwen2", intermediate_size=128)
    decoder = loaded(write_gguf(tmp_path / "m.gguf", folder, "qwen2", stored))
    for name, weight in load_file(folder / "model.safetensors").items():
        if weight.ndim == 2:
            wanted = gguf.dequantize(gguf.quantize(weight.numpy(), stored), stored)
            np.testing.assert_array_equal(decoder.parameters()[name].numpy(), wanted)


def test_worked_out_llama3_frequencies_are_those_of_the_scaling(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    folder = write_tiny_model(tmp_path / "m", rope_scaling=scaling)
    raw = json.loads((folder / "config.json").read_text())
    scaled = ModelConfig.from_json(raw).rope.frequencies(16)
    plain = ModelConfig.from_json({**raw, "rope_scaling": None}).rope.frequencies(16)
    assert not torch.equal(scaled, plain)
    path = write_gguf(
        tmp_path / "m.gguf",
        folder,
        "llama",
        gguf.GGMLQuantizationType.F32,
        tensors={"rope_freqs.weight": (plain / scaled).numpy()},
    )
    ours = loaded(path).config.rope.frequencies(16)
    torch.testing.assert_close(ours, scaled, rtol=1e-6, atol=0)


def test_an_unknown_architecture_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnknownModel, match="GGUF architecture gemma3 is not known"):
        GgufFile(path).config()


@pytest.mark.parametrize("kept", [0, 3, 30, 500, 6000, -100])
def test_a_file_cut_short_is_refused_by_name(tmp_path: Path, kept: int) -> None:
    folder = write_tiny_model(tmp_path / "m")
    path = write_gguf(tmp_path / "m.gguf", folder, "llama", gguf.GGMLQuantizationType.F32)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BadModel, match=r"m\.gguf is"):
        GgufFile(path)


def test_lengths_beyond_the_file_are_refused_at_once(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    path = write_gguf(tmp_path / "m.gguf", folder, "llama", gguf.GGMLQuantizationType.F32)
    content = path.read_bytes()
    for at in (8, 16, 24):  # the counts of tensors and values, the first key's length
        path.write_bytes(content[:at] + b"\xff" * 8 + content[at + 8 :])
        with pytest.raises(BadModel, match=r"m\.gguf is not a readable GGUF file"):
            GgufFile(path)


@pytest.mark.slow
def test_the_tokenizer_is_rebuilt_once_and_then_read_from_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEKEEPER_CACHE", str(tmp_path / "cache"))
    folder = write_tiny_model(tmp_path / "m", vocab_size=261)
    path = write_gguf(tmp_path / "m.gguf", folder, "llama", gguf.GGMLQuantizationType.F32)
    first = load_model(str(path), dtype="float32", device="cpu", on_progress=quiet)
    text = "Grüße, <|im_end|> world"
    ours = Tokenizer.from_buffer(first.card.tokenizer).encode(text, add_special_tokens=False).ids
    assert ours == byte_tokenizer().encode(text).ids
    assert first.card.chat_template == CHAT_TEMPLATE
    assert (first.card.bos_token, first.card.eos_token) == ("<|endoftext|>", "<|im_end|>")
    assert first.card.eos_ids == (258,)

    def forbidden(*args: object, **kwargs: object) -> None:
        raise AssertionError("a second start must not convert again")

    monkeypatch.setattr(subprocess, "run", forbidden)
    second = load_model(str(path), dtype="float32", device="cpu", on_progress=quiet)
    assert second.card == first.card
    assert second.digest == first.digest
    leftovers = [p for p in (tmp_path / "cache" / "tokenizers").iterdir() if p.name[0] == "."]
    assert leftovers == []


def test_a_tokenizer_that_cannot_be_rebuilt_is_an_error_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEKEEPER_CACHE", str(tmp_path / "cache"))
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho 'ValueError: no vocabulary' >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(failing))
    with pytest.raises(BadModel, match="could not be rebuilt: ValueError: no vocabulary"):
        tokenizer_folder(tmp_path / "m.gguf", "0" * 64)
    assert not any((tmp_path / "cache" / "tokenizers").iterdir())
