"""Transformers as the oracle, and helpers to drive a runner the way a scheduler would."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from executor.load import LoadedModel, load_model
from executor.plan import Draw, Draws, Plan, Row
from executor.runner import Runner
from wire.sampling import Sampling

GREEDY = Sampling(seed=0, temperature=0)


def quiet(what: str, share: float) -> None:
    """A progress callback that shows nothing."""


def reference_model(folder: Path, **options: Any) -> Any:
    """The folder's model in transformers, float32."""
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, **options
    )
    model, info = loaded
    assert not any(
        info.get(kind) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    )
    return model.eval()


@torch.inference_mode()
def reference_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab] in one forward pass."""
    logits: torch.Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


@torch.inference_mode()
def reference_greedy(model: Any, prompt: Sequence[int], count: int) -> list[int]:
    """`count` tokens of transformers' own generate; end tokens do not end it."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count
    )
    generated: list[int] = out[0, len(prompt) :].tolist()
    return generated


def load(folder: Path | str, dtype: Any = "float32") -> LoadedModel:
    return load_model(str(folder), dtype=dtype, device="cpu", on_progress=quiet)


def poisoned_runner(loaded: LoadedModel, num_blocks: int = 64, block_size: int = 4) -> Runner:
    """A runner whose KV memory holds NaN wherever nothing was written."""
    runner = Runner(
        loaded,
        num_blocks=num_blocks,
        block_size=block_size,
        device="cpu",
        dtype=loaded.model.dtype,
    )
    runner.kv.keys.fill_(float("nan"))
    runner.kv.values.fill_(float("nan"))
    return runner


class Blocks:
    """Hands out the blocks of a pool in random order."""

    def __init__(self, num_blocks: int, block_size: int, rng: random.Random) -> None:
        self.free = rng.sample(range(1, num_blocks), num_blocks - 1)
        self.block_size = block_size
        self.tables: dict[int, list[int]] = {}

    def table(self, seq: int, tokens: int) -> list[int]:
        """The sequence's table, grown to hold so many tokens."""
        table = self.tables.setdefault(seq, [])
        while len(table) * self.block_size < tokens:
            table.append(self.free.pop())
        return list(table)


class Runs(Protocol):
    """What computes plans."""

    def run(self, plan: Plan) -> Draws: ...


def greedy(
    runner: Runs, prompts: Sequence[Sequence[int]], count: int, blocks: Blocks, chunk: int = 512
) -> list[list[int]]:
    """`count` greedy tokens for each prompt, all in one batch, prompts in chunks."""
    tokens = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    step = 0
    while any(len(t) < len(p) + count for t, p in zip(tokens, prompts, strict=True)):
        rows = []
        for seq, (prompt, sequence) in enumerate(zip(prompts, tokens, strict=True)):
            if len(sequence) >= len(prompt) + count:
                continue
            start = computed[seq]
            part = sequence[start : start + chunk]
            end = start + len(part)
            draw = Draw(seq, 0, end, GREEDY, list(prompt), sequence[len(prompt) :])
            draws = (draw,) if end == len(sequence) else ()
            rows.append(Row(seq, start, part, blocks.table(seq, end), draws))
            computed[seq] = end
        step += 1
        drawn = runner.run(Plan(step, rows))
        for one in drawn:
            tokens[one.seq].append(one.token)
    return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]
