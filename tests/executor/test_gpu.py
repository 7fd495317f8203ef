"""The runner of GPUs on CPU tensors: its kernels in Triton's interpreter, its graphs replayed by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.gpu import GpuRunner
from executor.load import LoadedModel
from executor.models.decoder import Decoder
from executor.plan import Draw, Plan, Row
from executor.runner import Runner
from kernels.dispatch import kernels_for
from kernels.launch import Call
from tests.executor.oracle import GREEDY, Blocks, greedy, load, poisoned_runner
from tests.executor.recorder import Replays
from tests.system.machine import BLOCK_SIZE, Machine
from tests.tiny import write_tiny_model
from wire.memory import Copy
from wire.sampling import Sampling

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "window": ("mistral", {"sliding_window": 9, "num_hidden_layers": 1}),
    "norms of queries and keys": ("qwen3", {"num_hidden_layers": 1}),
    "layers without rotation": ("smollm3", {"num_hidden_layers": 4, "num_key_value_heads": 1}),
    "7 heads on one": ("llama", {"num_attention_heads": 7, "num_key_value_heads": 1}),
    "heads of 80": ("llama", {"head_dim": 80, "num_hidden_layers": 1}),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A single layer: an interpreter takes its time."""
    return load(write_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1))


def gpu(
    loaded: LoadedModel,
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    sequences: int = 8,
    step_tokens: int = 128,
    record: Replays | None = None,
) -> GpuRunner:
    """A runner whose KV memory holds NaN wherever nothing was written."""
    device = torch.device("cpu")
    runner = GpuRunner(
        loaded,
        num_blocks=num_blocks,
        block_size=block_size,
        device=device,
        dtype=loaded.model.dtype,
        kernels=kernels_for("triton", device),
        step_tokens=step_tokens,
        sequences=sequences,
        record=record,
    )
    runner.kv.keys.fill_(float("nan"))
    runner.kv.values.fill_(float("nan"))
    return runner


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def draw(seq: int, position: int, sampling: Sampling = GREEDY, choice: int = 0) -> Draw:
    return Draw(seq, choice, position, sampling, [], [])


@torch.inference_mode()
def torch_logits(runner: Runner, loaded: LoadedModel, rows: Sequence[Row]) -> torch.Tensor:
    return loaded.model.logits(runner.compute(rows))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_the_torch_runner_for_every_shape(tmp_path: Path, shape: str) -> None:
    architecture, overrides = SHAPES[shape]
    loaded = load(write_tiny_model(tmp_path / "model", architecture, **overrides))
    ours, theirs = gpu(loaded), poisoned_runner(loaded)
    blocks = Blocks(64, 4, random.Random(3))
    tokens = [text(12, 1), text(5, 2), text(14, 3)]
    steps = [[(0, 0, 9), (2, 0, 1)], [(1, 0, 4), (2, 1, 2)], [(1, 4, 5), (0, 9, 12), (2, 2, 14)]]
    for step in steps:
        # Rows of one token first, the order in which they come back.
        parts = sorted(step, key=lambda part: part[2] - part[1] > 1)
        rows = [
            Row(seq, start, tokens[seq][start:end], blocks.table(seq, end))
            for seq, start, end in parts
        ]
        want = torch_logits(theirs, loaded, rows)
        torch.testing.assert_close(ours.logits(rows), want, rtol=0, atol=1e-4)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_batch_of_prompts_in_chunks_gives_the_torch_runners_text(
    loaded: LoadedModel, graphs: bool
) -> None:
    prompts = [text(length, length) for length in (13, 1, 4, 6)]
    want = greedy(poisoned_runner(loaded), prompts, 6, Blocks(64, 4, random.Random(1)))
    replays = Replays() if graphs else None
    runner = gpu(loaded, record=replays)
    runner.warm_up()
    assert greedy(runner, prompts, 6, Blocks(64, 4, random.Random(1)), 5) == want
    if replays is not None:
        assert 4 in replays.replayed
        assert runner.kv.keys[:, 0].isnan().all()  # padding is stored nowhere


def test_a_batch_padded_to_its_bucket_gives_what_the_rows_give_alone(loaded: LoadedModel) -> None:
    replays = Replays()
    runner, plain = gpu(loaded, record=replays), poisoned_runner(loaded)
    runner.warm_up()
    runner.kv.keys.fill_(float("nan"))
    prompts = [Row(seq, 0, text(3, seq), [2 * seq + 1, 2 * seq + 2]) for seq in range(7)]
    for each in (runner, plain):
        each.run(Plan(1, prompts))
    for count in (7, 3, 5, 1):
        rows = [Row(row.seq, 3, [9], row.blocks, (draw(row.seq, 4),)) for row in prompts[-count:]]
        assert runner.run(Plan(2, rows)) == plain.run(Plan(2, rows))
    assert replays.replayed == [8, 4, 8, 1]
    assert runner.kv.keys[:, 0].isnan().all()


def test_padding_reads_nothing_and_writes_nothing_whatever_an_earlier_step_left(
    loaded: LoadedModel,
) -> None:
    replays = Replays()
    runner = gpu(loaded, record=replays)
    runner.warm_up()
    tables = [[2 * seq + 1, 2 * seq + 2] for seq in range(4)]
    runner.run(Plan(1, [Row(seq, 0, text(3, seq), tables[seq]) for seq in range(4)]))
    runner.run(Plan(2, [Row(seq, 3, [9], tables[seq], (draw(seq, 4),)) for seq in range(4)]))
    runner.kv.keys[:, [0, *tables[3]]] = float("nan")  # the null block and one that was taken away
    runner.kv.values[:, [0, *tables[3]]] = float("nan")
    runner.run(Plan(3, [Row(seq, 4, [8], tables[seq], (draw(seq, 5),)) for seq in range(3)]))
    assert replays.replayed == [4, 4]
    (logits,) = (result for result in replays.results if len(result) == 4)
    assert logits.isfinite().all()
    assert runner.kv.keys[:, [0, *tables[3]]].isnan().all()


def test_a_step_reads_nothing_back_from_its_device_but_its_tokens(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On tensors that hold nothing: whatever waited for one of them would fail."""
    meta = torch.device("meta")
    fetched: list[int] = []

    def fetch(runner: GpuRunner, tokens: torch.Tensor) -> list[int]:
        fetched.append(len(tokens))
        return [0] * len(tokens)

    monkeypatch.setattr(GpuRunner, "_fetch", fetch)
    monkeypatch.setattr(Call, "run", lambda call: None)
    for module in ("kernels.decode", "kernels.prefill"):
        monkeypatch.setattr(f"{module}.architecture", lambda device: "sm_90")
    runner = GpuRunner(
        replace(loaded, model=Decoder(loaded.config, torch.float32, meta)),
        num_blocks=64,
        block_size=4,
        device=meta,
        dtype=torch.float32,
        kernels=kernels_for("triton", torch.device("cpu")),
        step_tokens=128,
        sequences=8,
        record=(replays := Replays()),
    )
    next(runner._recording())  # of eight rows
    hot = Sampling(seed=1, temperature=0.8, top_k=20, top_p=0.9, min_p=0.1, presence_penalty=0.5)
    chunk = Row(1, 0, text(6), [1, 2], (draw(1, 6, hot),))
    single = [Row(seq, 3, [5], [seq + 1], (draw(seq, 4),)) for seq in range(2, 9)]
    runner.run(Plan(1, [chunk, *single], [Copy(20, 21), Copy(22, 23)]))
    runner.run(Plan(2, single))
    assert fetched == [8, 7]
    assert replays.replayed == [8]


def test_a_context_of_more_blocks_than_tables_grow_by_gives_the_torch_runners_text(
    loaded: LoadedModel,
) -> None:
    prompts = [text(70, 1), text(5, 2)]
    want = greedy(poisoned_runner(loaded), prompts, 3, Blocks(64, 4, random.Random(1)))
    for record in (None, Replays()):
        runner = gpu(loaded, record=record)
        runner.warm_up()
        assert greedy(runner, prompts, 3, Blocks(64, 4, random.Random(1)), 40) == want


def test_the_text_is_the_same_with_forks_prefix_hits_and_preemption(loaded: LoadedModel) -> None:
    """The real scheduler and memd's core drive both runners through a pool that is too small."""
    stem = text(20, 1)
    prompts = [[*stem, 65, 66], [*stem[:18], 70], text(3, 4)]
    blocks, tokens = 7, 14
    texts = []
    for runner in (
        gpu(loaded, blocks + 1, BLOCK_SIZE, record=Replays()),
        poisoned_runner(loaded, blocks + 1, BLOCK_SIZE),
    ):
        if isinstance(runner, GpuRunner):
            runner.warm_up()
            runner.kv.keys.fill_(float("nan"))
        machine = Machine(loaded, blocks, 32, runner=runner)
        first = machine.generate(prompts[:1], 2, logprobs=-1)
        rest = machine.generate(prompts, tokens, n=2, logprobs=-1)
        pool = machine.memory.core.pools["test"].counters
        assert machine.preemptions > 0
        assert pool.hits > 0
        texts.append([[choice.tokens for choice in each] for each in (*first, *rest)])
    assert texts[0] == texts[1]


def test_sampled_text_is_the_same_as_well(loaded: LoadedModel) -> None:
    asked: dict[str, float] = {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.5}
    texts = []
    for runner in (gpu(loaded, 30, BLOCK_SIZE), poisoned_runner(loaded, 30, BLOCK_SIZE)):
        machine = Machine(loaded, 29, runner=runner)
        made = machine.generate([text(5)], 8, n=3, **asked, logprobs=-1)
        texts.append([choice.tokens for choice in made[0]])
    assert texts[0] == texts[1]
    assert len({tuple(choice) for choice in texts[0]}) == 3


def test_logprobs_come_from_the_hosts_sampler(loaded: LoadedModel) -> None:
    asked = Sampling(seed=0, temperature=0, logprobs=2)
    plan = Plan(1, [Row(1, 0, text(6), [5, 6], (draw(1, 6, asked), draw(2, 6)))])
    ours, theirs = gpu(loaded).run(plan), poisoned_runner(loaded).run(plan)
    assert [one.token for one in ours] == [one.token for one in theirs]
    assert ours[0].logprob == pytest.approx(theirs[0].logprob, abs=1e-5)
    assert [token for token, _ in ours[0].top] == [token for token, _ in theirs[0].top]


def test_draws_come_back_in_plan_order_though_single_tokens_are_computed_first(
    loaded: LoadedModel,
) -> None:
    first = Row(1, 0, text(6), [5, 6], tuple(draw(seq, 6) for seq in (1, 8, 9)))
    silent = Row(2, 0, text(9, 1), [7, 8, 9])
    last = Row(3, 0, [4], [10], (draw(3, 1),))
    plan = Plan(1, [first, silent, last])
    assert gpu(loaded).run(plan) == poisoned_runner(loaded).run(plan)


def test_copies_are_made_before_the_rows_read(loaded: LoadedModel) -> None:
    plans = [
        Plan(1, [Row(1, 0, text(7), [3, 4])]),
        # A fork continues in a copy of the partial block 4; the parent goes on in its own.
        Plan(
            2,
            [
                Row(2, 7, [65], [3, 9], (draw(2, 8),)),
                Row(1, 7, [66], [3, 4], (draw(1, 8),)),
            ],
            [Copy(4, 9)],
        ),
    ]
    ours, theirs = gpu(loaded), poisoned_runner(loaded)
    assert [ours.run(plan) for plan in plans] == [theirs.run(plan) for plan in plans]


def test_one_row_of_nan_fails_alone(loaded: LoadedModel) -> None:
    good = Row(1, 0, text(6), [5, 6], (draw(1, 6),))
    # Sequence 2 claims 4 computed tokens in block 9, which holds NaN.
    bad = Row(2, 4, [65], [9, 10], (draw(2, 5), draw(3, 5, Sampling(seed=1, logprobs=3))))
    healthy = gpu(loaded).run(Plan(1, [good]))[0]
    drawn = gpu(loaded).run(Plan(1, [bad, good]))
    assert [one.token for one in drawn] == [-1, -1, healthy.token]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (Row(1, 0, [260], [1]), "token 260"),
        (Row(1, 0, [-1], [1]), "token -1"),
        (Row(1, 0, [1], [0]), "block 0"),
        (Row(1, 0, [1], [64]), "block 64"),
        (Row(1, 4, [1], [1]), "5 tokens do not fit 1 blocks"),
        (Row(1, -1, [1], [1]), "positions -1 to -1"),
        (Row(1, 0, [], [1]), "positions 0 to -1"),
        (Row(1, 0, [1] * 127, list(range(1, 60))), "129 tokens in one step; the most is 128"),
    ],
)
def test_an_id_out_of_range_is_refused_before_anything_is_written(
    loaded: LoadedModel, row: Row, said: str
) -> None:
    runner = gpu(loaded)
    good = Row(2, 0, [1, 2], [5])
    with pytest.raises(ValueError, match=said):
        runner.run(Plan(1, [good, row], [Copy(1, 2)]))
    assert torch.isnan(runner.kv.keys).all()
    assert torch.isnan(runner.kv.values).all()


def test_a_copy_that_would_harm_another_block_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ValueError, match="copy's target"):
        gpu(loaded).run(Plan(1, [], [Copy(1, 2), Copy(2, 3)]))


def test_a_step_that_failed_leaves_no_table_behind_that_the_device_does_not_have(
    loaded: LoadedModel,
) -> None:
    runner = gpu(loaded)
    prompt = Row(1, 0, text(6), [5, 6], (draw(1, 6),))
    healthy = gpu(loaded).run(Plan(1, [prompt]))
    wrong = Draw(1, 0, 6, Sampling(seed=0, repetition_penalty=1.5), [999], [])
    with pytest.raises(ValueError, match="token id 999"):
        runner.run(Plan(1, [Row(1, 0, text(6), [5, 6], (wrong,))]))
    runner._tables.zero_()
    assert runner.run(Plan(2, [prompt])) == healthy


def test_the_largest_step_fills_the_token_budget_and_every_seat(loaded: LoadedModel) -> None:
    replays = Replays()
    runner = gpu(loaded, 8, step_tokens=32, record=replays)
    runner.largest_step()
    assert [len(result) for result in replays.results] == [8]
    row = Row(1, 0, text(6), [5, 6], (draw(1, 6),))
    assert runner.run(Plan(1, [row])) == poisoned_runner(loaded).run(Plan(1, [row]))


def test_kv_in_another_type_than_the_model_is_refused(loaded: LoadedModel) -> None:
    device = torch.device("cpu")
    with pytest.raises(ValueError, match=r"torch\.bfloat16, not torch\.float32"):
        GpuRunner(
            loaded,
            num_blocks=4,
            block_size=4,
            device=device,
            dtype=torch.bfloat16,
            kernels=kernels_for("triton", device),
        )


@pytest.mark.parametrize("block_size", [1, 2, 16])
def test_warm_up_fits_any_block_size(loaded: LoadedModel, block_size: int) -> None:
    gpu(loaded, 2, block_size, sequences=2, step_tokens=4).warm_up()


def test_the_variants_a_gpu_compiles_beforehand_reach_chunk_and_context_limits(
    loaded: LoadedModel,
) -> None:
    plans = list(gpu(loaded, 200, 4).variants())
    rows = [row for plan in plans for row in plan.rows]
    assert max(len(row.tokens) for row in rows) == 128  # --max-step-tokens
    assert max(row.start + len(row.tokens) for row in rows) == 512  # the context
    runner = gpu(loaded, 8, 4, step_tokens=8, sequences=2)
    for plan in runner.variants():
        runner.run(plan)
