"""8 bits of weights and of inputs: products of integers, exact, and scaled once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from executor.load import LoadedModel
from executor.quantize import Narrow, narrow, turned
from tests.executor.oracle import load
from tests.executor.test_native import SHAPES, mixed_steps, text
from tests.executor.test_native_quantised import (
    BATCHES,
    VARIANTS,
    Floats,
    lone_logits,
    lone_tokens,
    make_still,
    off,
    runner_of,
    stored_weights,
)
from tests.tiny import write_tiny_model

Singles = NDArray[np.float32]


def made_of(weight: Floats) -> Narrow:
    made = narrow(weight.astype(np.float32))
    assert made is not None
    return made


def whole(made: Narrow) -> Floats:
    """[outputs, padded inputs]: the integers of a matrix."""
    return made.weight.astype(np.float64) - 128


def padded(x: Floats) -> Singles:
    return np.pad(x, ((0, 0), (0, -x.shape[1] % 64))).astype(np.float32)


def in_8_bits(x: Floats) -> Floats:
    """Rows as the step sees them: turned, and rounded to 127 steps either way."""
    rows = turned(padded(x)).astype(np.float64)
    worth = np.abs(rows).max(axis=1, keepdims=True) / 127
    found: Floats = np.rint(rows / np.where(worth > 0, worth, 1)) * worth
    return found


def narrow_weights(loaded: LoadedModel) -> dict[str, Floats]:
    weights = stored_weights(loaded)
    for name, weight in weights.items():
        if weight.ndim == 2 and "embed" not in name:
            made = made_of(weight)
            weights[name] = whole(made) * made.scales[:, None]
    return weights


@pytest.mark.parametrize("hidden", [64, 70, 192])
def test_integers_are_multiplied_to_the_last_bit(tmp_path: Path, hidden: int) -> None:
    """Layers that add nothing leave the embedding, normed, as the input of the output projection."""
    folder = write_tiny_model(tmp_path / "model", hidden_size=hidden, vocab_size=261)
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weights[name] = torch.zeros_like(weight)
    save_file(weights, file)
    loaded = load(folder, "bfloat16")
    stored = stored_weights(loaded)
    made = made_of(stored["lm_head.weight"])
    x = stored["model.embed_tokens.weight"]
    x = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + loaded.config.norm_epsilon)
    rows = turned(padded(x * stored["model.norm.weight"])).astype(np.float64)
    worth = np.abs(rows).max(axis=1, keepdims=True) / 127
    steps = rows / worth
    # Float32 may round what lies halfway between two integers to either.
    clear = np.flatnonzero((np.abs(steps - np.floor(steps) - 0.5) > 1e-3).all(axis=1))
    assert len(clear) > 100
    want = np.rint(steps) @ whole(made).T
    ids = [int(clear[index % len(clear)]) for index in range(max(BATCHES))]
    for variant in VARIANTS:
        runner = runner_of(loaded, "w8a8", variant=variant)
        for count in BATCHES:
            got = runner.logits(lone_tokens(ids[:count])).double().numpy()
            found = got / made.scales / worth[ids[:count]]
            np.testing.assert_array_equal(np.rint(found), want[ids[:count]], variant.name)
            np.testing.assert_allclose(found, want[ids[:count]], rtol=3e-6, atol=0.1)


@pytest.mark.parametrize(
    "shape", ["llama", "tied", "biases", "odd sizes", "one KV head", "head of 80"]
)
def test_any_model_is_computed_in_8_bits(tmp_path: Path, shape: str) -> None:
    architecture, overrides = SHAPES[shape]
    folder = write_tiny_model(tmp_path / "model", architecture, **overrides)
    make_still(folder)
    loaded = load(folder, "bfloat16")
    weights = narrow_weights(loaded)
    embedding = stored_weights(loaded)["model.embed_tokens.weight"]
    if loaded.config.tied:
        made = made_of(embedding)
        weights["model.embed_tokens.weight"] = whole(made) * made.scales[:, None]
    ids = text(max(BATCHES))
    want = lone_logits(loaded.config, weights, ids, embedding, in_8_bits)
    for variant in VARIANTS:
        runner = runner_of(loaded, "w8a8", variant=variant)
        for count in BATCHES:
            got = runner.logits(lone_tokens(ids[:count])).double().numpy()
            errors = np.abs(got - want[:count]).max(axis=1) / want.std()
            # An input halfway between two integers may be rounded to either, which costs one step in 127.
            assert np.median(errors) < 1e-4, variant.name
            assert errors.max() < 0.05, variant.name


def test_every_build_computes_whole_texts_almost_alike_and_near_float32(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model", "qwen3", attention_bias=True)
    exact = runner_of(load(folder), "plain", block_size=8)
    loaded = load(folder, "bfloat16")
    runners = [runner_of(loaded, "w8a8", block_size=8, variant=variant) for variant in VARIANTS]
    for rows in mixed_steps(8):
        want = exact.logits(rows).double().numpy()
        for runner in runners:
            assert off(runner.logits(rows), want) < 0.05


def test_turning_twice_is_multiplying_by_64() -> None:
    values = np.random.default_rng(0).integers(-100, 100, (3, 192)).astype(np.float32)
    assert np.array_equal(turned(turned(values)), values * 64)
    assert not np.array_equal(turned(values), values * 8)


def test_a_narrow_matrix_times_turned_inputs_is_the_product() -> None:
    rng = np.random.default_rng(1)
    weight, x = rng.standard_normal((5, 70)), rng.standard_normal((4, 70))
    weight[1] = 0
    weight[2, 3] = 1000
    made = made_of(weight)
    assert made.weight.shape == (5, 128)
    turned_x = turned(padded(x)).astype(np.float64)
    got = turned_x @ (whole(made) * made.scales[:, None]).T
    bound = np.abs(turned_x).sum(axis=1)[:, None] * (made.scales / 2 * 1.001 + 1e-6)
    assert (np.abs(got - x @ weight.T) <= bound).all()
    assert (got[:, 1] == 0).all()


@pytest.mark.parametrize("wrong", [np.inf, np.nan])
def test_weights_that_are_not_finite_are_not_taken(wrong: float) -> None:
    weight = np.ones((2, 64), np.float32)
    weight[1, 5] = wrong
    assert narrow(weight) is None
