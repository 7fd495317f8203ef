from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from executor.load import LoadedModel
from executor.plan import Draw, Plan, Row
from executor.runner import Runner
from tests.executor.oracle import GREEDY, Blocks, greedy, load, poisoned_runner
from tests.tiny import write_tiny_model
from wire.memory import Copy
from wire.sampling import Sampling


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(write_tiny_model(tmp_path_factory.mktemp("model")))


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def draw(seq: int, position: int, sampling: Sampling = GREEDY, choice: int = 0) -> Draw:
    return Draw(seq, choice, position, sampling, [], [])


def test_an_empty_plan_draws_nothing(loaded: LoadedModel) -> None:
    assert poisoned_runner(loaded).run(Plan(1)) == []


def test_kv_in_another_type_than_the_model_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ValueError, match=r"torch\.bfloat16, not torch\.float32"):
        Runner(loaded, num_blocks=4, block_size=4, device="cpu", dtype=torch.bfloat16)


def test_more_kv_than_there_is_memory_is_refused_with_the_size(loaded: LoadedModel) -> None:
    with pytest.raises(MemoryError, match=r"1099511627776 KV blocks take \d+ bytes"):
        poisoned_runner(loaded, num_blocks=1 << 40)


def test_block_bytes_is_what_the_tensors_take_per_block(loaded: LoadedModel) -> None:
    runner = poisoned_runner(loaded, num_blocks=10)
    assert runner.block_bytes * 10 == runner.kv.keys.nbytes + runner.kv.values.nbytes


def test_tokens_are_the_same_whatever_the_chunks_and_the_company(loaded: LoadedModel) -> None:
    prompts = [text(length, seed) for seed, length in enumerate((33, 5, 64, 1, 20))]
    rng = random.Random(5)
    alone = [
        greedy(poisoned_runner(loaded), [prompt], 24, Blocks(64, 4, rng))[0] for prompt in prompts
    ]
    for chunk in (3, 16, 64):
        runner = poisoned_runner(loaded, num_blocks=200)
        assert greedy(runner, prompts, 24, Blocks(200, 4, rng), chunk) == alone


def test_draws_come_back_in_plan_order_several_from_one_row(loaded: LoadedModel) -> None:
    first = Row(1, 0, text(6), [5, 6], tuple(draw(seq, 6) for seq in (1, 8, 9)))
    silent = Row(2, 0, text(9, 1), [7, 8, 9])
    last = Row(3, 0, text(2, 2), [10], (draw(3, 2),))
    drawn = poisoned_runner(loaded).run(Plan(1, [first, silent, last]))
    assert [one.seq for one in drawn] == [1, 8, 9, 3]
    assert len({one.token for one in drawn[:3]}) == 1


def test_choices_of_one_row_draw_apart_and_the_same_choice_alike(loaded: LoadedModel) -> None:
    hot = Sampling(seed=3, temperature=1.5)
    draws = tuple(draw(seq, 6, hot, choice) for seq, choice in enumerate([0, 1, 2, 3, 4, 5, 0]))
    drawn = poisoned_runner(loaded).run(Plan(1, [Row(1, 0, text(6), [5, 6], draws)]))
    assert len({one.token for one in drawn}) > 1
    assert drawn[0].token == drawn[6].token


def test_copies_are_made_before_the_rows_read(loaded: LoadedModel) -> None:
    prompt = text(7)
    runner = poisoned_runner(loaded)
    runner.run(Plan(1, [Row(1, 0, prompt, [3, 4])]))
    # A fork continues in a copy of the partial block 4; the parent goes on in its own.
    child = Row(2, 7, [65], [3, 9], (draw(2, 8),))
    parent = Row(1, 7, [66], [3, 4], (draw(1, 8),))
    forked = runner.run(Plan(2, [child, parent], [Copy(4, 9)]))
    for row, suffix in zip(forked, ([65], [66]), strict=True):
        fresh = Row(5, 0, prompt + suffix, [11, 12], (draw(5, 8),))
        alone = poisoned_runner(loaded).run(Plan(1, [fresh]))
        assert row.token == alone[0].token


def test_one_row_of_nan_fails_alone(loaded: LoadedModel) -> None:
    good = Row(1, 0, text(6), [5, 6], (draw(1, 6),))
    healthy = poisoned_runner(loaded).run(Plan(1, [good]))[0]
    runner = poisoned_runner(loaded)
    # Sequence 2 claims 4 computed tokens in block 9, which holds NaN.
    bad = Row(2, 4, [65], [9, 10], (draw(2, 5), draw(3, 5, Sampling(seed=1, logprobs=3))))
    drawn = runner.run(Plan(1, [bad, good]))
    assert [one.token for one in drawn] == [-1, -1, healthy.token]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Row(1, 0, [260], [1]), "token 260"),
        (Row(1, 0, [-1], [1]), "token -1"),
        (Row(1, 0, [1], [0]), "block 0"),
        (Row(1, 0, [1], [64]), "block 64"),
        (Row(1, 0, [1], [-3]), "block -3"),
        (Row(1, 4, [1], [1]), "5 tokens do not fit 1 blocks"),
        (Row(1, -1, [1], [1]), "positions -1 to -1"),
        (Row(1, 0, [], [1]), "positions 0 to -1"),
        (Row(1, 511, [1, 1], list(range(1, 60)) * 3), "the model has 0 to 511"),
    ],
)
def test_an_id_out_of_range_is_refused_before_anything_is_written(
    loaded: LoadedModel, row: Row, said: str
) -> None:
    runner = poisoned_runner(loaded)
    good = Row(2, 0, [1, 2], [5])
    with pytest.raises(ValueError, match=said):
        runner.run(Plan(1, [good, row], [Copy(1, 2)]))
    assert torch.isnan(runner.kv.keys).all()
    assert torch.isnan(runner.kv.values).all()


@pytest.mark.parametrize(
    "copies",
    [[Copy(0, 2)], [Copy(2, 0)], [Copy(2, 64)], [Copy(1, 2), Copy(2, 3)], [Copy(1, 2), Copy(3, 2)]],
)
def test_a_copy_that_would_harm_another_block_is_refused(
    loaded: LoadedModel, copies: Sequence[Copy]
) -> None:
    with pytest.raises(ValueError, match=r"copy|copy's"):
        poisoned_runner(loaded).run(Plan(1, [], list(copies)))


def test_warm_up_leaves_the_model_as_it_was(loaded: LoadedModel) -> None:
    runner = poisoned_runner(loaded)
    runner.warm_up()
    row = Row(1, 0, text(6), [5, 6], (draw(1, 6),))
    assert runner.run(Plan(1, [row])) == poisoned_runner(loaded).run(Plan(1, [row]))


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_warm_up_fits_any_block_size(loaded: LoadedModel, block_size: int) -> None:
    poisoned_runner(loaded, num_blocks=2, block_size=block_size).warm_up()


def test_bfloat16_runs_the_same_plan_close_to_float32(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    rows = [Row(1, 0, text(20), [1, 2, 3, 4, 5]), Row(2, 0, [9], [7])]
    logits = []
    for dtype in ("float32", "bfloat16"):
        loaded = load(folder, dtype)
        runner: Runner = poisoned_runner(loaded)
        assert runner.kv.keys.dtype == loaded.model.dtype
        with torch.inference_mode():
            logits.append(loaded.model.logits(runner.compute(rows)))
    assert logits[1].dtype == torch.float32
    torch.testing.assert_close(logits[0], logits[1], rtol=0, atol=0.25)
