"""Quantised weights in the native step: the products are those of exactly the weights that are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from executor.load import LoadedModel
from executor.models.config import ModelConfig
from executor.native import NativeRunner, choose_weights, why_not
from executor.plan import Draw, Plan, Row
from executor.quantize import Quantised, Weights, of_floats, of_gguf, stacked
from kernels.cpu import native
from kernels.cpu.features import Variant, usable
from kernels.cpu.native import Form
from tests.executor.oracle import GREEDY, load
from tests.executor.test_gguf import write_gguf
from tests.executor.test_native import POISON, SHAPES, mixed_steps, text
from tests.tiny import write_tiny_model

VARIANTS = usable()
KINDS = (Kind.Q4_0, Kind.Q4_1, Kind.Q8_0)
Floats = NDArray[np.float64]


def runner_of(
    loaded: LoadedModel,
    weights: Weights,
    *,
    num_blocks: int = 400,
    block_size: int = 4,
    threads: int = 2,
    variant: Variant | None = None,
) -> NativeRunner:
    """A runner whose KV memory holds NaN wherever nothing was written."""
    if reason := why_not(loaded, loaded.model.dtype, block_size):
        pytest.skip(reason)
    runner = NativeRunner(
        loaded,
        num_blocks=num_blocks,
        block_size=block_size,
        device="cpu",
        dtype=loaded.model.dtype,
        threads=threads,
        weights=weights,
        keep=True,
        variant=variant,
    )
    runner.kv.memory.fill(POISON)
    return runner


def file_of(
    path: Path, kind: Kind, architecture: str = "llama", *, still: bool = False, **overrides: Any
) -> Path:
    """A GGUF file of a tiny model."""
    folder = write_tiny_model(path / "folder", architecture, **overrides)
    if still:
        make_still(folder)
    return write_gguf(path / f"{kind.name}.gguf", folder, architecture, kind)


def make_still(folder: Path) -> None:
    """Let V be a bias that bfloat16 has exactly, so that nothing is rounded to bfloat16 on the way."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, weight in weights.items():
        if "v_proj.weight" in name:
            weights[name] = torch.zeros_like(weight)
        if "v_proj.bias" in name:
            weights[name] = weight.bfloat16().float()
    save_file(weights, file)


def lone_tokens(ids: Sequence[int]) -> list[Row]:
    """Sequences of one token."""
    return [Row(seq, 0, [token], [seq + 1]) for seq, token in enumerate(ids)]


def lone_logits(
    config: ModelConfig,
    weights: Mapping[str, Floats],
    ids: Sequence[int],
    embedding: Floats,
    inputs: Callable[[Floats], Floats] = lambda x: x,
) -> Floats:
    """[ids, vocab] of a Llama for sequences of one token, which attend to themselves alone: what they get is
    their own V, kept in bfloat16.

    Args:
        embedding: [vocab, hidden], to be looked up in.
        inputs: what products make of theirs.
    """

    def linear(x: Floats, name: str) -> Floats:
        y = inputs(x) @ weights[f"{name}.weight"].T
        return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y

    def normed(x: Floats, name: str) -> Floats:
        mean = (x * x).mean(axis=-1, keepdims=True)
        result: Floats = x / np.sqrt(mean + config.norm_epsilon) * weights[f"{name}.weight"]
        return result

    x = embedding[list(ids)]
    for index in range(config.layers):
        at = f"model.layers.{index}"
        value = linear(normed(x, f"{at}.input_layernorm"), f"{at}.self_attn.v_proj")
        kept = torch.from_numpy(value).float().bfloat16().double().numpy()
        heads = kept.reshape(len(x), config.kv_heads, config.head_dim)
        shared = np.repeat(heads, config.heads // config.kv_heads, axis=1)
        x = x + linear(shared.reshape(len(x), -1), f"{at}.self_attn.o_proj")
        inner = normed(x, f"{at}.post_attention_layernorm")
        gate, up = linear(inner, f"{at}.mlp.gate_proj"), linear(inner, f"{at}.mlp.up_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * up, f"{at}.mlp.down_proj")
    head = "model.embed_tokens" if config.tied else "lm_head"
    return linear(normed(x, "model.norm"), head)


def stored_weights(loaded: LoadedModel) -> dict[str, Floats]:
    return {
        name: place.double().numpy(force=True) for name, place in loaded.model.parameters().items()
    }


def in_8_bits(loaded: LoadedModel) -> dict[str, Floats]:
    """What `int8` makes of a model; the rows of a tied embedding are looked up as they were."""
    weights = stored_weights(loaded)
    for name, weight in weights.items():
        if weight.ndim == 2 and "embed" not in name:
            made = of_floats(weight.astype(np.float32))
            assert made is not None
            weights[name] = made.floats()[:, : weight.shape[1]].astype(np.float64)
    return weights


def looked_up(kind: Kind, exact: LoadedModel, ours: LoadedModel) -> Floats:
    """The rows of the embedding: of 8 bits they are kept as they are stored, others in bfloat16."""
    loaded = exact if kind == Kind.Q8_0 else ours
    return loaded.model.embedding.double().numpy(force=True)


def worst(logits: torch.Tensor, want: Floats) -> float:
    """The greatest error, in parts of the logits' spread."""
    return float(np.abs(logits.double().numpy() - want).max() / want.std())


def off(logits: torch.Tensor, want: Floats) -> float:
    """The usual error, in parts of the logits' spread."""
    return float(np.square(logits.double().numpy() - want).mean() ** 0.5 / want.std())


EXACT = 1e-3  # parts of the logits' spread: what inputs of 16 bits may cost
# One more than a tile, as many as are unpacked on the way, one more, several parts.
BATCHES = (1, 2, 7, 12, 13, 37, 300)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("tied", [False, True])
def test_a_files_weights_are_multiplied_as_they_are_stored(
    tmp_path: Path, kind: Kind, tied: bool
) -> None:
    path = file_of(tmp_path, kind, still=True, tie_word_embeddings=tied, attention_bias=True)
    exact, ours = load(path), load(path, "bfloat16")
    weights = stored_weights(exact)
    ids = text(max(BATCHES))
    want = lone_logits(exact.config, weights, ids, looked_up(kind, exact, ours))
    for variant in VARIANTS:
        runner = runner_of(ours, "file", variant=variant)
        for count in BATCHES:
            got = runner.logits(lone_tokens(ids[:count]))
            assert worst(got, want[:count]) < EXACT, variant.name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_values_are_those_of_the_stored_weights_in_bfloat16(tmp_path: Path, kind: Kind) -> None:
    path = file_of(tmp_path, kind)
    exact, ours = load(path), load(path, "bfloat16")
    weights, ids = stored_weights(exact), text(300)
    want = lone_logits(exact.config, weights, ids, looked_up(kind, exact, ours))
    stored, rounded = (
        off(runner_of(ours, held).logits(lone_tokens(ids)), want) for held in ("file", "plain")
    )
    assert stored < 2e-3
    assert stored < rounded / 2


@pytest.mark.parametrize(
    "shape", ["llama", "biases", "odd sizes", "one KV head", "head of 80", "as many KV heads"]
)
def test_8_bits_made_of_any_model_are_multiplied_exactly(tmp_path: Path, shape: str) -> None:
    architecture, overrides = SHAPES[shape]
    folder = write_tiny_model(tmp_path / "model", architecture, **overrides)
    make_still(folder)
    loaded = load(folder, "bfloat16")
    weights = in_8_bits(loaded)
    ids = text(max(BATCHES))
    want = lone_logits(loaded.config, weights, ids, weights["model.embed_tokens.weight"])
    for variant in VARIANTS:
        runner = runner_of(loaded, "int8", variant=variant)
        for count in BATCHES:
            got = runner.logits(lone_tokens(ids[:count]))
            assert worst(got, want[:count]) < EXACT, variant.name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_whole_texts_are_nearer_to_float32_than_with_weights_rounded_to_bfloat16(
    tmp_path: Path, architecture: str, kind: Kind
) -> None:
    path = file_of(tmp_path, kind, architecture)
    ours = load(path, "bfloat16")
    exact = runner_of(load(path), "plain", block_size=8)
    stored = runner_of(ours, "file", block_size=8)
    rounded = runner_of(ours, "plain", block_size=8)
    errors = [0.0, 0.0]
    for rows in mixed_steps(8):
        want = exact.logits(rows)
        for index, runner in enumerate((stored, rounded)):
            errors[index] += float((runner.logits(rows) - want).square().sum())
    assert errors[0] < errors[1]


@pytest.mark.parametrize("weights", ["file", "int8", "w8a8"])
def test_a_token_has_the_same_logits_to_the_last_bit_whatever_the_chunks_and_the_company(
    tmp_path: Path, weights: Weights
) -> None:
    loaded = load(file_of(tmp_path, Kind.Q4_1), "bfloat16")
    lengths = (37, 5, 64, 1, 20, 130)
    whole = [
        runner_of(loaded, weights, threads=1).logits([Row(0, 0, text(n, n), list(range(1, 40)))])
        for n in lengths
    ]
    for seed, threads in ((0, 1), (1, 2), (2, 3)):
        runner = runner_of(loaded, weights, threads=threads)
        for rows in mixed_steps(4, seed):
            want = [whole[row.seq][row.start : row.start + len(row.tokens)] for row in rows]
            assert torch.equal(runner.logits(rows), torch.cat(want))
    ids = text(300)
    alone = [runner.logits(lone_tokens([token])) for token in ids]
    assert torch.equal(runner.logits(lone_tokens(ids)), torch.cat(alone))


@pytest.mark.parametrize("weights", ["file", "int8", "w8a8"])
def test_one_row_of_nan_fails_alone(tmp_path: Path, weights: Weights) -> None:
    loaded = load(file_of(tmp_path, Kind.Q4_1), "bfloat16")

    def draw(seq: int, position: int) -> Draw:
        return Draw(seq, 0, position, GREEDY, [], [])

    good = Row(1, 0, text(6), [5, 6], (draw(1, 6),))
    healthy = runner_of(loaded, weights).run(Plan(1, [good]))[0].token
    # Sequence 2 claims 4 computed tokens in block 9, which holds NaN.
    bad = Row(2, 4, [65], [9, 10], (draw(2, 5),))
    drawn = runner_of(loaded, weights).run(Plan(1, [bad, good]))
    assert [one.token for one in drawn] == [-1, healthy]


@pytest.mark.parametrize("kinds", [(Kind.F16,), (Kind.Q4_1, Kind.Q8_0), (Kind.Q8_0, Kind.Q5_1)])
def test_matrices_of_other_or_several_kinds_are_multiplied_in_bfloat16(
    tmp_path: Path, kinds: Sequence[Kind]
) -> None:
    """Parts that are multiplied as one, such as q, k and v, take turns with the kinds."""
    path = tmp_path / "mixed.gguf"
    folder = write_tiny_model(tmp_path / "folder")
    stored = iter([kinds[index % len(kinds)] for index in range(100)])
    write_gguf(path, folder, "llama", Kind.F32, each=lambda name: next(stored))
    exact, ours = load(path), load(path, "bfloat16")
    mixed, rounded = runner_of(ours, "file"), runner_of(ours, "plain")
    ids = text(40)
    weights = stored_weights(exact)
    want = lone_logits(exact.config, weights, ids, weights["model.embed_tokens.weight"])
    assert off(mixed.logits(lone_tokens(ids)), want) <= 1.2 * off(
        rounded.logits(lone_tokens(ids)), want
    )


def test_parts_are_one_matrix_only_if_all_are_stored_alike() -> None:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((6, 64), np.float32)
    eight = of_floats(values)
    four = of_gguf(gguf.quantize(values, Kind.Q4_1), Kind.Q4_1)
    assert stacked([eight, four]) is None
    assert stacked([eight, None]) is None
    both = stacked([four, four])
    assert both is not None
    assert four is not None
    assert np.array_equal(both.floats(), np.concatenate([four.floats()] * 2))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_stored_matrix_stands_for_what_the_gguf_package_says(kind: Kind) -> None:
    values = np.random.default_rng(1).standard_normal((10, 96), np.float32)
    raw = gguf.quantize(values, kind)
    found = of_gguf(raw, kind)
    assert found is not None
    # The package takes 8 from a nibble before it scales: the same, for half precision is enough for both.
    np.testing.assert_allclose(found.floats(), gguf.dequantize(raw, kind), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [Kind.Q5_0, Kind.F16, Kind.Q4_K])
def test_other_kinds_are_not_taken(kind: Kind) -> None:
    assert of_gguf(np.zeros((2, 144), np.uint8), kind) is None


@pytest.mark.parametrize(
    "scale", [0x7C00, 0x7E00, 0x7400]
)  # infinity, NaN, 16384: times 8 infinite
def test_scales_that_are_not_finite_are_not_taken(scale: int) -> None:
    raw = np.zeros((1, 18), np.uint8)
    raw[0, :2] = np.array([scale], "<u2").view(np.uint8)
    assert of_gguf(raw, Kind.Q4_0) is None


def test_8_bits_are_the_nearest_of_each_group() -> None:
    values = np.random.default_rng(2).standard_normal((5, 70)).astype(np.float32)
    values[1] = 0
    values[2, :32] *= 1e-3
    made = of_floats(values)
    assert made is not None
    assert made.weight.shape == (5, 96)
    got = made.floats()
    assert (got[:, 70:] == 0).all()
    assert (got[1] == 0).all()
    step = np.repeat(made.scales.astype(np.float32), 32, axis=1)[:, :70]
    assert (np.abs(got[:, :70] - values) <= step * 0.57).all()  # the scale itself is rounded too


def test_weights_too_great_for_a_half_precision_scale_are_not_taken() -> None:
    assert of_floats(np.full((1, 32), 1e9, np.float32)) is None


def test_pack_refuses_shapes_that_do_not_fit() -> None:
    library = native.load()
    made = of_floats(np.ones((4, 32), np.float32))
    assert made is not None
    for wrong in (
        Quantised(Form.BYTES, made.weight[:, :16], made.scales, None),
        Quantised(Form.BYTES, made.weight, made.scales, made.scales),
        Quantised(Form.NIBBLES, made.weight, made.scales, None),
    ):
        with pytest.raises(ValueError, match="do not fit"):
            library.pack_groups(
                native.Arena(), wrong.form, wrong.weight, wrong.scales, wrong.offsets
            )


@pytest.mark.parametrize(
    ("stored", "asked", "dtype", "held"),
    [
        (Kind.Q4_1, "auto", "bfloat16", "file"),
        (Kind.Q4_1, "file", "bfloat16", "file"),
        (Kind.Q4_1, "plain", "bfloat16", "plain"),
        (Kind.Q4_1, "auto", "float32", "plain"),
        (Kind.F16, "auto", "bfloat16", "plain"),
        (Kind.F16, "int8", "bfloat16", "int8"),
        (None, "auto", "bfloat16", "plain"),
        (None, "int8", "bfloat16", "int8"),
        (Kind.Q4_1, "w8a8", "bfloat16", "w8a8"),
    ],
)
def test_weights_are_held_as_in_the_file_where_that_is_quantised_and_nothing_else_is_asked(
    tmp_path: Path, stored: Kind | None, asked: Any, dtype: Any, held: str
) -> None:
    loaded = load(
        file_of(tmp_path, stored) if stored else write_tiny_model(tmp_path / "model"), dtype
    )
    assert choose_weights(asked, loaded, loaded.model.dtype) == held


@pytest.mark.parametrize(
    ("stored", "asked", "dtype", "said"),
    [
        (Kind.Q4_1, "file", "float32", "--weights file needs --dtype bfloat16"),
        (Kind.F16, "int8", "float32", "--weights int8 needs --dtype bfloat16"),
        (None, "w8a8", "float32", "--weights w8a8 needs --dtype bfloat16"),
        (Kind.F16, "file", "bfloat16", "no weights in Q4_0, Q4_1 or Q8_0"),
        (None, "file", "bfloat16", "use --weights int8 or --weights plain"),
    ],
)
def test_weights_that_cannot_be_held_so_are_refused_with_what_can(
    tmp_path: Path, stored: Kind | None, asked: Any, dtype: Any, said: str
) -> None:
    loaded = load(
        file_of(tmp_path, stored) if stored else write_tiny_model(tmp_path / "model"), dtype
    )
    with pytest.raises(ValueError, match=said):
        choose_weights(asked, loaded, loaded.model.dtype)


def test_the_weights_of_the_loaded_model_are_dropped_once_packed(tmp_path: Path) -> None:
    loaded = load(file_of(tmp_path, Kind.Q8_0), "bfloat16")
    if reason := why_not(loaded, torch.bfloat16):
        pytest.skip(reason)
    rows = lone_tokens(text(3))
    want = runner_of(loaded, "file").logits(rows)
    runner = NativeRunner(
        loaded, num_blocks=64, block_size=4, device="cpu", dtype=torch.bfloat16, weights="file"
    )
    assert all(layer.down.weight.numel() == 0 for layer in loaded.model.layers)
    assert loaded.model.embedding.numel() == 0
    assert torch.equal(runner.logits(rows), want)
