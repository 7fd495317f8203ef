"""A Llama-shaped model of random weights, and whether its tokens are transformers' own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu.setting import Setting
from executor.gpu import GpuRunner
from executor.graphs import CudaRecorder
from executor.load import Card, LoadedModel
from executor.models.config import ModelConfig
from executor.models.decoder import Decoder
from kernels.dispatch import kernels_for
from tests.executor.oracle import Blocks, greedy

BLOCK = 16
NEAR_TIE = 1e-3  # a gap between the two likeliest logits that rounding may close
PROMPTS = (1, 5, 16, 63, 200, 700)
TOKENS, CHUNK = 32, 256


def config_json(setting: Setting) -> dict[str, Any]:
    """Of a model of 1.1 billion parameters, or of one that an interpreter can run."""
    sizes = (
        (64, 96, 1, 4, 2, 260, 512) if setting.interpret else (2048, 8192, 16, 32, 8, 32768, 8192)
    )
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "vocab_size", "max_position_embeddings",
    )  # fmt: skip
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **dict(zip(names, sizes, strict=True)),
    }


def random_model(setting: Setting, dtype: torch.dtype) -> LoadedModel:
    """Weights so large that logits spread by about 2: near-ties are rare."""
    raw = config_json(setting)
    config = ModelConfig.from_json(raw)
    decoder = Decoder(config, dtype, setting.device)
    generator = torch.Generator(setting.device).manual_seed(1)
    for name, weight in decoder.parameters().items():
        if "norm" in name:
            weight.fill_(1)
        else:
            gain = 1.0 if "embed" in name else 2.0 if "lm_head" in name else 1.3
            weight.normal_(
                0, gain if "embed" in name else gain / weight.shape[1] ** 0.5, generator=generator
            )
    card = Card(
        "random", "random", "Llama", b"{}", "", "", "", "", (), False,
        config.context_length, config.vocab_size,
    )  # fmt: skip
    return LoadedModel(decoder, config, card, "random")


def runner(
    setting: Setting, loaded: LoadedModel, *, blocks: int, rows: int, tokens: int, graphs: bool
) -> GpuRunner:
    """With a KV cache of zeros, warmed up."""
    record = CudaRecorder() if graphs and setting.device.type == "cuda" else None
    made = GpuRunner(
        loaded,
        num_blocks=blocks,
        block_size=BLOCK,
        device=setting.device,
        dtype=loaded.model.dtype,
        kernels=kernels_for("triton", setting.device),
        step_tokens=tokens,
        sequences=rows,
        record=record,
    )
    made.kv.keys.zero_()
    made.kv.values.zero_()
    made.warm_up()
    return made


def tokens(setting: Setting, progress: Callable[[float], None]) -> dict[str, Any]:
    """Greedy texts of several prompts in one batch, in chunks, in float32; after every token, transformers
    must find the same next one, or one whose logit is within `NEAR_TIE` of it."""
    lengths, count = ((3, 6), 2) if setting.interpret else (PROMPTS, TOKENS)
    loaded = random_model(setting, torch.float32)
    chance = random.Random(0)
    prompts = [[chance.randrange(loaded.config.vocab_size) for _ in range(n)] for n in lengths]
    chunk = 4 if setting.interpret else CHUNK
    blocks = sum(-(-(n + count) // BLOCK) for n in lengths) + 8
    ours = greedy(
        runner(
            setting,
            loaded,
            blocks=blocks,
            rows=len(prompts),
            tokens=chunk * len(prompts),
            graphs=True,
        ),
        prompts,
        count,
        Blocks(blocks, BLOCK, chance),
        chunk,
    )
    progress(0.5)
    reference = _transformers(setting, loaded)
    ties, wrong = 0, []
    for prompt, text in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt + text[:-1]], device=setting.device)
        with torch.inference_mode():
            logits = reference(ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
        best = logits.max(dim=1)
        chosen = logits.gather(1, torch.tensor(text, device=setting.device)[:, None])[:, 0]
        gaps = (best.values - chosen).tolist()
        ties += sum(0 < gap <= NEAR_TIE for gap in gaps)
        wrong += [
            f"a prompt of {len(prompt)}: token {place} is {gap:.3g} below transformers' choice"
            for place, gap in enumerate(gaps)
            if not gap <= NEAR_TIE
        ]
    progress(1.0)
    parameters = sum(weight.numel() for weight in loaded.model.parameters().values())
    return {
        "parameters": parameters,
        "tokens": len(prompts) * count,
        "near ties that fell the other way": ties,
        "failures": wrong[:20],
    }


def _transformers(setting: Setting, loaded: LoadedModel) -> Any:
    """The same weights in transformers, float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    build: Any = AutoModelForCausalLM
    raw = config_json(setting)
    config = AutoConfig.for_model(**{k: v for k, v in raw.items() if k != "architectures"})
    with torch.device(setting.device):
        model = build.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.model.parameters(), strict=True)
    return model.eval()
