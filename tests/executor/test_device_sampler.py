"""Draws on the device are those of the host's sampler, or are left to it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from executor.device_sampler import CANDIDATES, UNSURE, likeliest, sample_there
from executor.plan import Draw
from executor.sampler import sample
from wire.sampling import Bias, Sampling

NAN, INF = float("nan"), float("inf")


def both(logits: torch.Tensor, draws: list[tuple[int, Draw]]) -> tuple[list[int], list[int]]:
    """Tokens of the host and of the device."""
    there = sample_there(logits, likeliest(logits), draws).tolist()
    return [one.token for one in sample(logits, draws)], there


def settings(chance: random.Random) -> Sampling:
    """Any parameters, each off half of the time."""
    options: dict[str, Any] = {
        "temperature": chance.choice((0.0, 1e-3, 0.3, 0.7, 1.0, 1.3, 2.0)),
        "top_k": chance.choice((1, 2, 5, 40, 1000, 5000)),
        "top_p": chance.choice((0.01, 0.5, 0.9, 0.99, 0.9999)),
        "min_p": chance.choice((0.001, 0.05, 0.3, 1.0)),
        "repetition_penalty": chance.choice((0.5, 1.1, 2.0)),
        "presence_penalty": chance.choice((-1.5, 0.4)),
        "frequency_penalty": chance.choice((-0.7, 1.2)),
        "logit_bias": tuple(Bias(chance.randrange(100), chance.uniform(-9, 9)) for _ in range(3)),
    }
    return Sampling(
        seed=chance.getrandbits(60),
        **{name: value for name, value in options.items() if chance.random() < 0.5},
    )


@pytest.mark.parametrize("vocab", [100, CANDIDATES, 5000])
@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_every_draw_is_the_hosts_or_is_left_to_it(vocab: int, spread: float) -> None:
    chance = random.Random(vocab)
    torch.manual_seed(vocab)
    unsure = count = 0
    for _ in range(20):
        logits = torch.randn(6, vocab) * spread
        draws = []
        for seq in range(24):
            prompt = [chance.randrange(100) for _ in range(20)]
            output = [chance.randrange(100) for _ in range(chance.choice((0, 20)))]
            forbidden = (3, 7) if chance.random() < 0.3 else ()
            draw = Draw(seq, seq, 40, settings(chance), prompt, output, forbidden)
            draws.append((chance.randrange(6), draw))
        host, there = both(logits, draws)
        for right, token in zip(host, there, strict=True):
            assert token in (right, UNSURE)
            unsure += token == UNSURE
            count += 1
    if vocab <= CANDIDATES:
        assert unsure < count / 30


def test_text_like_logits_are_nearly_always_drawn_on_the_device() -> None:
    torch.manual_seed(0)
    # A model's: a few likely tokens, a long tail.
    logits = torch.randn(8, 50_000) * 2 + torch.rand(8, 50_000).pow(500) * 25
    draws = [
        (row, Draw(1, choice, 9, Sampling(seed=5, top_p=0.95), (), ()))
        for row in range(8)
        for choice in range(64)
    ]
    host, there = both(logits, draws)
    assert sum(token == UNSURE for token in there) < len(draws) / 20
    assert all(token in (right, UNSURE) for right, token in zip(host, there, strict=True))


def test_ties_go_to_the_smaller_id() -> None:
    logits = torch.zeros(1, 50)
    logits[0, [7, 9, 30]] = 5.0
    greedy, one_of_two = Sampling(seed=0, temperature=0), Sampling(seed=0, top_k=2)
    draws = [(0, Draw(1, choice, 3, one_of_two, (), ())) for choice in range(50)]
    host, there = both(logits, [(0, Draw(1, 0, 3, greedy, (), ())), *draws])
    assert there == host
    assert there[0] == 7
    assert set(there[1:]) == {7, 9}


def test_more_equals_than_candidates_are_left_to_the_host() -> None:
    logits = torch.zeros(1, 2 * CANDIDATES)
    assert both(logits, [(0, Draw(1, 0, 3, Sampling(seed=0, top_k=5), (), ()))])[1] == [UNSURE]


def test_a_point_on_the_edge_between_two_candidates_is_left_to_the_host() -> None:
    # Two equal tokens: top_p of a half ends exactly between them.
    logits = torch.tensor([[3.0, 3.0, -50.0, -50.0]])
    draw = Draw(1, 0, 3, Sampling(seed=0, top_p=0.5), (), ())
    assert both(logits, [(0, draw)])[1] == [UNSURE]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_row_that_is_not_finite_gives_no_token_and_spoils_no_other(bad: float) -> None:
    logits = torch.randn(2, 40)
    logits[0, 11] = bad
    for sampling in (Sampling(seed=1, temperature=0), Sampling(seed=1, top_p=0.9)):
        draws = [(row, Draw(row, 0, 3, sampling, (), ())) for row in (0, 1)]
        host, there = both(logits, draws)
        assert there == host
        assert there[0] == -1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_drawn_when_all_is_forbidden(temperature: float) -> None:
    sampling = Sampling(seed=0, temperature=temperature)
    host, there = both(torch.randn(1, 4), [(0, Draw(1, 0, 3, sampling, (), (), (0, 1, 2, 3)))])
    assert there == host == [-1]


def test_logprobs_and_a_token_biased_twice_are_left_to_the_host() -> None:
    asked = [
        Sampling(seed=0, temperature=0, logprobs=2),
        Sampling(seed=0, temperature=0, logit_bias=(Bias(1, 0.1), Bias(1, 0.2))),
    ]
    draws = [(0, Draw(1, 0, 3, sampling, (), ())) for sampling in asked]
    assert both(torch.randn(1, 40), draws)[1] == [UNSURE, UNSURE]


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    sampling = Sampling(seed=0, repetition_penalty=1.5)
    with pytest.raises(ValueError, match="token id 40 is outside the vocabulary of 40"):
        both(torch.randn(1, 40), [(0, Draw(1, 0, 3, sampling, (40,), ()))])
