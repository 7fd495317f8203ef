"""The default model, token for token against transformers' generate in float32.

By default a few prompts; with PAGEKEEPER_FULL=1 thirty prompts of 64 tokens each.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from executor.load import DEFAULT_MODEL, LoadedModel, find, load_model
from executor.native import NativeRunner, why_not
from executor.plan import Row
from executor.runner import Runner
from executor.weights import BadModel
from tests.executor.oracle import (
    Blocks,
    greedy,
    load,
    poisoned_runner,
    quiet,
    reference_greedy,
    reference_model,
)

FULL = os.environ.get("PAGEKEEPER_FULL") == "1"
PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Once upon a time, in a village by the river,",
    "def fibonacci(n):\n    ",
    "Explain photosynthesis to a ten-year-old.",
    "List five uses for a paper clip.",
    "Übersetze ins Englische: Guten Morgen, wie geht es dir?",
    "SELECT name, age FROM users WHERE",
    "The three laws of thermodynamics are",
    "Q: What is 17 + 25?\nA:",
    "请用一句话介绍你自己。",
    "import numpy as np\n\nx = np.array([1, 2, 3])\n",
    "Dear Sir or Madam,\n\nI am writing to",
    "{\"name\": \"Ada\", \"born\": 1815, \"known_for\": ",
    "Why is the sky blue?",
    "Tell me a joke about computers.",
    "a",
    "The quick brown fox jumps over the lazy dog. " * 6,
    "Summarise: Water boils at 100 degrees Celsius at sea level. At altitude it boils at less.",
    "0, 1, 1, 2, 3, 5, 8, 13,",
    "# Recipe: pancakes\n\n## Ingredients\n-",
    "In 1969, Neil Armstrong",
    "Give me three names for a cat.",
    "What are the differences between TCP and UDP?",
    "\n\n\n",
    "😀😀😀 What do these mean?",
    "Chapter 1\n\nIt was a dark and stormy night;",
    "Translate to French: The book is on the table.",
    "for i in range(10):\n    print(i",
    "Which planet is the largest? Answer in one word.",
]  # fmt: skip
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    try:
        find(DEFAULT_MODEL)
    except BadModel as error:
        pytest.skip(str(error))
    return load(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def oracle() -> Any:
    from transformers import GgufConfig

    path = find(DEFAULT_MODEL)
    return reference_model(
        path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True)
    )


def prompts(loaded: LoadedModel) -> list[list[int]]:
    """Every other prompt as a chat turn, the rest as plain text."""
    tokenizer = Tokenizer.from_buffer(loaded.card.tokenizer)
    texts = [CHAT.format(p) if i % 2 == 0 else p for i, p in enumerate(PROMPTS)]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.fixture(scope="module")
def wanted(loaded: LoadedModel, oracle: Any) -> list[list[int]]:
    """What transformers' generate says to each prompt, or to the first ones."""
    chosen = prompts(loaded) if FULL else prompts(loaded)[:4]
    return [reference_greedy(oracle, prompt, 64 if FULL else 16) for prompt in chosen]


@pytest.mark.timeout(1800 if FULL else 300)
@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_greedy_tokens_equal_transformers_generate(
    loaded: LoadedModel, wanted: list[list[int]], kernels: str
) -> None:
    runner: Runner | NativeRunner = poisoned_runner(loaded, num_blocks=600, block_size=16)
    if kernels == "native":
        if reason := why_not(loaded, torch.float32):
            pytest.skip(reason)
        runner = NativeRunner(
            loaded, num_blocks=600, block_size=16, device="cpu", dtype=torch.float32, keep=True
        )
        runner.kv.memory.fill(0xFF)  # NaN
    chosen = prompts(loaded)[: len(wanted)]
    ours = greedy(runner, chosen, len(wanted[0]), Blocks(600, 16, random.Random(0)), chunk=24)
    differ = {
        PROMPTS[i]: pair
        for i, pair in enumerate(zip(ours, wanted, strict=True))
        if pair[0] != pair[1]
    }
    assert differ == {}


def test_logits_stay_within_a_thousandth_over_a_long_context(
    loaded: LoadedModel, oracle: Any
) -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(49152) for _ in range(1500 if FULL else 300)]
    blocks = list(range(1, 101))
    runner = poisoned_runner(loaded, num_blocks=101, block_size=16)
    logits = []
    for start in range(0, len(tokens), 100):
        row = Row(1, start, tokens[start : start + 100], blocks)
        with torch.inference_mode():
            logits.append(loaded.model.logits(runner.compute([row])[-1:]))
    with torch.inference_mode():
        wanted = oracle(torch.tensor([tokens]), use_cache=False).logits[0, 99::100]
    torch.testing.assert_close(torch.cat(logits), wanted, rtol=0, atol=1e-3)


def test_the_card_is_complete(loaded: LoadedModel) -> None:
    card = loaded.card
    assert (card.name, card.architecture) == ("SmolLM2-135M-Instruct", "LlamaForCausalLM")
    assert (card.context_length, card.vocab_size, card.eos_ids) == (8192, 49152, (2,))
    assert "<|im_start|>" in card.chat_template
    assert not card.add_bos


def test_bfloat16_takes_half_the_memory(loaded: LoadedModel) -> None:
    half = load_model(DEFAULT_MODEL, dtype="bfloat16", device="cpu", on_progress=quiet)
    assert half.digest == loaded.digest
    sizes = [
        sum(weight.nbytes for weight in model.model.parameters().values())
        for model in (loaded, half)
    ]
    assert sizes[0] == 2 * sizes[1] == 4 * 134_515_008
