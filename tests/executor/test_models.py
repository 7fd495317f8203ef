"""Every architecture against transformers: logits at every position, greedy tokens, over a poisoned cache."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.models.config import ModelConfig
from executor.models.registry import UnknownModel
from executor.plan import Row
from tests.executor.oracle import (
    Blocks,
    greedy,
    load,
    poisoned_runner,
    reference_greedy,
    reference_logits,
    reference_model,
)
from tests.tiny import config_json, write_tiny_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama every head its own kv": ("llama", {"num_key_value_heads": 4}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama wide heads": ("llama", {"head_dim": 32, "rms_norm_eps": 1e-5}),
    "llama linear rope": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}),
    "llama dynamic rope": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
    "llama llama3 rope": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "llama yarn rope": ("llama", {"rope_scaling": YARN}),
    "llama rope_parameters": (
        "llama",
        {"rope_theta": ..., "rope_parameters": {**LLAMA3, "rope_theta": 20000.0}},
    ),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 32}),
    "mistral window": ("mistral", {"sliding_window": 7}),
    "mistral yarn mscale": (
        "mistral",
        {
            "sliding_window": 9,
            "rope_parameters": {**YARN, "rope_theta": 1e6, "mscale": 1.0, "mscale_all_dim": 0.5},
            "rope_theta": ...,
        },
    ),
    "qwen2": ("qwen2", {"head_dim": ...}),
    "qwen2 tied window": (
        "qwen2",
        {
            "head_dim": ...,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 6,
            "max_window_layers": 1,
            "num_key_value_heads": 1,
        },
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3 biases yarn": (
        "qwen3",
        {
            "attention_bias": True,
            "num_key_value_heads": 4,
            "rope_scaling": {**YARN, "attention_factor": 1.2, "truncate": False},
        },
    ),
    "qwen3 window": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "smollm3": ("smollm3", {"head_dim": ..., "num_hidden_layers": 5, "tie_word_embeddings": True}),
}


def prepared(tmp_path: Path, case: str) -> Path:
    architecture, overrides = CASES[case]
    return write_tiny_model(tmp_path / "model", architecture, **overrides)


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers_at_every_position_however_the_work_is_cut(
    tmp_path: Path, case: str
) -> None:
    folder = prepared(tmp_path, case)
    rng = random.Random(case)
    loaded = load(folder)
    oracle = reference_model(folder)
    texts = [[rng.randrange(260) for _ in range(length)] for length in (41, 1, 17, 8, 30)]
    block_size = rng.choice((3, 4, 16))
    runner = poisoned_runner(loaded, block_size=block_size)
    blocks = Blocks(64, block_size, rng)
    logits = [torch.empty(0, loaded.config.vocab_size) for _ in texts]
    while unfinished := [seq for seq, text in enumerate(texts) if len(logits[seq]) < len(text)]:
        rows = []
        for seq in rng.sample(unfinished, rng.randint(1, len(unfinished))):
            start = len(logits[seq])
            part = texts[seq][start : start + rng.choice((1, 1, 2, 5, 12))]
            rows.append(Row(seq, start, part, blocks.table(seq, start + len(part))))
        counts = [len(row.tokens) for row in rows]
        with torch.inference_mode():
            states = loaded.model.logits(runner.compute(rows))
        for row, part_logits in zip(rows, torch.split(states, counts), strict=True):
            logits[row.seq] = torch.cat((logits[row.seq], part_logits))
    for seq, text in enumerate(texts):
        torch.testing.assert_close(logits[seq], reference_logits(oracle, text), rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["llama", "mistral window", "qwen2", "qwen3", "smollm3"])
def test_greedy_tokens_equal_transformers_generate(tmp_path: Path, case: str) -> None:
    folder = prepared(tmp_path, case)
    rng = random.Random(case)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (3, 20)]
    runner = poisoned_runner(load(folder))
    ours = greedy(runner, prompts, 32, Blocks(64, 4, rng), chunk=7)
    oracle = reference_model(folder)
    assert ours == [reference_greedy(oracle, prompt, 32) for prompt in prompts]


def test_mistral_without_a_window_in_its_config_has_the_architectures_own() -> None:
    assert ModelConfig.from_json(config_json("mistral")).windows == (4096, 4096)


def test_an_unknown_architecture_is_refused_with_its_name_and_the_known_ones() -> None:
    raw = config_json("llama", architectures=["Llama4ForCausalLM"])
    with pytest.raises(UnknownModel, match=r"Llama4ForCausalLM is not known.*Qwen3ForCausalLM"):
        ModelConfig.from_json(raw)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"num_hidden_layers": ...}, "num_hidden_layers"),
        ({"num_attention_heads": 3}, "3 heads over 2 KV heads"),
    ],
)
def test_a_config_that_would_compute_wrong_numbers_is_refused(
    overrides: dict[str, Any], said: str
) -> None:
    with pytest.raises(UnknownModel, match=said):
        ModelConfig.from_json(config_json("llama", **overrides))
