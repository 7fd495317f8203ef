"""The default model in bfloat16, native: as near to float32 as torch's bfloat16 is, position by position.

Teacher-forced on prose; by default 1,000 tokens, with PAGEKEEPER_FULL=1 5,000.
"""

from __future__ import annotations

import os
import pydoc_data.topics
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from tokenizers import Tokenizer

from executor.load import DEFAULT_MODEL, LoadedModel, find, load_model
from executor.native import NativeRunner, why_not
from executor.plan import Row
from executor.quantize import Weights
from executor.runner import Runner
from executor.weights import BadModel
from tests.executor.oracle import Blocks, greedy, quiet

TOKENS = 5000 if os.environ.get("PAGEKEEPER_FULL") == "1" else 1000
LENGTH = 250  # of one sequence
BLOCK = 16
BLOCKS = 2 + -(-LENGTH // BLOCK) * 4

Logits = Callable[[Sequence[Row]], torch.Tensor]

pytestmark = pytest.mark.slow


def load(dtype: str) -> LoadedModel:
    try:
        find(DEFAULT_MODEL)
    except BadModel as error:
        pytest.skip(str(error))
    kind = "float32" if dtype == "float32" else "bfloat16"
    loaded = load_model(DEFAULT_MODEL, dtype=kind, device="cpu", on_progress=quiet)  # type: ignore[arg-type]
    if reason := why_not(loaded, loaded.model.dtype):
        pytest.skip(reason)
    return loaded


def native(loaded: LoadedModel, weights: Weights = "plain") -> NativeRunner:
    return NativeRunner(
        loaded,
        num_blocks=BLOCKS,
        block_size=BLOCK,
        device="cpu",
        dtype=loaded.model.dtype,
        weights=weights,
        keep=True,
    )


def plain(loaded: LoadedModel) -> Runner:
    return Runner(
        loaded, num_blocks=BLOCKS, block_size=BLOCK, device="cpu", dtype=loaded.model.dtype
    )


def of_torch(loaded: LoadedModel) -> Logits:
    runner = plain(loaded)

    @torch.inference_mode()
    def logits(rows: Sequence[Row]) -> torch.Tensor:
        return loaded.model.logits(runner.compute(rows))

    return logits


def prose(loaded: LoadedModel) -> list[list[int]]:
    """Python's own manual, cut into sequences."""
    topics: dict[str, str] = pydoc_data.topics.topics
    tokenizer = Tokenizer.from_buffer(loaded.card.tokenizer)
    text = "\n".join(topics[name] for name in sorted(topics))
    ids = tokenizer.encode(text[: 8 * TOKENS], add_special_tokens=False).ids
    return [ids[at : at + LENGTH] for at in range(0, TOKENS, LENGTH)]


def test_float32_text_is_the_torch_runners() -> None:
    loaded = load("float32")
    tokenizer = Tokenizer.from_buffer(loaded.card.tokenizer)
    prompts = [
        tokenizer.encode(text).ids
        for text in ("The capital of France is", "def fibonacci(n):\n    ", "Once upon a time,")
    ]
    ours = greedy(native(loaded), prompts, 24, Blocks(BLOCKS, BLOCK, random.Random(0)), 5)
    assert ours == greedy(plain(loaded), prompts, 24, Blocks(BLOCKS, BLOCK, random.Random(0)), 5)


def test_bfloat16_and_stored_weights_choose_as_float32_does_as_often_as_torchs_bfloat16() -> None:
    exact, rounded = load("float32"), load("bfloat16")
    reference = of_torch(exact)
    table = list(range(1, BLOCKS))
    sides: dict[str, Logits] = {
        "native": native(rounded).logits,
        "file": native(rounded, "file").logits,
        "int8": native(rounded, "int8").logits,
        "w8a8": native(rounded, "w8a8").logits,
        "torch": of_torch(rounded),
    }
    agreed = dict.fromkeys(sides, 0)
    worst = dict.fromkeys(sides, 0.0)
    divergence = dict.fromkeys(sides, 0.0)  # Kullback and Leibler's, from float32
    near = 0.0
    check = native(exact)
    for seq, tokens in enumerate(prose(exact)):
        rows = [Row(seq, 0, tokens, table)]
        want = reference(rows)
        if seq == 0:
            near = float((check.logits(rows) - want).abs().max())
        likely = want.log_softmax(-1)
        for name, logits in sides.items():
            got = logits(rows)
            divergence[name] += float((likely.exp() * (likely - got.log_softmax(-1))).sum())
            agreed[name] += int((got.argmax(-1) == want.argmax(-1)).sum())
            worst[name] = max(worst[name], float((got - want).abs().max()))
    print({name: (agreed[name] / TOKENS, worst[name], divergence[name] / TOKENS) for name in sides})
    assert near < 2e-3
    assert agreed["native"] >= 0.97 * TOKENS
    assert agreed["native"] >= agreed["torch"] - 0.01 * TOKENS
    assert agreed["file"] >= 0.98 * TOKENS
    assert divergence["file"] < divergence["native"]
    assert agreed["int8"] >= 0.96 * TOKENS
    assert agreed["w8a8"] >= 0.93 * TOKENS
    assert divergence["w8a8"] < 0.01 * TOKENS
