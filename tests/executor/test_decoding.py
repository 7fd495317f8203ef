"""Sequences in lanes: everything is as if there were none, but for the time it takes."""

from __future__ import annotations

import random
from array import array
from collections import defaultdict
from typing import Any

import pytest

from executor.news import News
from executor.plan import Drawn, Lanes, Members, Plan, Tables
from executor.request import pack
from tests.executor.driver import PEER, Driver
from tests.executor.twins import live
from tests.fakes import END, VOCAB, oracle
from wire.errors import Code
from wire.generate import Delta, Submit
from wire.sampling import Sampling


def lanes_of(plan: Plan) -> int:
    return len(plan.lanes) if plan.lanes is not None else 0


def in_lanes(driver: Driver, count: int) -> Plan:
    """Turn until so many rows of a step are in lanes."""
    for _ in range(50):
        if lanes_of(plan := driver.step()) == count:
            return plan
    raise AssertionError(f"never were {count} rows in lanes")


def with_stop(limit: int, stop_at: int) -> tuple[list[int], int]:
    """A prompt, and what is drawn at that place of its text, and at none before."""
    for first in range(1, 500):
        text = oracle([first], 0, limit)
        if text.index(text[stop_at]) == stop_at:
            return [first], text[stop_at]
    raise AssertionError("no such text")


# ---------------------------------------------------------------- as if there were none


@pytest.mark.parametrize("first", range(0, 32, 8))
def test_each_step_is_the_same_as_without_lanes_whatever_happens(first: int) -> None:
    sides = [live(seed) for seed in range(first, first + 8)]
    assert sum(side.lanes for side in sides) > 100
    assert sum(side.went_on for side in sides) > 10


@pytest.mark.parametrize("seed", range(4))
def test_texts_are_the_same_as_without_lanes_when_steps_lack_tokens_for_all(seed: int) -> None:
    live(seed, tight=True)


# ---------------------------------------------------------------- who stands in one


def test_a_plain_sequence_stands_in_a_lane_from_its_second_token_to_its_last() -> None:
    driver = Driver(block_size=64)
    driver.submit(1, [1, 2, 3], 100)
    where = [lanes_of(driver.step()) for _ in range(100)]
    driver.run()
    assert where == [0] + 99 * [1]
    assert driver.texts[1, 0] == oracle([1, 2, 3], 0, 100)


@pytest.mark.parametrize(
    "sampling", [{"logprobs": 2}, {"presence_penalty": 0.5}, {"repetition_penalty": 1.2}]
)
def test_who_asks_for_more_than_tokens_stands_in_none_beside_others_who_do(
    sampling: dict[str, Any],
) -> None:
    driver = Driver()
    driver.submit(1, [1, 2], 20)
    driver.submit(2, [3, 4], 20, **sampling)
    driver.submit(3, [5, 6], 20)
    for _ in range(10):
        plan = driver.step()
        (asks,) = [row for row in plan.rows if row.draws[0].prompt == [3, 4]]
        assert asks in plan.others
        output = driver.texts[2, 0]
        assert asks.draws[0].output[: len(output)] == output
    assert lanes_of(plan) == 2
    driver.run()
    for number, prompt in ((1, [1, 2]), (2, [3, 4]), (3, [5, 6])):
        assert driver.texts[number, 0] == oracle(prompt, 0, 20)


def test_before_min_tokens_a_sequence_stands_in_none_and_then_in_one() -> None:
    driver = Driver(block_size=64)
    driver.submit(1, [5, 6], 12, stop_ids=(9,), min_tokens=4)
    where, forbidden = [], []
    while driver.scheduler.busy:
        plan = driver.step()
        where.append(lanes_of(plan))
        forbidden += [draw.forbidden for row in plan.rows for draw in row.draws]
    assert forbidden == 4 * [(END, 9)] + 8 * [()]
    assert where[:12] == 4 * [0] + 8 * [1]


def test_more_sequences_than_a_step_has_tokens_stand_in_none_until_fewer_are_left() -> None:
    driver = Driver(step_tokens=16, sequences=64)
    for number in range(1, 8):
        driver.submit(number, [number], 20 * number, n=4)
    most = 0
    while driver.scheduler.busy:
        driver.step()
        running = driver.scheduler.sequences_running
        most = max(most, running)
    assert most > 16
    assert sum(map(lanes_of, driver.runner.plans)) > 100
    for number in range(1, 8):
        for choice in range(4):
            assert driver.texts[number, choice] == oracle([number], choice, 20 * number)


def test_all_leave_their_lanes_when_more_come_than_a_step_has_tokens() -> None:
    driver = Driver(step_tokens=16, sequences=64)
    for number in range(1, 13):
        driver.submit(number, [number], 60)
    in_lanes(driver, 12)
    for number in range(13, 16):
        driver.submit(number, [number], 10, n=4)
    while driver.scheduler.sequences_running <= 16:
        driver.step()
    assert not lanes_of(driver.step())
    in_lanes(driver, 12)
    driver.run()
    for number in range(1, 13):
        assert driver.texts[number, 0] == oracle([number], 0, 60)
    for number in range(13, 16):
        for choice in range(4):
            assert driver.texts[number, choice] == oracle([number], choice, 10)


def test_a_prompt_that_is_first_progresses_beside_more_lanes_than_a_step_should_have() -> None:
    driver = Driver(step_tokens=64, sequences=64)
    for number in range(1, 31):
        driver.submit(number, [number], 100)
    in_lanes(driver, 30)
    driver.submit(31, list(range(1, 11)), 5, priority=-1)
    driver.submit(32, list(range(1, 11)), 5)
    driver.scheduler.step_tokens = 64
    driver.step()
    driver.scheduler.step_tokens = 16
    for _ in range(40):
        assert lanes_of(driver.step()) >= 30  # and nobody is stopped for it
    assert (31, 0) in driver.finished
    driver.run()
    for number in (31, 32):
        assert driver.texts[number, 0] == oracle(list(range(1, 11)), 0, 5)


# ---------------------------------------------------------------- ends


def test_a_token_that_ends_one_ends_no_other() -> None:
    prompt, stop = with_stop(40, 20)
    driver = Driver()
    driver.submit(1, prompt, 40, stop_ids=(stop,))
    driver.submit(2, prompt, 40)
    driver.submit(3, prompt, 40, stop_ids=(stop % (VOCAB - 1) + 1,))
    driver.run()
    assert driver.finished[1, 0] == "stop"
    assert driver.texts[1, 0] == oracle(prompt, 0, 21)
    for number in (2, 3):
        assert driver.finished[number, 0] == "length"
        assert driver.texts[number, 0] == oracle(prompt, 0, 40)


def test_members_of_a_group_end_when_each_has_to() -> None:
    prompt = next(
        [first]
        for first in range(1, 500)
        if len({len(oracle([first], choice, 60, 20)) for choice in range(4)}) == 4
    )
    driver = Driver(end_every=20)
    driver.submit(1, prompt, 60, n=4)
    driver.submit(2, [7], 60, ignore_eos=True)
    driver.run()
    for choice in range(4):
        assert driver.texts[1, choice] == oracle(prompt, choice, 60, 20)
    assert len(driver.texts[2, 0]) == 60


def test_who_has_no_number_in_its_lane_fails_alone_and_its_last_step_is_not_reused() -> None:
    driver = Driver(block_size=4)
    for number in (1, 2, 3):
        driver.submit(number, [number] * 4, 30)
    in_lanes(driver, 3)
    run = driver.runner.run

    def spoiled(plan: Plan) -> list[Drawn]:
        drawn = run(plan)
        return [
            Drawn(one.seq, -1) if row.draws[0].prompt == [2] * 4 and row.start == 11 else one
            for row, one in zip(plan.rows, drawn, strict=True)
        ]

    driver.runner.run = spoiled  # type: ignore[method-assign]
    driver.run()
    assert driver.failed[2].code is Code.NOT_NUMBERS
    text = oracle([2] * 4, 0, 30)
    assert driver.texts[2, 0] == text[:8]
    for number in (1, 3):
        assert driver.texts[number, 0] == oracle([number] * 4, 0, 30)
    driver.submit(4, [2] * 4 + text[:20], 1)
    driver.run()
    assert driver.cached[4] == 8  # the third block was full only with the step that was spoiled


@pytest.mark.parametrize("why", ["abort", "NaN"])
def test_who_ends_on_the_way_into_its_lane_is_not_waited_for(why: str) -> None:
    """Its first token is being drawn when the step with its lane is asked for."""
    driver = Driver(block_size=16)
    scheduler = driver.scheduler
    driver.submit(1, [1, 2], 30)
    in_lanes(driver, 1)
    driver.submit(2, [3, 4], 30)
    driver.step()  # computes its prompt
    proposal = scheduler.propose()
    driver.memory.ask(proposal.wants)
    assert len(proposal.joined) == 1
    drawn = driver.runner.run(driver.plan)
    if why == "abort":
        scheduler.abort(PEER, 2)
    else:
        drawn = [*drawn[:-1], Drawn(drawn[-1].seq, -1)]
    for _, delta in scheduler.update(driver.plan, drawn):
        driver.texts[delta.id, delta.index] += delta.tokens
    driver.plan = scheduler.settle(proposal, driver.memory.answer(lambda: None))
    assert driver.plan.lanes is not None
    assert list(driver.plan.lanes.tokens) == [drawn[0].token]
    driver.run()
    assert driver.texts[1, 0] == oracle([1, 2], 0, 30)


# ---------------------------------------------------------------- what memd hears


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_a_prompt_is_there_for_others_as_soon_as_it_is_computed(block_size: int) -> None:
    driver = Driver(block_size=block_size)
    prompt = [5 * i % 997 + 1 for i in range(70)]
    driver.submit(1, prompt, 30)
    for _ in range(3):
        driver.step()  # its prompt, and its second token; its first is committed with the next one
    driver.submit(2, [*prompt, 7], 3)
    driver.run()
    assert driver.cached[2] == 70 // block_size * block_size


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_what_was_written_in_lanes_is_there_for_others(block_size: int) -> None:
    driver = Driver(block_size=block_size)
    prompts = {number: [number, 2, 3] for number in (1, 2, 3)}
    for number, prompt in prompts.items():
        driver.submit(number, prompt, 90 + number)
    in_lanes(driver, 3)
    for _ in range(60):
        driver.step()
    for number, prompt in prompts.items():  # those who still write: full blocks
        driver.submit(number + 10, prompt + oracle(prompt, 0, 50), 2)
    driver.run()
    for number, prompt in prompts.items():  # those who ended
        driver.submit(number + 20, prompt + oracle(prompt, 0, 90 + number), 2)
    driver.run()
    for number in prompts:
        # What is generated is told late: with a block after 32 steps were looked through.
        late = driver.cached[number + 10]
        assert late % block_size == 0
        assert 53 - 32 - 2 * block_size < late <= 52
        written = 3 + 90 + number - 1
        assert driver.cached[number + 20] == written // block_size * block_size


def test_memd_hears_how_full_blocks_are_of_those_in_lanes_too() -> None:
    driver = Driver(block_size=16)
    driver.submit(1, [1] * 5, 40)
    driver.submit(2, [2] * 9, 40, logprobs=0)
    in_lanes(driver, 1)
    plan = driver.step()
    fills = memoryview(driver.scheduler.propose(fills=True).wants.fills).cast("Q").tolist()
    done = {row.seq: row.start + 1 for row in plan.rows}
    assert dict(zip(fills[::2], fills[1::2], strict=True)) == done
    assert len(done) == 2


def test_who_came_first_is_asked_for_first_whenever_others_came_into_their_lanes() -> None:
    """All need a block in the same step, but the oldest joined last: it was refused one before."""
    driver = Driver(blocks=60, sequences=8)
    draw = random.Random(3)
    for number in range(1, 9):
        driver.submit(number, [number] * draw.randint(1, 12), 60)
    while driver.scheduler.busy:
        driver.step()
        groups = {seq.id: group for group in driver.scheduler.running for seq in group.live}
        asked = [append.seq for append in driver.memory.asked[-1].appends]
        orders = [groups[seq].order for seq in asked if seq in groups]
        assert orders == sorted(orders)
    assert driver.scheduler.counters.preemptions > 0


# ---------------------------------------------------------------- counters that lag


def test_counters_and_tokens_are_right_whenever_they_are_brought_up_to_date() -> None:
    """In blocks longer than anything lags, over many more steps than are remembered."""
    driver = Driver(block_size=256)
    for number in (1, 2):
        driver.submit(number, [number, 3], 200)
    plan = in_lanes(driver, 2)
    rng = random.Random(1)
    for _ in range(150):
        plan = driver.step()
        if rng.random() < 0.1:
            driver.scheduler.catch_up()
            for row, group in zip(plan.rows, driver.scheduler.running, strict=True):
                (seq,) = group.live
                assert seq.output == driver.texts[group.id, 0]
                assert seq.computed == seq.written + 1 == row.start + 1 == len(seq.tokens)
    driver.run()
    for number in (1, 2):
        assert driver.texts[number, 0] == oracle([number, 3], 0, 200)


def test_one_that_leaves_its_lane_and_comes_back_goes_on_where_it_was() -> None:
    """Of three in a pool too small, one or the other gets no block and pauses, or starts over."""
    driver = Driver(blocks=24, block_size=4)
    for number in (1, 2, 3):
        driver.submit(number, [number] * 5, 60)
    left: dict[int, int] = defaultdict(int)
    before: set[int] = set()
    while driver.scheduler.busy:
        plan = driver.step()
        now = set(plan.lanes.members.names) if plan.lanes is not None else set()
        for seq in before - now:
            left[seq] += 1
        before = now
    assert max(left.values()) > 1
    for number in (1, 2, 3):
        assert driver.texts[number, 0] == oracle([number] * 5, 0, 60)


# ---------------------------------------------------------------- what gateways hear


def test_each_gateway_hears_of_its_own_requests_alone() -> None:
    driver = Driver()
    scheduler = driver.scheduler
    for number in range(6):
        peer = (b"one", b"two", b"three")[number % 3]
        scheduler.submit(
            peer, Submit(number // 3, pack([number + 1]), Sampling(seed=1, max_tokens=40))
        )
    texts: dict[tuple[bytes, int], list[int]] = defaultdict(list)
    while scheduler.busy:
        proposal = scheduler.propose()
        driver.memory.ask(proposal.wants)
        for peer, delta in scheduler.update(driver.plan, driver.runner.run(driver.plan)):
            texts[peer, delta.id] += delta.tokens
        driver.plan = scheduler.settle(proposal, driver.memory.answer(lambda: None))
    for number in range(6):
        peer = (b"one", b"two", b"three")[number % 3]
        assert texts[peer, number // 3] == oracle([number + 1], 0, 40)


def lanes(*requests: tuple[bytes, int, int]) -> Lanes:
    """Of a gateway's request's choice."""
    count = len(requests)
    members = Members(
        list(range(1, count + 1)),
        [1] * count,
        bytes(choice for _, _, choice in requests),
        [Sampling(seed=0)] * count,
        [[1]] * count,
        [peer for peer, _, _ in requests],
        array("Q", [number for _, number, _ in requests]).tobytes(),
    )
    return Lanes(members, 0, Tables(1, [[1]] * count, []), array("i"))


def test_tokens_of_lanes_are_news_for_each_ones_gateway() -> None:
    news = News()
    news.add_lanes(lanes((b"one", 2**53 - 1, 0), (b"one", 7, 3)), array("i", [5, 2**31 - 1]), ())
    assert list(news) == [
        (b"one", Delta(2**53 - 1, 0, [5])),
        (b"one", Delta(7, 3, [2**31 - 1])),
    ]
    news.add_lanes(lanes((b"one", 1, 0), (b"two", 1, 1), (b"one", 2, 0)), array("i", [5, 6, 7]), ())
    assert list(news)[2:] == [
        (b"one", Delta(1, 0, [5])),
        (b"one", Delta(2, 0, [7])),
        (b"two", Delta(1, 1, [6])),
    ]
    assert news.count == 5


def test_tokens_of_those_who_left_their_lane_are_no_news() -> None:
    news = News()
    three = lanes((b"one", 1, 0), (b"two", 1, 0), (b"one", 2, 0))
    news.add_lanes(three, array("i", [5, -1, 7]), [1])
    assert list(news) == [(b"one", Delta(1, 0, [5])), (b"one", Delta(2, 0, [7]))]
    assert news.count == 2
    nobody = News()
    nobody.add_lanes(three, array("i", [5, -1, 7]), [0, 1, 2])
    assert not nobody
    assert list(nobody) == []
