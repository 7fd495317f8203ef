"""Draws made inside the native step against the sampler in numpy, on logits handed to both."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from executor.plan import Draw
from executor.sampler import sample, stream
from kernels.cpu import native
from kernels.cpu.features import Variant, usable
from wire.sampling import Sampling


def picked(variant: Variant, logits: NDArray[np.float32], draws: list[Draw]) -> list[int]:
    """Each draw from the row of the same index."""
    rows = [
        (
            row,
            draw.sampling.top_k,
            draw.sampling.temperature,
            draw.sampling.top_p,
            draw.sampling.min_p,
            stream(draw.sampling.seed, draw.choice),
        )
        for row, draw in enumerate(draws)
    ]
    positions = np.array([draw.position for draw in draws], np.int32)
    tokens = native.load(variant).pick(logits, np.array(rows, native.DRAW), positions)
    return [int(token) for token in tokens]


def expected(logits: NDArray[np.float32], draws: list[Draw]) -> list[int]:
    return [drawn.token for drawn in sample(torch.from_numpy(logits), list(enumerate(draws)))]


def draw(position: int, **sampling: float) -> Draw:
    settings = Sampling(max_tokens=1, seed=11, **sampling)  # type: ignore[arg-type]
    return Draw(1, 0, position, settings, (), ())


SETTINGS: list[dict[str, float]] = [
    {"temperature": 1.0},
    {"temperature": 0.1},
    {"temperature": 3.0},
    {"temperature": 1e-9},
    {"temperature": 0.8, "top_k": 1},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 0.8, "top_k": 100_000},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.5, "top_p": 1e-6},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 0.8, "min_p": 1.0},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.7, "top_p": 0.95, "min_p": 0.1},
]


@pytest.mark.parametrize("variant", usable(), ids=lambda variant: variant.name)
@pytest.mark.parametrize("vocab", [1, 5, 64, 257, 49_153])
def test_the_native_draw_is_the_samplers(variant: Variant, vocab: int) -> None:
    random = np.random.default_rng(vocab)
    count = 24 if vocab > 1000 else 200
    wrong = 0
    for sampling in SETTINGS:
        spread = random.choice([0.3, 3.0, 12.0], (count, 1))
        logits = (random.standard_normal((count, vocab)) * spread).astype(np.float32)
        draws = [draw(position, **sampling) for position in range(count)]
        pairs = zip(picked(variant, logits, draws), expected(logits, draws), strict=True)
        wrong += sum(ours != theirs for ours, theirs in pairs)
    # Sums in another order: a draw on the edge of two candidates may fall to either, one in a million.
    assert wrong <= 1


@pytest.mark.parametrize("variant", usable(), ids=lambda variant: variant.name)
def test_equal_logits_are_ordered_by_id(variant: Variant) -> None:
    logits = np.zeros((50, 300), np.float32)
    for sampling in ({"temperature": 1.0}, {"temperature": 1.0, "top_k": 7}):
        draws = [draw(position, **sampling) for position in range(50)]
        assert picked(variant, logits, draws) == expected(logits, draws)


@pytest.mark.parametrize("variant", usable(), ids=lambda variant: variant.name)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 99])
def test_a_row_that_is_not_finite_gives_no_token(variant: Variant, bad: float, where: int) -> None:
    logits = np.zeros((1, 100), np.float32)
    logits[0, where] = bad
    assert picked(variant, logits, [draw(0, temperature=1.0)]) == [-1]


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([[0.5, 0.25, 0.125, 0.125]], np.float32)).repeat(4000, 0)
    draws = [draw(position, temperature=1.0) for position in range(4000)]
    shares = np.bincount(picked(usable()[0], logits, draws), minlength=4) / 4000
    assert np.abs(shares - [0.5, 0.25, 0.125, 0.125]).max() < 0.03


def test_the_structure_is_as_large_as_the_steps() -> None:
    assert native.DRAW.itemsize == 2 * ctypes.sizeof(ctypes.c_int64) + 4 * 8
