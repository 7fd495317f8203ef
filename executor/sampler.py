"""From logits to tokens: the same seed and position give the same token, whatever else is in the batch.

Each draw is a pure function of one row of logits and its `Draw`. Candidates are ordered by falling
probability, equal ones by id; top-k, top-p and min-p each keep a prefix of that order, and one uniform
number picks from what all of them keep. Only the candidates that can matter are put in order: those within
some distance of the likeliest, a distance that grows until they are enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from executor.plan import Draw, Drawn
from wire.sampling import Sampling

Row = NDArray[np.float32]  # [vocab]
Ids = NDArray[np.int64]

# Distances below the greatest logit, tried in turn until the candidates within are enough.
_CUTS = (-1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0, -16.0, -32.0)
_SLACK = 1 - 1e-9  # sums of the same numbers in another order differ by less
LEAST = 1e-6  # smaller temperatures and repetition penalties act like this one
MOST = np.finfo(np.float32).max
_GAMMA, _WORD = 0x9E3779B97F4A7C15, 2**64 - 1


def stream(seed: int, choice: int) -> int:
    """Where the random numbers of a choice begin, in 64 bits."""
    return _mixed(_mixed(seed) + choice * _GAMMA)


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone: of SplitMix64 (Steele, Lea and Flood,
    OOPSLA'14). The native step has the same in C++."""
    return (_mixed(stream(seed, choice) + (position + 1) * _GAMMA) >> 11) * 2.0**-53


def _mixed(word: int) -> int:
    word &= _WORD
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _WORD
    return word ^ word >> 31


def sample(logits: Tensor, draws: Sequence[tuple[int, Draw]]) -> list[Drawn]:
    """Draw tokens.

    Args:
        logits: [rows, vocab] float32.
        draws: pairs of a row of `logits` and what to draw from it.

    Returns:
        One `Drawn` per draw, in order. Its token is -1 when the row holds NaN or infinity, or when every
        token is forbidden.

    Raises:
        ValueError: a token id is outside the vocabulary.
    """
    if not draws:
        return []
    table = logits.numpy(force=True)
    finite = (np.isfinite(table.min(axis=1)) & np.isfinite(table.max(axis=1))).tolist()
    likeliest = table.argmax(axis=1).tolist()
    # Far below the peak, -inf after an overflow means what it should: no mass.
    with np.errstate(over="ignore"):
        return [
            _draw(table[row], draw, likeliest[row]) if finite[row] else Drawn(draw.seq, -1)
            for row, draw in draws
        ]


def _draw(raw: Row, draw: Draw, likeliest: int) -> Drawn:
    sampling = draw.sampling
    row = _adjusted(raw, draw)
    if sampling.temperature > 0:
        token = _pick(row, sampling, uniform(sampling.seed, draw.choice, draw.position))
    elif row is raw:
        token = likeliest
    else:
        token = int(row.argmax())
        token = token if row[token] > -np.inf else -1
    if sampling.logprobs < 0 or token < 0:
        return Drawn(draw.seq, token)
    return _with_logprobs(raw, draw.seq, token, sampling.logprobs)


def is_plain(sampling: Sampling) -> bool:
    """Whether logits count as they are but for forbidden tokens, and the token is all that is asked for."""
    return (
        sampling.logprobs < 0
        and not sampling.logit_bias
        and sampling.repetition_penalty == 1
        and sampling.presence_penalty == 0
        and sampling.frequency_penalty == 0
    )


def is_greedy(draw: Draw) -> bool:
    """Whether the greatest logit decides and nothing else is asked."""
    sampling = draw.sampling
    return sampling.temperature <= 0 and not draw.forbidden and is_plain(sampling)


@dataclass(slots=True, frozen=True)
class Edits:
    """What a draw asks to be changed in its logits, in this order. Ids are in the vocabulary, each at most
    once in an array, except in `biased`."""

    biased: Ids
    bias: Row  # added to them
    forbidden: Ids  # never drawn
    repeated: Ids  # brought nearer to -inf by this factor
    penalty: np.float32
    written: Ids
    drops: Row  # taken from them

    @classmethod
    def of(cls, draw: Draw, vocab: int) -> Edits | None:
        """None if nothing is asked for.

        Raises:
            ValueError: a token id is outside the vocabulary.
        """
        sampling = draw.sampling
        penalised = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        repeated = sampling.repetition_penalty != 1
        if not (sampling.logit_bias or draw.forbidden or penalised or repeated):
            return None
        written, counts = np.unique(
            _checked(draw.output if penalised else (), vocab), return_counts=True
        )
        drops = sampling.presence_penalty + sampling.frequency_penalty * counts
        seen = [_checked(draw.prompt, vocab), _checked(draw.output, vocab)] if repeated else []
        return cls(
            _checked([bias.token for bias in sampling.logit_bias], vocab),
            np.array([bias.value for bias in sampling.logit_bias], np.float32),
            _checked(draw.forbidden, vocab),
            np.unique(np.concatenate(seen)) if seen else np.empty(0, np.int64),
            np.float32(max(sampling.repetition_penalty, LEAST)),
            written,
            drops.astype(np.float32),
        )


def _adjusted(raw: Row, draw: Draw) -> Row:
    """Bias, forbidden tokens and penalties; `raw` itself when there are none."""
    edits = Edits.of(draw, len(raw))
    if edits is None:
        return raw
    row = raw.copy()
    np.add.at(row, edits.biased, edits.bias)
    row[edits.forbidden] = -np.inf
    near = row[edits.repeated]
    scaled = np.where(near > 0, near / edits.penalty, near * edits.penalty)
    row[edits.repeated] = np.minimum(scaled, MOST)
    row[edits.written] -= edits.drops
    return row


def _checked(ids: Sequence[int], vocab: int) -> Ids:
    """`ids` as an index.

    Raises:
        ValueError: one is outside the vocabulary.
    """
    index = np.asarray(ids, np.int64)
    if index.size and (index.min() < 0 or index.max() >= vocab):
        wrong = index.min() if index.min() < 0 else index.max()
        raise ValueError(f"token id {wrong} is outside the vocabulary of {vocab}")
    return index


def _pick(row: Row, sampling: Sampling, point: float) -> int:
    """The candidate at `point` (in [0, 1)) of the truncated distribution, or -1 if there is none."""
    peak = row.max()
    if peak == -np.inf:
        return -1
    scaled = (row - peak) / np.float32(max(sampling.temperature, LEAST))
    weights = np.exp(scaled)
    ids = (
        _best(scaled, sampling.top_k)
        if sampling.top_k
        else _covering(scaled, weights, sampling, point)
    )
    kept = len(ids)
    masses = np.cumsum(weights[ids], dtype=np.float64)
    whole = sampling.top_k or kept == len(row)
    total = float(masses[-1]) if whole else float(weights.sum(dtype=np.float64))
    mass = total
    if sampling.min_p > 0:
        kept = int(np.count_nonzero(weights[ids] >= sampling.min_p))
    if sampling.top_p < 1:
        kept = min(kept, int(np.searchsorted(masses, sampling.top_p * total)) + 1)
    if sampling.min_p > 0 or sampling.top_p < 1:
        mass = float(masses[kept - 1])
    # Never the end itself, which rounding may reach: behind it lie candidates of no mass.
    goal = min(point * mass, float(np.nextafter(mass, 0)))
    return int(ids[np.searchsorted(masses, goal, side="right")])


def _covering(scaled: Row, weights: Row, sampling: Sampling, point: float) -> Ids:
    """Candidates in order, from the first to one behind the last that top-p and min-p keep; without
    these, to one behind `point`."""
    share = sampling.top_p if sampling.top_p < 1 or sampling.min_p > 0 else point
    need = share * float(weights.sum(dtype=np.float64))
    least = np.log(sampling.min_p) if sampling.min_p > 0 else -np.inf
    for cut in _CUTS:
        ids = np.flatnonzero(scaled > cut)
        if cut < least or weights[ids].sum(dtype=np.float64) * _SLACK > need:
            return _ranked(scaled, ids)
    return _ranked(scaled, np.arange(len(scaled)))


def _best(scaled: Row, count: int) -> Ids:
    """The `count` best candidates in order. The greatest of `scaled` is 0."""
    for cut in _CUTS:
        ids = np.flatnonzero(scaled > cut)
        if len(ids) >= count:
            return _ranked(scaled, ids)[:count]
    return _ranked(scaled, np.arange(len(scaled)))[:count]


def _ranked(scaled: Row, ids: Ids) -> Ids:
    """Rising `ids`, greatest value first, equal ones still by id."""
    return ids[np.argsort(-scaled[ids], kind="stable")]


def _with_logprobs(raw: Row, seq: int, token: int, most: int) -> Drawn:
    """The token with its log-probability under the model, and those of the `most` likeliest."""
    shifted = raw - raw.max()
    log_total = float(np.log(np.exp(shifted).sum(dtype=np.float64)))

    def logprob(index: int) -> float:
        return float(shifted[index]) - log_total

    best = _best(shifted, most).tolist() if most else []
    top = tuple((index, logprob(index)) for index in best)
    return Drawn(seq, token, logprob(token), top)
