"""The native step against the torch runner: same plans, same tokens."""

from __future__ import annotations

import random
import re
import shutil
import threading
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.load import LoadedModel
from executor.native import NativeRunner, why_not
from executor.native_batch import Batch, Batches
from executor.plan import UNKNOWN, Draw, Ids, Lanes, Members, Plan, Row, Tables
from executor.runner import Runner
from executor.sampler import sample
from kernels.cpu import build
from kernels.cpu.features import Variant, usable
from kernels.cpu.native import ROWS, Step
from tests.executor.oracle import GREEDY, Blocks, greedy, load, poisoned_runner
from tests.tiny import write_tiny_model
from wire.memory import Copy
from wire.sampling import Bias, Sampling

VARIANTS = usable()
POISON = 0xFF  # as float32 and as bfloat16 it reads NaN
ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 9}),
    "window of one": ("mistral", {"sliding_window": 1}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "odd sizes": ("llama", {"hidden_size": 70, "intermediate_size": 102, "vocab_size": 261}),
    "one KV head": ("llama", {"num_attention_heads": 7, "num_key_value_heads": 1}),
    "as many KV heads": ("llama", {"num_key_value_heads": 4}),
    "many heads": ("qwen3", {"num_attention_heads": 20, "num_key_value_heads": 2}),
    "head of 32": ("llama", {"head_dim": 32}),
    "head of 80": ("llama", {"head_dim": 80}),
    "head of 128": ("qwen3", {"head_dim": 128}),
    "head of 256": ("qwen2", {"head_dim": 256}),
    **{kind: ("llama", {"rope_scaling": given}) for kind, given in ROPES.items()},
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_tiny_model(tmp_path_factory.mktemp("model")))


def native(
    loaded: LoadedModel,
    num_blocks: int = 64,
    block_size: int = 4,
    *,
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
        keep=True,
        variant=variant,
    )
    runner.kv.memory.fill(POISON)
    return runner


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def draw(seq: int, position: int, sampling: Sampling = GREEDY, choice: int = 0) -> Draw:
    return Draw(seq, choice, position, sampling, [], [])


@torch.inference_mode()
def torch_logits(runner: Runner, loaded: LoadedModel, rows: Sequence[Row]) -> torch.Tensor:
    return loaded.model.logits(runner.compute(rows))


def mixed_steps(block_size: int, seed: int = 0) -> list[list[Row]]:
    """Prompts in chunks, decodes beside them, tables in random order: the rows of a few steps."""
    rng = random.Random(seed)
    blocks = Blocks(400, block_size, rng)
    texts = [text(length, length) for length in (37, 5, 64, 1, 20, 130)]
    steps: list[list[Row]] = []
    done = [0] * len(texts)
    while any(at < len(tokens) for at, tokens in zip(done, texts, strict=True)):
        rows = []
        for seq, tokens in enumerate(texts):
            part = tokens[done[seq] : done[seq] + rng.choice((1, 1, 2, 7, 33))]
            if part:
                end = done[seq] + len(part)
                rows.append(Row(seq, done[seq], part, blocks.table(seq, end)))
                done[seq] = end
        rng.shuffle(rows)
        steps.append(rows)
    return steps


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_the_torch_runner_for_every_shape_and_build(
    tmp_path: Path, shape: str, variant: Variant
) -> None:
    architecture, overrides = SHAPES[shape]
    loaded = load(write_tiny_model(tmp_path / "model", architecture, **overrides))
    ours, theirs = native(loaded, 400, 8, variant=variant), poisoned_runner(loaded, 400, 8)
    for rows in mixed_steps(8):
        want = torch_logits(theirs, loaded, rows)
        torch.testing.assert_close(ours.logits(rows), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("block_size", [1, 2, 3, 12, 16, 24, 64, 128])
def test_any_block_size_gives_the_same_logits(
    loaded: LoadedModel, block_size: int, variant: Variant
) -> None:
    ours = native(loaded, 400, block_size, variant=variant)
    theirs = poisoned_runner(loaded, 400, block_size)
    for rows in mixed_steps(block_size):
        want = torch_logits(theirs, loaded, rows)
        torch.testing.assert_close(ours.logits(rows), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_has_the_same_logits_to_the_last_bit_whatever_the_chunks_and_the_company(
    tmp_path: Path, dtype: str
) -> None:
    # A window, so that the keys a tile shares differ from those each of its tokens sees.
    folder = write_tiny_model(tmp_path / "model", "mistral", sliding_window=21, head_dim=32)
    loaded = load(folder, dtype)
    whole: dict[int, torch.Tensor] = {}
    for seq, length in enumerate((37, 5, 64, 1, 20, 130)):
        table = list(range(1, 40))
        runner = native(loaded, 400, 4, threads=1)
        whole[seq] = runner.logits([Row(seq, 0, text(length, length), table)])
    for seed, threads in ((0, 1), (1, 2), (2, 3)):
        runner = native(loaded, 400, 4, threads=threads)
        for rows in mixed_steps(4, seed):
            logits = runner.logits(rows)
            want = [whole[row.seq][row.start : row.start + len(row.tokens)] for row in rows]
            assert torch.equal(logits, torch.cat(want))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_threads_that_take_tokens_through_the_layers_wait_for_what_they_read(
    tmp_path: Path, dtype: str
) -> None:
    # Many tokens in one step; the last rows read what the others write in the same step.
    loaded = load(write_tiny_model(tmp_path / "model", num_hidden_layers=6), dtype)
    lengths = (130, 1, 64, 90)
    tables = [list(range(first, first + 40)) for first in (200, 240, 280, 320)]
    texts = [text(length, length) for length in lengths]
    one = native(loaded, 400, 4, threads=1)
    whole = [
        one.logits([Row(seq, 0, tokens, table)])
        for seq, (tokens, table) in enumerate(zip(texts, tables, strict=True))
    ]
    follow = [Row(4, 120, texts[0][120:], tables[0][:30] + list(range(360, 370)))]
    starts = (4, 48, 88)
    follow += [
        Row(5 + i, at, texts[3][at : at + 1], [*tables[3][: at // 4], 370 + i])
        for i, at in enumerate(starts)
    ]
    tails = [whole[0][120:], *(whole[3][at : at + 1] for at in starts)]
    rng = random.Random(0)
    for threads in (2, 3, 7):
        runner = native(loaded, 400, 4, threads=threads)
        for turn in range(60):
            runner.kv.memory.fill(POISON)
            counts = (rng.randint(120, 130), 1, rng.randint(40, 64), rng.randint(88, 90))
            rows = [Row(seq, 0, texts[seq][:n], tables[seq]) for seq, n in enumerate(counts)]
            want = [logits[:n] for logits, n in zip(whole, counts, strict=True)]
            if turn % 2:  # readers stand before writers
                rows, want = [*follow, *rows], [*tails, *want]
            else:
                rows, want = [*rows, *follow], [*want, *tails]
            assert torch.equal(runner.logits(rows), torch.cat(want))


def test_a_token_that_decodes_sees_what_another_writes_in_the_same_step(
    loaded: LoadedModel,
) -> None:
    tokens, table = text(21), list(range(1, 7))
    want = native(loaded, threads=1).logits([Row(0, 0, tokens, table)])
    writer, reader = Row(0, 19, tokens[19:20], table), Row(1, 20, tokens[20:], [*table[:5], 9])
    for threads in (1, 2, 3):
        for rows in ([writer, reader], [reader, writer]):
            runner = native(loaded, threads=threads)
            runner.logits([Row(0, 0, tokens[:19], table)])
            logits = runner.logits(rows)
            assert torch.equal(logits, torch.stack([want[row.start] for row in rows]))


def test_a_thread_that_loses_its_core_at_any_store_spoils_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The same sources, but now and then a thread sleeps before it writes a word that others wait for.
    folder = tmp_path / "source"
    shutil.copytree(
        build.SOURCE.parent, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__")
    )
    header = (folder / "threads.h").read_text()
    header, places = re.subn(
        r"(?m)^( +)(?=[^/\n]*(?:words_\[\w+\]|shares_\[\w+\]|pending_)\.(?:store|fetch_sub)\()",
        r"\1dawdle(); ",
        header,
    )
    assert places >= 5
    (folder / "threads.h").write_text(
        header.replace(
            "namespace {",
            """#include <chrono>
#include <thread>
namespace {
void dawdle() {
    thread_local unsigned drawn = std::hash<std::thread::id>{}(std::this_thread::get_id());
    drawn = drawn * 1664525 + 1013904223;
    if (drawn >> 26 == 0) std::this_thread::sleep_for(std::chrono::microseconds(drawn >> 8 & 1023));
}
""",
            1,
        )
    )
    loaded = load(write_tiny_model(tmp_path / "model", num_hidden_layers=1), "float32")
    head = loaded.model.head.weight
    head[128:256] = head[:128]  # each logit twice: the first one counts, whoever comes last
    drawn = (draw(1, 9),)
    in_strips, in_columns = (
        Plan(1, [Row(1, 0, text(n, n), list(range(1, 60)), drawn)]) for n in (80, 40)
    )
    apart = Plan(1, [Row(seq, 0, [seq], [seq], drawn) for seq in range(1, 49)])
    plans = (in_strips, in_columns, apart, in_strips, apart, apart, in_columns)
    want = [native(loaded, 64, 16, threads=1).run(plan) for plan in plans]
    monkeypatch.setattr(build, "SOURCE", folder / "step.cpp")
    monkeypatch.setattr(build, "INCLUDED", tuple(folder / file.name for file in build.INCLUDED))
    monkeypatch.setenv("PAGEKEEPER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PAGEKEEPER_KERNELS", raising=False)
    runner = native(loaded, 64, 16, threads=2)
    for _ in range(200):
        assert [runner.run(plan) for plan in plans] == want


def test_threads_that_come_late_to_a_step_change_nothing(loaded: LoadedModel) -> None:
    # More threads than cores: most see a step only when later ones are under way, some never do.
    prompts = [text(length, seed) for seed, length in enumerate((33, 5, 64))]
    texts = [
        greedy(
            native(loaded, 400, threads=threads), prompts, 300, Blocks(400, 4, random.Random(0)), 9
        )
        for threads in (1, 7)
    ]
    assert texts[0] == texts[1]


def test_greedy_text_is_the_torch_runners(loaded: LoadedModel) -> None:
    prompts = [text(length, seed) for seed, length in enumerate((33, 5, 64, 1, 20))]
    rng = random.Random(5)
    want = greedy(poisoned_runner(loaded, 200), prompts, 24, Blocks(200, 4, rng))
    for chunk in (3, 16, 64):
        runner = native(loaded, 200)
        assert greedy(runner, prompts, 24, Blocks(200, 4, rng), chunk) == want


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies_are_made_before_the_rows_read(tmp_path: Path, dtype: str) -> None:
    loaded = load(write_tiny_model(tmp_path / "model"), dtype)
    prompt = text(7)
    runner = native(loaded)
    runner.run(Plan(1, [Row(1, 0, prompt, [3, 4])]))
    # A fork continues in a copy of the partial block 4; the parent goes on in its own.
    child = Row(2, 7, [65], [3, 9], (draw(2, 8),))
    parent = Row(1, 7, [66], [3, 4], (draw(1, 8),))
    forked = runner.run(Plan(2, [child, parent], [Copy(4, 9)]))
    for row, suffix in zip(forked, ([65], [66]), strict=True):
        fresh = Row(5, 0, prompt + suffix, [11, 12], (draw(5, 8),))
        assert row.token == native(loaded).run(Plan(1, [fresh]))[0].token


def test_a_plan_of_copies_alone_makes_them(loaded: LoadedModel) -> None:
    runner = native(loaded)
    runner.run(Plan(1, [Row(1, 0, text(4), [3])]))
    assert runner.run(Plan(2, [], [Copy(3, 9), Copy(3, 10)])) == []
    row = Row(2, 4, [65], [10, 11], (draw(2, 5),))
    fresh = Row(5, 0, [*text(4), 65], [11, 12], (draw(5, 5),))
    want = native(loaded).run(Plan(1, [fresh]))[0].token
    assert runner.run(Plan(3, [row]))[0].token == want


def test_an_empty_plan_draws_nothing(loaded: LoadedModel) -> None:
    assert native(loaded).run(Plan(1)) == []


def test_block_bytes_is_what_the_memory_takes_per_block(loaded: LoadedModel) -> None:
    few, many = native(loaded, 10), native(loaded, 110)
    assert len(many.kv.memory) - len(few.kv.memory) == 100 * few.block_bytes
    assert few.block_bytes == poisoned_runner(loaded).block_bytes


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=3, temperature=1.5),
        Sampling(seed=3, temperature=0, logprobs=4),
        Sampling(seed=3, temperature=0, logit_bias=(Bias(77, 90.0),)),
        Sampling(seed=3, temperature=0, repetition_penalty=1.5),
        Sampling(seed=3, temperature=0, presence_penalty=2.0),
        Sampling(seed=3, temperature=0, frequency_penalty=2.0),
    ],
)
def test_a_draw_that_asks_for_more_than_the_likeliest_gets_it_beside_plain_ones(
    loaded: LoadedModel, sampling: Sampling
) -> None:
    runner = native(loaded)
    asked = [
        Draw(3, 0, 6, sampling, text(6), [1, 1]),
        Draw(4, 1, 6, GREEDY, text(6), []),
        Draw(5, 1, 6, GREEDY, text(6), [], forbidden=(3, 7)),
    ]
    rows = [
        Row(1, 0, text(6), [5, 6], (draw(1, 6),)),
        Row(2, 0, text(9, 1), [7, 8, 9]),
        Row(3, 0, text(6), [11, 12], tuple(asked)),
        Row(6, 0, text(2, 2), [10], (draw(6, 2),)),
    ]
    drawn = runner.run(Plan(1, rows))
    logits = native(loaded).logits(rows)[torch.tensor([5, 20, 22])]
    pairs = [(0, rows[0].draws[0]), *((1, one) for one in asked), (2, rows[3].draws[0])]
    assert drawn == sample(logits, pairs)


def test_how_a_sequence_draws_may_change_from_one_step_to_the_next(loaded: LoadedModel) -> None:
    runner, blocks, told = native(loaded), [5, 6, 7], Sampling(seed=3, temperature=0, logprobs=2)
    runner.run(Plan(1, [Row(1, 0, text(6), blocks)]))
    likeliest = runner.run(Plan(2, [Row(1, 6, [65], blocks, (draw(1, 7),))]))[0].token
    for number, asked, expected in (
        (3, Draw(1, 0, 7, GREEDY, text(6), [], forbidden=(likeliest,)), None),
        (4, draw(1, 7), (likeliest, 0)),
        (5, draw(1, 7, told), (likeliest, 2)),
        (6, draw(1, 7), (likeliest, 0)),
    ):
        drawn = runner.run(Plan(number, [Row(1, 6, [65], blocks, (asked,))]))[0]
        if expected is None:
            assert drawn.token != likeliest
        else:
            assert (drawn.token, len(drawn.top)) == expected


def test_the_first_of_equal_logits_is_drawn(tmp_path: Path) -> None:
    loaded = load(write_tiny_model(tmp_path / "model"))
    runner = Row(1, 0, text(6), [5, 6], (draw(1, 6),))
    loaded.model.head.weight.zero_()
    assert native(loaded).run(Plan(1, [runner]))[0].token == 0
    loaded.model.head.weight[9:] = 1  # all others equal, below or above the first nine
    token = native(loaded).run(Plan(1, [runner]))[0].token
    assert token in (0, 9)


def test_one_row_of_nan_fails_alone(loaded: LoadedModel) -> None:
    good = Row(1, 0, text(6), [5, 6], (draw(1, 6),))
    healthy = native(loaded).run(Plan(1, [good]))[0]
    # Sequence 2 claims 4 computed tokens in block 9, which holds NaN.
    bad = Row(2, 4, [65], [9, 10], (draw(2, 5), draw(3, 5, Sampling(seed=1, logprobs=3))))
    worse = Row(4, 4, [65], [13, 14], (draw(4, 5),))
    drawn = native(loaded).run(Plan(1, [bad, good, worse]))
    assert [one.token for one in drawn] == [-1, -1, healthy.token, -1]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Row(1, 0, [260], [1]), "token 260"),
        (Row(1, 0, [-1], [1]), "token -1"),
        (Row(1, 0, [1], [0]), "block 0"),
        (Row(1, 0, [1], [64]), "block 64"),
        (Row(1, 0, [1], [-3]), "block -3"),
        (Row(1, 0, [1], [1 + (1 << 32)]), "block 4294967297"),
        (Row(1, 0, [1], []), "1 tokens do not fit 0 blocks"),
        (Row(1, 4, [1], [1]), "5 tokens do not fit 1 blocks"),
        (Row(1, -1, [1], [1]), "positions -1 to -1"),
        (Row(1, 0, [], [1]), "positions 0 to -1"),
        (Row(1, 511, [1, 1], list(range(1, 60)) * 3), "the model has 0 to 511"),
    ],
)
def test_an_id_out_of_range_is_refused_before_anything_is_written(
    loaded: LoadedModel, row: Row, said: str
) -> None:
    runner = native(loaded)
    good = Row(2, 0, [1, 2], [5])
    with pytest.raises(ValueError, match=said):
        runner.run(Plan(1, [good, row], [Copy(1, 2)]))
    assert (runner.kv.memory == POISON).all()


@pytest.mark.parametrize(
    "copies",
    [[Copy(0, 2)], [Copy(2, 0)], [Copy(2, 64)], [Copy(1, 2), Copy(2, 3)], [Copy(1, 2), Copy(3, 2)]],
)
def test_a_copy_that_would_harm_another_block_is_refused(
    loaded: LoadedModel, copies: Sequence[Copy]
) -> None:
    with pytest.raises(ValueError, match=r"copy|copy's"):
        native(loaded).run(Plan(1, [], list(copies)))


def test_a_new_table_of_a_sequence_is_seen(loaded: LoadedModel) -> None:
    runner = native(loaded)
    blocks = [3, 4]
    runner.run(Plan(1, [Row(1, 0, text(6), blocks)]))
    runner.run(Plan(2, [Row(2, 0, text(6, 9), [7, 8])]))
    runner.run(Plan(3, [Row(1, 6, [65], blocks)]))
    drawn = runner.run(Plan(4, [Row(1, 6, [66], [7, 8], (draw(1, 7),))]))
    fresh = Row(5, 0, [*text(6, 9), 66], [11, 12], (draw(5, 7),))
    assert drawn[0].token == native(loaded).run(Plan(1, [fresh]))[0].token


def test_warm_up_leaves_the_model_as_it_was(loaded: LoadedModel) -> None:
    runner = native(loaded)
    runner.warm_up()
    row = Row(1, 0, text(6), [5, 6], (draw(1, 6),))
    assert runner.run(Plan(1, [row])) == native(loaded).run(Plan(1, [row]))


def test_packed_weights_are_dropped_unless_they_are_to_be_kept(tmp_path: Path) -> None:
    loaded = load(write_tiny_model(tmp_path / "model"))
    if reason := why_not(loaded, torch.float32):
        pytest.skip(reason)
    row = Row(1, 0, text(6), [5, 6], (draw(1, 6),))
    want = native(loaded).run(Plan(1, [row]))
    runner = NativeRunner(
        loaded, num_blocks=64, block_size=4, device="cpu", dtype=torch.float32, threads=1
    )
    assert all(layer.down.weight.numel() == 0 for layer in loaded.model.layers)
    assert runner.run(Plan(1, [row])) == want


@pytest.mark.parametrize(
    ("overrides", "dtype", "block_size", "said"),
    [
        ({"head_dim": 24}, "float32", 4, "heads of 24 dimensions"),
        ({"head_dim": 272}, "float32", 4, "heads of 272 dimensions"),
        ({}, "bfloat16", 3, "an even block size in bfloat16, not 3"),
        ({"intermediate_size": 97}, "bfloat16", 4, "even hidden and intermediate sizes"),
    ],
)
def test_what_it_cannot_run_it_says(
    tmp_path: Path, overrides: dict[str, Any], dtype: str, block_size: int, said: str
) -> None:
    loaded = load(write_tiny_model(tmp_path / "model", **overrides), dtype)
    assert said in (why_not(loaded, loaded.model.dtype, block_size) or "")


def test_a_cache_of_another_type_than_the_weights_is_refused(loaded: LoadedModel) -> None:
    assert "bfloat16" in (why_not(loaded, torch.bfloat16) or "")


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("shape", ["mistral", "biases", "qwen3", "head of 80", "odd sizes"])
def test_bfloat16_stays_as_close_to_float32_as_the_torch_runner_does(
    tmp_path: Path, shape: str, variant: Variant
) -> None:
    architecture, overrides = SHAPES[shape]
    folder = write_tiny_model(tmp_path / "model", architecture, **overrides)
    exact, rounded = load(folder, "float32"), load(folder, "bfloat16")
    runners = native(exact, 400, 8), native(rounded, 400, 8, variant=variant)
    theirs = poisoned_runner(rounded, 400, 8)
    errors: list[tuple[float, float]] = []
    for rows in mixed_steps(8):
        want, got = (runner.logits(rows) for runner in runners)
        other = torch_logits(theirs, rounded, rows)
        errors.append((float((got - want).norm()), float((other - want).norm())))
    mine, torchs = (sum(error) for error in zip(*errors, strict=True))
    assert mine < 1.1 * torchs


def test_a_plan_laid_out_while_another_runs_takes_nothing_from_it(loaded: LoadedModel) -> None:
    sampling = Sampling(seed=1, temperature=1)

    def plans(token: int) -> tuple[Plan, Plan]:
        prompts = [
            Row(seq, 0, text(20, seq), [*range(5 * seq, 5 * seq + 5)], (draw(seq, 20, sampling),))
            for seq in (1, 2, 3, 4)
        ]
        second = Row(2, 20, [token], [*range(10, 15), 25], (draw(2, 21, sampling),))
        return Plan(1, prompts[:2]), Plan(2, [second, *prompts[2:]])

    plain = native(loaded)
    want = [plain.run(plan) for plan in plans(70)]
    runner, (first, second) = native(loaded), plans(UNKNOWN)
    inner = runner._engine.run
    used: list[bytes] = []

    def run(step: Step) -> None:
        if step[ROWS] == 2:
            runner.prepare(second)
            used.extend(
                bytes(bytearray(20)) for _ in range(1000)
            )  # where a table of 5 blocks may have been
        inner(step)

    runner._engine.run = run  # type: ignore[method-assign]
    got = [runner.run(first)]
    second.rows[0].tokens[-1] = 70
    assert [*got, runner.run(second)] == want


def test_a_token_that_is_still_unknown_is_not_computed(loaded: LoadedModel) -> None:
    runner, plan = native(loaded), Plan(1, [Row(1, 0, [1, UNKNOWN], [5])])
    runner.prepare(plan)
    with pytest.raises(ValueError, match="token -1"):
        runner.run(plan)
    assert (runner.kv.memory == POISON).all()


def test_another_plan_than_the_one_prepared_may_run(loaded: LoadedModel) -> None:
    """Whoever ended in between has no row."""
    one, two = (Row(seq, 0, text(6, seq), [5 * seq, 6 * seq], (draw(seq, 6),)) for seq in (1, 2))
    runner = native(loaded)
    runner.prepare(Plan(1, [one, two]))
    assert runner.run(Plan(1, [two])) == native(loaded).run(Plan(1, [two]))


# ---------------------------------------------------------------- lanes


def members(
    samplings: Sequence[Sampling], names: Sequence[int] = (), offsets: Sequence[int] = ()
) -> Members:
    """Who stands in lanes; at step 0 each computes its 21st token unless there are other offsets."""
    count = len(samplings)
    return Members(
        list(names or range(1, count + 1)),
        list(offsets or [20] * count),
        bytes(seq % 3 for seq in range(count)),
        list(samplings),
        [text(20, seq) for seq in range(count)],
        [b"gateway"] * count,
        bytes(8 * count),
    )


def ids(tokens: Sequence[int]) -> Ids:
    return array("i", tokens)


def table(seq: int) -> list[int]:
    """Blocks of a sequence's 20 tokens and 8 more."""
    return [*range(7 * seq, 7 * seq + 7)]


def prefilled(loaded: LoadedModel, seqs: int, num_blocks: int = 100) -> NativeRunner:
    """A runner in which each sequence's first 20 tokens are computed."""
    runner = native(loaded, num_blocks)
    runner.run(Plan(1, [Row(seq, 0, text(20, seq), table(seq)) for seq in range(1, seqs + 1)]))
    return runner


HOT = Sampling(seed=7, temperature=1.3, top_p=0.9)


def test_lanes_are_computed_and_drawn_like_the_rows_they_are(loaded: LoadedModel) -> None:
    samplings = [GREEDY, HOT, Sampling(seed=2, temperature=0.8, top_k=5), GREEDY, HOT]
    asks = Sampling(seed=3, temperature=1, logprobs=2)
    both, apart = prefilled(loaded, 9), prefilled(loaded, 9)
    who, shown = members(samplings), Tables(1, [table(seq) for seq in range(1, 6)], [])
    for step in range(6):
        lanes = Lanes(who, step, shown, ids(text(5, step)))
        others = [
            Row(6, 20 + step, [step], table(6), (draw(6, 21 + step, HOT),)),
            Row(7, 20 + step, [step], table(7)),
            Row(8, 20 + step, [step], table(8), (draw(8, 21 + step, asks), draw(9, 21 + step))),
        ][step % 3 :]
        copies = [Copy(7, 95)] if step % 2 else []
        drawn = list(both.run(Plan(step, others, copies, lanes)))
        assert drawn == apart.run(Plan(step, lanes.rows() + others, copies))
        assert [one.seq for one in drawn[:5]] == [1, 2, 3, 4, 5]


def test_members_of_lanes_may_come_go_and_change_places(loaded: LoadedModel) -> None:
    rng = random.Random(4)
    both, apart = prefilled(loaded, 8), prefilled(loaded, 8)
    tables, done = {seq: table(seq) for seq in range(1, 9)}, dict.fromkeys(range(1, 9), 20)
    samplings = {seq: rng.choice([GREEDY, HOT]) for seq in range(1, 9)}
    for step in range(24):
        changed: list[int] = []
        if step % 3 == 0:  # else the same as before
            done = {seq: 20 + at % 5 for seq, at in done.items()}
            names = rng.sample(range(1, 9), rng.randint(1, 7))
            offsets = [done[seq] - step for seq in names]
            who = members([samplings[seq] for seq in names], names, offsets)
        elif step % 3 == 1:  # one has another table
            moved = rng.choice(names)
            changed = [names.index(moved)]
            tables[moved] = tables[moved].copy()
        shown = Tables(step, [tables[seq] for seq in names], changed)
        lanes = Lanes(who, step, shown, ids(text(len(names), step)))
        others = [
            Row(seq, done[seq], [seq], tables[seq], (draw(seq, done[seq] + 1, samplings[seq]),))
            for seq in range(1, 9)
            if seq not in names
        ]
        done = {seq: at + 1 for seq, at in done.items()}
        drawn = list(both.run(Plan(step, others, [], lanes)))
        assert drawn == apart.run(Plan(step, lanes.rows() + others))


def test_lanes_laid_out_while_their_old_tables_are_in_use_take_nothing_from_these(
    loaded: LoadedModel,
) -> None:
    who = members([HOT, GREEDY, HOT])
    old = [table(seq) for seq in (1, 2, 3)]
    new = [old[0], [*old[1][:5], 90, 91], old[2]]

    def plans(last: list[int]) -> tuple[Plan, Plan]:
        first = Lanes(who, 0, Tables(1, old, []), ids(text(3, 5)))
        return Plan(2, [], [], first), Plan(
            3, [], [Copy(12 + 7, 90)], Lanes(who, 1, Tables(2, new, [1]), ids(last))
        )

    plain = prefilled(loaded, 3)
    want = [plain.run(Plan(plan.number, plan.rows, plan.copies)) for plan in plans(text(3, 6))]
    runner, (first, second) = prefilled(loaded, 3), plans([])
    inner = runner._engine.run
    used: list[bytes] = []

    def run(step: Step) -> None:
        if not runner._ready:
            runner.prepare(second)
            used.extend(bytes(bytearray(28)) for _ in range(1000))  # where a table may have been
        inner(step)

    runner._engine.run = run  # type: ignore[method-assign]
    got = [list(runner.run(first))]
    runner._engine.run = inner  # type: ignore[method-assign]
    assert second.lanes is not None
    second.lanes.tokens.extend(text(3, 6))
    assert [*got, list(runner.run(second))] == want


def test_what_a_batch_of_lanes_points_to_stays_with_it_whoever_is_laid_out_next() -> None:
    batches = Batches(4, 64, 512, 260)
    who = members([GREEDY] * 2, offsets=[0, 0])

    def lanes(step: int, blocks: list[list[int]], changed: list[int]) -> Lanes:
        return Lanes(who, step, Tables(step, blocks, changed), ids([]))

    # A step that was prepared, then the one before it, then two that follow, and one after a gap.
    shown = {
        2: [[1, 3], [2, 4]],
        1: [[1], [2]],
        3: [[1, 5], [2, 6]],
        6: [[8, 9], [9, 8]],
    }
    shown[4] = [shown[3][0], [2, 7]]
    steps = 2, 1, 3, 4, 6
    held = [batches.of([], lanes(step, shown[step], [1] if step == 4 else [])) for step in steps]
    for batch, step in zip(held, steps, strict=True):
        (tables,) = batch.held
        assert isinstance(tables, list)
        assert [table.address for table in tables] == list(batch.addresses)
        assert [list(table.ids) for table in tables] == shown[step]


def test_steps_may_be_more_than_32_bits_count() -> None:
    batches, far = Batches(4, 64, 512, 260), 2**31 - 2
    who = members([GREEDY, HOT], offsets=[20 - far, 21 - far])
    blocks = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14]]
    for step in range(far, far + 6):
        blocks = [blocks[0], [*blocks[1]]]
        rows = [Row(9, 3, [1], [20], (draw(9, 4, HOT),))]
        batch = batches.of(rows, Lanes(who, step, Tables(step, blocks, [1]), ids([])))
        at = step - far
        assert [start + batch.ahead for start in batch.starts] == [20 + at, 21 + at, 3]
        assert [place + batch.ahead for place in batch.positions] == [22 + at, 4]
        assert batch.longest == 22 + at


def test_a_plan_prepared_while_another_is_laid_out_takes_nothing_from_it(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever ended has no row, so `run` lays out anew while the loop prepares what follows."""
    runner, who = prefilled(loaded, 2), members([GREEDY] * 2)
    old = [table(seq) for seq in (1, 2)]
    runner.run(Plan(2, [], [], Lanes(who, 0, Tables(1, old, []), ids(text(2, 4)))))
    first = Plan(2, [], [], Lanes(who, 0, Tables(1, old, []), ids(text(2, 5))))
    new = Tables(2, [[*blocks] for blocks in old], [0, 1])
    second = Plan(3, [], [], Lanes(who, 1, new, ids([])))
    want = list(prefilled(loaded, 2).run(first))
    of, used = Batches._of_lanes, list[bytes]()

    def interrupted(batches: Batches, lanes: Lanes) -> Batch:
        batch = of(batches, lanes)
        if threading.current_thread() is threading.main_thread():
            loop.start()
            loop.join(0.2)  # it has to wait, if all is well
            used.extend(bytes(bytearray(28)) for _ in range(1000))  # where a table may have been
        return batch

    loop = threading.Thread(target=runner.prepare, args=(second,))
    monkeypatch.setattr(Batches, "_of_lanes", interrupted)
    got = runner.run(first)
    loop.join()
    assert list(got) == want


def test_lanes_whose_tokens_are_still_unknown_are_not_computed(loaded: LoadedModel) -> None:
    runner = native(loaded)
    lanes = Lanes(members([GREEDY] * 2, offsets=[0, 0]), 0, Tables(1, [[5], [6]], []), ids([]))
    plan = Plan(1, [Row(9, 0, [1, 2], [9])], [], lanes)
    runner.prepare(plan)
    with pytest.raises(ValueError, match="token -1"):
        runner.run(plan)
    assert (runner.kv.memory == POISON).all()


@pytest.mark.parametrize(
    ("start", "token", "blocks", "said"),
    [
        (0, 260, [1], "token 260"),
        (0, 1, [0], "block 0"),
        (0, 1, [64], "block 64"),
        (4, 1, [1], "5 tokens do not fit 1 blocks"),
        (-1, 1, [1], "positions -1 to -1"),
        (512, 1, list(range(1, 60)) * 3, "the model has 0 to 511"),
    ],
)
def test_an_id_out_of_range_in_a_lane_is_refused_whenever_it_comes(
    loaded: LoadedModel, start: int, token: int, blocks: list[int], said: str
) -> None:
    good = [2, 3]
    who = members([GREEDY, GREEDY], offsets=[0, start - 1])
    bad = Plan(2, [], [], Lanes(who, 1, Tables(2, [good, blocks], [1]), ids([1, token])))
    fresh = native(loaded)
    with pytest.raises(ValueError, match=said):
        fresh.run(bad)
    assert (fresh.kv.memory == POISON).all()
    runner = native(loaded)
    if start > 0:  # the same two, a step before
        first = Lanes(who, 0, Tables(1, [good, [5] * 200], []), ids([1, 1]))
    else:
        first = Lanes(
            members([GREEDY] * 2, offsets=[0, 0]), 0, Tables(1, [good, [5]], []), ids([1, 1])
        )
    runner.run(Plan(1, [], [], first))
    before = runner.kv.memory.copy()
    with pytest.raises(ValueError, match=said):
        runner.run(bad)
    assert (runner.kv.memory == before).all()


def test_one_lane_of_nan_fails_alone(loaded: LoadedModel) -> None:
    runner = prefilled(loaded, 4)
    # The tables of the second and the third claim blocks that hold NaN.
    shown = [table(1), [90] * 7, [91] * 7, table(4)]
    lanes = Lanes(members([GREEDY, GREEDY, HOT, HOT]), 0, Tables(1, shown, []), ids(text(4)))
    tokens = [one.token for one in runner.run(Plan(2, [], [], lanes))]
    assert tokens[1:3] == [-1, -1]
    assert min(tokens[0], tokens[3]) >= 0
