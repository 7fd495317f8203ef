"""Who gets how many tokens of a step, and how steps stay short."""

from __future__ import annotations

import random

from executor.budget import START_TOKENS, Pace, share


def test_whoever_decodes_gets_its_token_and_prompts_share_the_rest_in_order() -> None:
    assert share([[1], [100], [1], [50]], 40) == [[1], [38], [1], [0]]
    assert share([[1], [30], [1], [50]], 40) == [[1], [30], [1], [8]]


def test_the_first_group_progresses_even_if_the_others_could_use_everything() -> None:
    assert share([[100], *[[1]] * 20], 16)[0] == [1]
    assert share([[50, 50], *[[1]] * 20], 16)[0] == [1, 1]


def test_a_group_gets_something_for_all_members_or_nothing() -> None:
    assert share([[1] * 14, [1] * 4, [1]], 16) == [[1] * 14, [0] * 4, [1]]


def test_a_budget_is_never_exceeded_and_never_left_unused_while_singles_wait() -> None:
    draw = random.Random(3)
    for _ in range(2000):
        wants = [
            [draw.choice([1, 1, 5, 60]) for _ in range(draw.randint(1, 4))]
            for _ in range(draw.randint(1, 12))
        ]
        budget = draw.randint(16, 80)
        counts = share(wants, budget)
        given = [count for group in counts for count in group]
        asked = [want for group in wants for want in group]
        assert sum(given) <= budget
        assert all(0 <= count <= want for count, want in zip(given, asked, strict=True))
        assert all(all(group) or not any(group) for group in counts)
        assert all(counts[0])


def test_a_slow_step_shrinks_the_next_ones_and_quick_full_steps_let_them_grow_again() -> None:
    pace = Pace(512)
    assert pace.tokens == START_TOKENS
    assert pace.next(128, 0.1, 3.0) == 256
    assert pace.next(256, 0.1, 3.0) == 512
    assert pace.next(512, 2.0, 3.0) == 128  # 256 tokens a second: half a second's worth
    assert pace.next(10, 0.01, 3.0) == 128  # not full: says nothing
    assert pace.next(128, 0.6, 3.0) == 128  # near enough to half a second
    assert pace.next(16, 60.0, 3.0) == 16  # never less: a group of 16 choices must fit


def test_one_slow_step_is_forgotten_once_steps_are_faster_than_the_aim() -> None:
    pace = Pace(1024)
    pace.next(512, 0.1, 3.0)
    slowed = pace.next(512, 30.0, 3.0)
    assert slowed == 16
    for _ in range(100):
        budget = pace.tokens
        pace.next(budget, budget * 0.004, 3.0)  # a device of 250 tokens a second
    assert 110 <= pace.tokens <= 125  # half a second's worth
