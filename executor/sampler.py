"""From logits to tokens: the same seed and position give the same token, whatever else is in the batch.

Each draw is a pure function of one row of logits and its `Draw`. Candidates are ordered by falling
probability, equal ones by id; top-k, top-p and min-p each keep a prefix of that order, and one uniform
number picks from what all of them keep. Only as much of the order is computed as the draw needs.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.plan import Draw, Drawn
from wire.sampling import Sampling

Row = NDArray[np.float32]  # [vocab]
Ids = NDArray[np.int64]

_PREFIX = 256  # candidates ordered at first; eight times as many when they are not enough
_LEAST = 1e-6  # smaller temperatures and repetition penalties act like this one
_MOST = np.finfo(np.float32).max


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) that depends on its arguments alone."""
    key = struct.pack("<QQQ", seed, choice, position)
    word = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return float((word >> 11) * 2.0**-53)


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
    lowest, highest = torch.aminmax(logits, dim=-1)
    finite = (torch.isfinite(lowest) & torch.isfinite(highest)).tolist()
    likeliest = logits.argmax(dim=-1).tolist()
    table = logits.numpy(force=True)
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


def _adjusted(raw: Row, draw: Draw) -> Row:
    """Bias, forbidden tokens and penalties; `raw` itself when there are none."""
    sampling = draw.sampling
    penalised = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    repeated = sampling.repetition_penalty != 1
    if not (sampling.logit_bias or draw.forbidden or penalised or repeated):
        return raw
    row = raw.copy()
    vocab = len(row)
    for bias in sampling.logit_bias:
        row[_checked([bias.token], vocab)] += bias.value
    if draw.forbidden:
        row[_checked(draw.forbidden, vocab)] = -np.inf
    if repeated:
        seen = np.unique(
            np.concatenate((_checked(draw.prompt, vocab), _checked(draw.output, vocab)))
        )
        penalty = np.float32(max(sampling.repetition_penalty, _LEAST))
        scaled = np.where(row[seen] > 0, row[seen] / penalty, row[seen] * penalty)
        row[seen] = np.minimum(scaled, _MOST)
    if penalised:
        written, counts = np.unique(_checked(draw.output, vocab), return_counts=True)
        row[written] -= (sampling.presence_penalty + sampling.frequency_penalty * counts).astype(
            np.float32
        )
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
    """The candidate at `point` (in [0, 1)) of the truncated distribution, or -1 if there is none.

    Works on a prefix of the candidates' order and takes a longer one when the cut, or the point itself,
    lies behind its end.
    """
    limit = min(sampling.top_k or len(row), len(row))
    peak = row.max()
    if peak == -np.inf:
        return -1
    scaled = (row - peak) / np.float32(max(sampling.temperature, _LEAST))
    whole = 0.0 if sampling.top_k else float(np.exp(scaled).sum(dtype=np.float64))
    truncated = sampling.top_p < 1 or sampling.min_p > 0
    size = limit if sampling.top_k else min(limit, _PREFIX)
    while True:
        ids = _order(scaled, size)
        weights = np.exp(scaled[ids].astype(np.float64))
        masses = np.cumsum(weights)
        total = float(masses[-1]) if size == limit else whole
        kept = size
        if sampling.min_p > 0:
            kept = int(np.count_nonzero(weights >= sampling.min_p))
        if sampling.top_p < 1:
            kept = min(kept, int(np.searchsorted(masses, sampling.top_p * total)) + 1)
        settled = kept < size or size == limit
        if settled or not truncated:
            mass = float(masses[kept - 1]) if settled else total
            # Never the end itself, which rounding may reach: behind it lie candidates of no mass.
            goal = min(point * mass, float(np.nextafter(mass, 0)))
            place = int(np.searchsorted(masses, goal, side="right"))
            if place < kept:
                return int(ids[place])
        size = min(limit, size * 8)


def _order(row: Row, size: int) -> Ids:
    """The `size` ids of greatest value, greatest first, equal ones by id."""
    ids = np.arange(len(row))
    if size < len(row):
        least = np.partition(row, len(row) - size)[len(row) - size]
        above = np.flatnonzero(row > least)
        equal = np.flatnonzero(row == least)[: size - len(above)]
        ids = np.concatenate((above, equal))
    return ids[np.argsort(-row[ids], kind="stable")]


def _with_logprobs(raw: Row, seq: int, token: int, most: int) -> Drawn:
    """The token with its log-probability under the model, and those of the `most` likeliest."""
    shifted = raw - raw.max()
    log_total = float(np.log(np.exp(shifted).sum(dtype=np.float64)))

    def logprob(index: int) -> float:
        return float(shifted[index]) - log_total

    best = _order(raw, min(most, len(raw))).tolist() if most else []
    top = tuple((index, logprob(index)) for index in best)
    return Drawn(seq, token, logprob(token), top)
