from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from executor.plan import Draw, Drawn
from executor.sampler import sample, uniform
from wire.sampling import Bias, Sampling

Floats = NDArray[np.float64]


def draw(
    position: int = 0,
    *,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    forbidden: tuple[int, ...] = (),
    choice: int = 0,
    seed: int = 7,
    **sampling: Any,
) -> Draw:
    return Draw(1, choice, position, Sampling(seed=seed, **sampling), prompt, output, forbidden)


def one(logits: Sequence[float] | torch.Tensor, drawn: Draw) -> Drawn:
    return sample(torch.as_tensor(logits, dtype=torch.float32)[None], [(0, drawn)])[0]


def exact(logits: Floats, **s: Any) -> Floats:
    """The distribution the parameters ask for, from their definitions, nothing clever."""
    x = logits.astype(np.float64).copy()
    for token, value in s.get("bias", ()):
        x[token] += value
    for token in s.get("forbidden", ()):
        x[token] = -math.inf
    prompt, output = list(s.get("prompt", ())), list(s.get("output", ()))
    for token in set(prompt + output):
        penalty = s.get("repetition_penalty", 1.0)
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token in set(output):
        x[token] -= s.get("presence_penalty", 0.0)
        x[token] -= s.get("frequency_penalty", 0.0) * output.count(token)
    x = x / s["temperature"]
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    keep = order[: s.get("top_k") or len(x)]
    p = np.zeros(len(x))
    p[keep] = np.exp(x[keep] - x.max())
    p /= p.sum()
    kept, mass = [], 0.0
    for token in keep:
        kept.append(token)
        mass += p[token]
        if mass >= s.get("top_p", 1.0):
            break
    kept = [token for token in kept if p[token] >= s.get("min_p", 0.0) * p.max()]
    out = np.zeros(len(x))
    out[kept] = p[kept]
    return np.asarray(out / out.sum())


def chosen(logits: Floats, draws: list[Draw]) -> list[int]:
    table = torch.as_tensor(logits, dtype=torch.float32)[None]
    return [drawn.token for drawn in sample(table, [(0, d) for d in draws])]


CASES: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "cool": {"temperature": 0.6},
    "hot": {"temperature": 1.9},
    "top_k": {"temperature": 1.2, "top_k": 5},
    "top_k of one": {"temperature": 1.2, "top_k": 1},
    "top_k beyond the vocabulary": {"temperature": 1.2, "top_k": 1000},
    "top_p": {"temperature": 1.0, "top_p": 0.7},
    "tiny top_p": {"temperature": 1.0, "top_p": 1e-6},
    "min_p": {"temperature": 1.3, "min_p": 0.2},
    "min_p of one": {"temperature": 1.3, "min_p": 1.0},
    "all three": {"temperature": 1.5, "top_k": 12, "top_p": 0.8, "min_p": 0.1},
    "bias": {"temperature": 1.0, "bias": ((3, 2.5), (4, -100.0))},
    "forbidden": {"temperature": 1.0, "forbidden": (0, 1, 2)},
    "repetition": {
        "temperature": 1.0,
        "repetition_penalty": 1.8,
        "prompt": [0, 1, 1, 5],
        "output": [7, 5],
    },
    "presence": {"temperature": 1.0, "presence_penalty": 1.5, "prompt": [3], "output": [0, 0, 2]},
    "frequency": {"temperature": 1.0, "frequency_penalty": -0.7, "prompt": [3], "output": [9, 9]},
    "everything": {
        "temperature": 0.9,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "prompt": [1, 2, 3],
        "output": [4, 4, 5, 6],
        "bias": ((8, 3.0),),
        "forbidden": (10,),
    },
}  # fmt: skip


def as_draws(case: dict[str, Any], count: int) -> list[Draw]:
    settings = {key: value for key, value in case.items() if key != "bias"}
    biases = tuple(Bias(token, value) for token, value in case.get("bias", ()))
    return [draw(position, logit_bias=biases, **settings) for position in range(count)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("vocab", [31, 700])
def test_tokens_follow_the_exact_distribution(name: str, vocab: int) -> None:
    case = CASES[name]
    rng = np.random.default_rng(vocab)
    # Rounded as bfloat16 logits are, so that equal logits abound.
    logits = np.round(rng.normal(0, 2, vocab) * 4) / 4
    wanted = exact(logits, **case)
    count = 4000
    tokens = chosen(logits, as_draws(case, count))
    counts = np.bincount(tokens, minlength=vocab)
    assert counts[wanted == 0].sum() == 0
    # Chi-square with the rare tokens pooled; 5 standard deviations above its mean would be a bug.
    common = wanted * count >= 10
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(wanted[common], wanted[~common].sum()) * count
    observed, expected = observed[expected > 0], expected[expected > 0]
    degrees = max(1, len(expected) - 1)
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert statistic < degrees + 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize("name", CASES)
def test_each_token_is_the_one_the_uniform_number_points_at(name: str) -> None:
    case = CASES[name]
    vocab = 3000
    # Rounded, so that no two are told apart in float64 and not in float32.
    logits = np.round(np.random.default_rng(1).normal(0, 1, vocab) * 256) / 256
    wanted = exact(logits, **case)
    order = sorted(range(vocab), key=lambda i: (-wanted[i], i))
    ends = np.cumsum(wanted[order])
    for position, token in enumerate(chosen(logits, as_draws(case, 200))):
        place = order.index(token)
        point = uniform(7, 0, position)
        start = ends[place - 1] if place else 0.0
        assert start - 1e-5 <= point <= ends[place] + 1e-5


def test_uniform_numbers_are_uniform_and_depend_on_every_part_of_their_key() -> None:
    numbers = np.array([uniform(5, 0, position) for position in range(20000)])
    assert numbers.min() >= 0
    assert numbers.max() < 1
    histogram, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert ((histogram - 1000) ** 2 / 1000).sum() < 19 + 5 * math.sqrt(38)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
    assert len({uniform(1, 2, 3), uniform(2, 1, 3), uniform(1, 3, 2), uniform(3, 2, 1)}) == 4
    assert uniform(2**63 - 1, 15, 2**31 - 1) == uniform(2**63 - 1, 15, 2**31 - 1)


def test_a_draw_does_not_depend_on_the_batch_around_it() -> None:
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(0, 3, (40, 5000)).astype(np.float32))
    draws = [
        draw(
            int(rng.integers(1000)),
            seed=int(rng.integers(1 << 62)),
            choice=row % 3,
            temperature=[0.0, 0.7, 1.0, 1.5][row % 4],
            top_k=[0, 40, 0][row % 3],
            top_p=[1.0, 0.9][row % 2],
            logprobs=[-1, 2][row % 2],
        )
        for row in range(40)
    ]
    together = sample(logits, list(enumerate(draws)))
    alone = [sample(logits[row : row + 1], [(0, d)])[0] for row, d in enumerate(draws)]
    assert together == alone
    backwards = [39 - row for row in range(40)]
    turned = sample(logits.flip(0).contiguous(), [(39 - row, draws[row]) for row in backwards])
    assert turned == together[::-1]


def test_greedy_takes_the_lowest_of_equal_ids() -> None:
    assert one([0, 3, 1, 3, 3], draw(temperature=0)).token == 1
    assert one([0, 3, 1, 3, 3], draw(temperature=0, forbidden=(1,))).token == 3


def test_greedy_feels_bias_and_penalties() -> None:
    logits = [1.0, 2.0, 1.5]
    assert one(logits, draw(temperature=0, logit_bias=(Bias(0, 1.2),))).token == 0
    assert one(logits, draw(temperature=0, output=[1], presence_penalty=0.6)).token == 2
    assert one(logits, draw(temperature=0, output=[1, 1], frequency_penalty=0.3)).token == 2
    assert one(logits, draw(temperature=0, prompt=[1], repetition_penalty=1.5)).token == 2
    assert one(logits, draw(temperature=0, prompt=[1], presence_penalty=2.0)).token == 1


def test_sampling_parameters_do_not_change_the_row_for_the_next_draw() -> None:
    logits = torch.tensor([[1.0, 2.0, 1.5]])
    biased = draw(temperature=0, logit_bias=(Bias(0, 50.0),), forbidden=(1,))
    drawn = sample(logits, [(0, biased), (0, draw(temperature=0))])
    assert [d.token for d in drawn] == [0, 1]
    assert logits.tolist() == [[1.0, 2.0, 1.5]]


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = np.random.default_rng(4).normal(0, 3, 1000).astype(np.float32)
    reference = torch.log_softmax(torch.from_numpy(logits).double(), -1).numpy()
    best = sorted(range(1000), key=lambda i: (-logits[i], i))[:5]
    hard = draw(
        3, temperature=1.7, top_k=9, logprobs=5, logit_bias=(Bias(4, 9.0),), forbidden=(best[0],)
    )
    got = one(torch.from_numpy(logits), hard)
    assert got.logprob == pytest.approx(reference[got.token], abs=1e-5)
    assert [token for token, _ in got.top] == best
    assert [value for _, value in got.top] == pytest.approx(reference[best], abs=1e-5)


def test_logprobs_zero_gives_the_chosen_token_only_and_minus_one_none() -> None:
    assert one([0.0, 0.0], draw(temperature=0, logprobs=0)).logprob == pytest.approx(-math.log(2))
    assert one([0.0, 0.0], draw(temperature=0, logprobs=0)).top == ()
    assert one([0.0, 0.0], draw(temperature=0)).logprob == 0.0


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_yields_no_token_and_harms_no_other(
    wrong: float, temperature: float
) -> None:
    logits = torch.tensor([[0.0, 1.0, 5.0], [0.0, wrong, 1.0], [9.0, 0.0, 0.0]])
    greedy = draw(temperature=0)
    drawn = sample(logits, [(0, greedy), (1, draw(temperature=temperature)), (2, greedy)])
    assert [d.token for d in drawn] == [2, -1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_vocabulary_forbidden_whole_yields_no_token(temperature: float) -> None:
    assert one([1.0, 2.0], draw(temperature=temperature, forbidden=(0, 1))).token == -1


def test_extreme_parameters_and_logits_stay_finite() -> None:
    assert one([1.0, 2.0, 0.0], draw(temperature=1e-300)).token == 1
    tiny = draw(temperature=1.0, repetition_penalty=1e-300, output=[0])
    assert one([3e38, 2.0, 0.0], tiny).token == 0
    assert one([-3e38, 3e38, 0.0], draw(temperature=1e-6)).token == 1
    assert one([1.0, 1.0 + 1e-3, 0.0], draw(temperature=1e-6)).token == 1
    assert one([3e38, 3e38], draw(temperature=2.0)).token in (0, 1)


@pytest.mark.parametrize(
    "hostile",
    [
        {"logit_bias": (Bias(3, 1.0),)},
        {"forbidden": (3,)},
        {"prompt": [3], "repetition_penalty": 1.1},
        {"output": [2**31 - 1], "presence_penalty": 1.0},
        {"forbidden": (-1,)},
    ],
)
def test_an_id_outside_the_vocabulary_is_refused(hostile: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary of 3"):
        one([0.0, 1.0, 2.0], draw(temperature=0, **hostile))


def test_no_draws_need_no_logits() -> None:
    assert sample(torch.empty(0, 5), []) == []
