from __future__ import annotations

import csv
import math
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.paper import batched, published
from bench.paper.__main__ import EXPERIMENTS
from bench.paper.buddy import Buddy
from bench.paper.device import CPU, OPT_13B, Device
from bench.paper.play import Outcome, random_prompt, simulate
from bench.paper.policies import Policy, Split, reserved
from bench.paper.report import at_latency
from bench.paper.workload import (
    ALPACA,
    SHAREGPT,
    Request,
    alpaca,
    conversations,
    poisson,
    scaled,
    sharegpt,
)

SECOND = Device("one step a second", 32, 0.8, 0.0, 1.0, math.inf, 0.0, 0.0)


# ---------------------------------------------------------------- buddy allocator


@settings(max_examples=150, deadline=None)
@given(
    slots=st.integers(1, 200),
    moves=st.lists(st.one_of(st.integers(1, 70), st.integers(-30, -1)), max_size=80),
)
def test_the_buddy_allocator_grants_what_a_map_of_slots_says_is_there(
    slots: int, moves: list[int]
) -> None:
    buddy, taken, live = Buddy(slots), np.zeros(slots, bool), list[tuple[int, int]]()
    before = buddy.free_regions()
    for move in moves:
        if move < 0:
            if live:
                start, size = live.pop(move % len(live))
                buddy.free(start)
                taken[start : start + size] = False
            continue
        size = 1 << (move - 1).bit_length()
        places = [at for at in range(0, slots - size + 1, size) if not taken[at : at + size].any()]
        start_or_none = buddy.allocate(move)
        assert (start_or_none is not None) == bool(places)
        if start_or_none is not None:
            assert start_or_none in places
            taken[start_or_none : start_or_none + size] = True
            live.append((start_or_none, size))
        assert buddy.granted == taken.sum()
        assert sum(size for _, size in buddy.free_regions()) == slots - taken.sum()
    for start, _ in live:
        buddy.free(start)
    assert buddy.free_regions() == before


def test_a_pool_of_the_papers_size_holds_seven_of_its_longest_sequences() -> None:
    buddy = Buddy(15_700)
    assert [buddy.allocate(2048) is not None for _ in range(8)] == [True] * 7 + [False]
    assert buddy.free_regions() == [
        (14336, 1024), (15360, 256), (15616, 64), (15680, 16), (15696, 4),
    ]  # fmt: skip


def test_a_region_that_was_not_granted_cannot_be_freed() -> None:
    buddy = Buddy(8)
    start = buddy.allocate(3)
    assert start == 0
    buddy.free(start)
    with pytest.raises(KeyError):
        buddy.free(start)


# ---------------------------------------------------------------- policies by hand


def test_each_policy_reserves_what_the_paper_says() -> None:
    request = Request(1, 0.0, prompt=100, output=25)
    assert reserved(Policy.ORACLE, request) == 125
    assert reserved(Policy.POW2, request) == 132
    assert reserved(Policy.MAX, request) == 2048
    assert reserved(Policy.POW2, Request(1, 0.0, 1000, 600)) == 2024
    assert reserved(Policy.POW2, Request(1, 0.0, 1000, 1030)) == 2048  # never past the longest


def four_requests(policy: Policy) -> Outcome:
    """Three at once and one at 6 s, 4 + 4 tokens each, in 32 slots; the longest sequence has 16."""
    requests = [Request(number, 0.0, 4, 4) for number in (1, 2, 3)] + [Request(4, 6.0, 4, 4)]
    return simulate(requests, policy, SECOND, block_size=4, longest=16)


def test_reserving_the_longest_makes_the_third_request_wait_for_a_region() -> None:
    outcome = four_requests(Policy.MAX)
    assert [record.first for record in outcome.records] == [1, 1, 5, 8]
    assert [record.last for record in outcome.records] == [4, 4, 8, 11]
    assert [record.normalized for record in outcome.records] == [1, 1, 2, 1.25]
    assert outcome.batched == [2, 2, 2, 2, 1, 1, 1]
    assert outcome.splits == [Split(states=8, reserved=8, internal=16, external=0)]


def test_paged_memory_runs_all_three_at_once() -> None:
    outcome = four_requests(Policy.PAGED)
    assert [record.last for record in outcome.records] == [4, 4, 4, 10]
    assert outcome.batched == [3, 3, 3, 3, 1]
    # A block of four slots each for what is computed, and already one each for the step after it.
    assert outcome.splits == [Split(states=12, reserved=0, internal=12, external=8)]
    assert outcome.token_rate == pytest.approx(13 / 7)


def test_an_oracle_whose_regions_need_no_rounding_does_the_same() -> None:
    outcome = four_requests(Policy.ORACLE)
    assert [record.last for record in outcome.records] == [4, 4, 4, 10]
    assert outcome.splits == [Split(states=12, reserved=12, internal=0, external=8)]


def test_samples_of_one_request_share_the_blocks_of_its_prompt() -> None:
    requests = [Request(1, 0.0, 32, 24, choices=2), Request(2, 30.0, 1, 1)]
    device = Device("", 160, 0.8, 0.0, 1.0, math.inf, 0.0, 0.0)
    outcome = simulate(requests, Policy.PAGED, device)
    # The seventeenth step writes each sample's sixteenth token: three blocks each, of which two are shared.
    assert outcome.saved == [0, pytest.approx(2 / 6)]


def test_a_shared_prefix_is_computed_once_where_it_may_be_reused() -> None:
    requests = [Request(n, 100.0 * n, 36, 2, prefix=32) for n in (1, 2)]
    device = Device("a second for each token computed", 160, 0.6, 0.0, 1e9, 1.0, 0.0, 0.0)

    def latencies(reuse: bool) -> list[float]:
        outcome = simulate(requests, Policy.PAGED, device, reuse=reuse)
        return [record.first - record.request.arrival for record in outcome.records]

    assert latencies(reuse=True) == pytest.approx([36, 4])
    assert latencies(reuse=False) == pytest.approx([36, 36])


# ---------------------------------------------------------------- any load


@settings(max_examples=12, deadline=None)
@given(
    policy=st.sampled_from(list(Policy)),
    seed=st.integers(0, 1000),
    rate=st.sampled_from([0.5, 5.0, 50.0]),
    slots=st.sampled_from([256, 400, 777]),
)
def test_every_request_is_served_in_full_and_the_split_is_the_pool(
    policy: Policy, seed: int, rate: float, slots: int
) -> None:
    pairs = scaled(sharegpt(), (20.0, 42.0), longest=256)
    requests = poisson(pairs, rate, 20 / rate, seed)
    device = Device("", slots, 270e6, 48e3, 50e9, 850e9)
    outcome = simulate(requests, policy, device, longest=256)
    assert [record.tokens for record in outcome.records] == [r.output for r in requests]
    for record in outcome.records:
        assert record.request.arrival < record.first <= record.last
    for split in outcome.splits:
        assert split.slots == (slots if policy is not Policy.PAGED else slots // 16 * 16)
        assert min(split.states, split.reserved, split.internal, split.external) >= 0
        if policy is Policy.PAGED:
            assert split.reserved == 0
        if policy is Policy.ORACLE:
            assert split.internal == 0
    if policy is Policy.MAX:
        assert max(outcome.batched, default=0) <= slots // 256


def test_the_same_requests_give_the_same_run() -> None:
    requests = poisson(alpaca(), 20.0, 10.0)
    first, second = (simulate(requests, Policy.PAGED, OPT_13B) for _ in range(2))
    assert first == second


def test_a_load_that_cannot_be_served_is_cut_and_counts_as_over() -> None:
    requests = poisson(sharegpt(), 10.0, 30.0)
    outcome = simulate(requests, Policy.MAX, OPT_13B, patience=10.0)
    assert outcome.cut
    assert outcome.normalized == math.inf


@pytest.mark.parametrize("policy", [Policy.ORACLE, Policy.POW2, Policy.MAX])
def test_contiguous_policies_batch_as_many_requests_as_in_the_paper(policy: Policy) -> None:
    outcome = batched.run(sharegpt(), 2.0, policy, minutes=4)
    assert outcome.mean_batched == pytest.approx(published.BATCHED["sharegpt"][policy], rel=0.15)
    for share, percent in zip(outcome.shares().values(), published.MEMORY[policy], strict=True):
        assert percent is not None
        assert share == pytest.approx(percent / 100, abs=0.08)


def test_paged_memory_when_saturated_batches_as_in_the_paper_and_wastes_little() -> None:
    outcome = batched.run(sharegpt(), 3.0, Policy.PAGED, minutes=4)
    assert outcome.mean_batched == pytest.approx(30.42, rel=0.15)
    shares = outcome.shares()
    assert shares["states"] / (1 - shares["external"]) > 0.963  # of the slots that are granted
    assert shares["states"] > 0.9  # of all


# ---------------------------------------------------------------- lengths, time, tables


def test_lengths_have_the_papers_means_and_fit_the_model() -> None:
    for pairs, means in ((sharegpt(), SHAREGPT), (alpaca(), ALPACA)):
        assert np.mean(pairs, axis=0) == pytest.approx(np.array(means), rel=0.01)
        assert max(map(sum, pairs)) <= 2048
        assert min(map(min, pairs)) >= 1


def test_a_higher_rate_brings_the_same_requests_closer_together() -> None:
    slow, fast = poisson(alpaca(), 1.0, 600.0), poisson(alpaca(), 10.0, 600.0)
    assert [(r.prompt, r.output) for r in slow] == [(r.prompt, r.output) for r in fast[: len(slow)]]
    assert [r.arrival for r in slow] == pytest.approx([10 * r.arrival for r in fast[: len(slow)]])
    assert len(fast) == pytest.approx(6000, rel=0.05)


def test_a_real_prompt_begins_alike_and_ends_with_its_number() -> None:
    first, second = (
        array("I", random_prompt(Request(n, 0.0, 20, 1, prefix=8), 1000)) for n in (7, 8)
    )
    assert (len(first), first[-1], second[-1]) == (20, 7, 8)
    assert first[:8] == second[:8]
    assert first[8:19] != second[8:19]


def test_the_time_model_meets_the_points_it_is_fitted_to() -> None:
    assert OPT_13B.seconds(30, 30 * 497, 30) == pytest.approx(45e-3, rel=0.03)
    # At 30 requests/s a step computes 43 prompt tokens beside the 132.
    assert OPT_13B.seconds(132 + 43, 132 * 77, 132) == pytest.approx(75.5e-3, rel=0.03)
    for streams, seconds in ((1, 8.8e-3), (8, 12.5e-3), (16, 19.1e-3), (64, 64.1e-3)):
        assert CPU.seconds(streams, 320 * streams, streams) == pytest.approx(seconds, rel=0.07)


def test_a_data_set_that_is_cut_off_loses_only_its_last_record(tmp_path: Path) -> None:
    file = tmp_path / "cut.json"
    whole = '{"id": "a", "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]}'
    file.write_text(f"[\n  {whole},\n  {whole[:70]}")
    assert list(conversations(file)) == [[("human", "Hi"), ("gpt", "Yo")]]


@pytest.mark.parametrize(
    ("points", "rate"),
    [
        ([(1.0, 0.1), (2.0, 0.3)], 1.5),
        ([(1.0, 0.1), (2.0, math.inf)], 1.0),
        ([(1.0, 0.3)], 0.0),
        ([(1.0, 0.1), (2.0, 0.2)], 2.0),
    ],
)
def test_the_rate_at_a_latency_lies_between_measured_points(
    points: list[tuple[float, float]], rate: float
) -> None:
    assert at_latency(points, 0.2) == pytest.approx(rate)


def test_an_experiment_leaves_a_table_and_a_plot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--minutes", "0.2", "--datasets", "alpaca", "--out", str(tmp_path)]
    assert EXPERIMENTS["batched"](arguments) == 0
    assert "| paged | 30.00 |" in capsys.readouterr().out
    with (tmp_path / "batched-alpaca.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["policy"] for row in rows] == [*Policy, "paged, saturated"]
    plot = (tmp_path / "paper-batched-alpaca.png").read_bytes()
    assert plot.startswith(b"\x89PNG")
    assert len(plot) < 80_000
