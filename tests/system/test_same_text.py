"""The same greedy text whatever happens to a request: batch, chunks, cache, forks, preemption.

By default on a tiny random model; `PAGEKEEPER_FULL=1` runs it on SmolLM2 in float32 with longer texts. A
first difference is allowed only where the two likeliest logits are closer than `NEAR_TIE`; each is printed.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from executor.load import LoadedModel, load_model
from executor.native import why_not
from tests.system.machine import BLOCK_SIZE, Machine, Text, differences
from tests.tiny import write_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]

FULL = os.environ.get("PAGEKEEPER_FULL") == "1"
TOKENS = 64 if FULL else 24
PLENTY = 2000
Build = Callable[..., Machine]
# Lengths around the block size, exact multiples of it, and longer than the largest chunk.
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 64, 65, 100, 128, 161, 530)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    torch.set_num_threads(2)
    source = "smollm2"
    if not FULL:
        folder: Path = tmp_path_factory.mktemp("model")
        source = str(write_tiny_model(folder, max_position_embeddings=1024))
    return load_model(source, dtype="float32", device="cpu", on_progress=lambda what, share: None)


@pytest.fixture(scope="module", params=["torch", "native"])
def build(request: pytest.FixtureRequest, loaded: LoadedModel) -> Build:
    """How to make a machine, with either kind of step."""
    native = request.param == "native"
    if native and (reason := why_not(loaded, torch.float32)):
        pytest.skip(reason)
    return partial(Machine, loaded, native=native)


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    chance = random.Random(2)
    vocab = min(loaded.config.vocab_size, 40_000)
    return [[chance.randrange(20, vocab) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def solo(build: Build, prompts: list[list[int]]) -> list[Text]:
    """Each prompt alone in a cold pool, in one chunk."""
    return [build(200, step_tokens=1024).generate([prompt], TOKENS)[0][0] for prompt in prompts]


def same(expected: list[Text], got: list[list[Text]], what: str) -> None:
    for choice in range(len(got[0])):
        ties, wrong = differences(expected, [texts[choice] for texts in got])
        for tie in ties:
            print(f"{what}: near-tie: {tie}")
        assert not wrong, what


def test_a_batch_of_sixteen_gives_what_each_gives_alone(
    build: Build, prompts: list[list[int]], solo: list[Text]
) -> None:
    same(solo, build(PLENTY).generate(prompts, TOKENS), "batch of 16")


@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_the_chunk_size_does_not_change_the_text(
    build: Build, prompts: list[list[int]], solo: list[Text], chunk: int
) -> None:
    machine = build(PLENTY, step_tokens=chunk)
    same(solo, machine.generate(prompts, TOKENS), f"chunks of {chunk}")


def test_a_prefix_hit_gives_what_a_miss_gives(
    build: Build, prompts: list[list[int]], solo: list[Text]
) -> None:
    """Whole blocks, half a block, and prompts of exactly k blocks, which are all in LENGTHS."""
    machine = build(PLENTY)
    same(solo, machine.generate(prompts, TOKENS), "miss")
    hits = machine.memory.core.pools["test"].counters.hits
    same(solo, machine.generate(prompts, TOKENS), "hit")
    cached = sum(
        min(length - 1, (length + TOKENS - 1) // BLOCK_SIZE * BLOCK_SIZE) for length in LENGTHS
    )
    assert machine.memory.core.pools["test"].counters.hits - hits == cached


def test_a_prompt_that_leaves_a_cached_block_half_way_gives_its_own_text(
    build: Build, prompts: list[list[int]]
) -> None:
    stem = prompts[-2][:72]
    branches = [stem + [50 + which] * (20 + which) for which in range(6)]
    alone = [build(200).generate([branch], TOKENS)[0][0] for branch in branches]
    machine = build(PLENTY)
    machine.generate([prompts[-2]], 4)
    same(alone, machine.generate(branches, TOKENS), "half a block")
    assert machine.memory.core.pools["test"].counters.hits == 6 * 72


def test_a_pool_so_small_that_it_preempts_gives_what_a_large_one_gives(
    build: Build, prompts: list[list[int]], solo: list[Text]
) -> None:
    machine = build(45)
    same(solo, machine.generate(prompts, TOKENS), "preempted")
    assert machine.preemptions > 0


def test_thirty_two_at_once_with_a_prefix_nobody_has_seen_agree_with_one_alone(
    build: Build, prompts: list[list[int]]
) -> None:
    prefix = prompts[-2][:100]
    family = [[*prefix, 60 + which] for which in range(32)]
    alone = [build(200).generate([prompt], TOKENS)[0][0] for prompt in family]
    machine = build(PLENTY)
    same(alone, machine.generate(family, TOKENS), "32 at once")
    assert machine.memory.core.pools["test"].counters.merges > 0


def test_every_choice_of_a_group_gives_the_greedy_text(
    build: Build, prompts: list[list[int]], solo: list[Text]
) -> None:
    same(solo[:13], build(PLENTY).generate(prompts[:13], TOKENS, n=3), "forks")


def test_groups_preempted_in_a_small_pool_give_the_greedy_text(
    build: Build, prompts: list[list[int]], solo: list[Text]
) -> None:
    machine = build(60)
    same(solo[:13], machine.generate(prompts[:13], TOKENS, n=3), "forks in a small pool")
    assert machine.preemptions > 0
