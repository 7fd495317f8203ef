"""Draws where the logits are, so that tokens cross the bus instead of vocabularies.

`executor.sampler` says which token is right; this says the same token or nothing. A draw looks at the
likeliest `CANDIDATES` alone. Where that is not enough, or where rounding could decide (another order of the
same sum lands elsewhere in the last digits), it leaves the draw `UNSURE`, and the host draws it. Nothing here
waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.plan import Draw
from executor.sampler import LEAST, MOST, Edits, is_greedy, uniform
from executor.staging import put

CANDIDATES = 1024
UNSURE = -2  # in place of a token: the host must draw it
_DOUBT = 1e-6  # relative; float32 exponentials of two libraries differ by a tenth of it
_NOTHING = float("-inf")


def likeliest(logits: Tensor) -> Tensor:
    """[rows] int64: the first greatest of each row of [rows, vocab], -1 where a row holds NaN or infinity."""
    least, most = logits.aminmax(dim=1)
    return torch.where(least.isfinite() & most.isfinite(), logits.argmax(dim=1), -1)


def sample_there(logits: Tensor, best: Tensor, draws: Sequence[tuple[int, Draw]]) -> Tensor:
    """Draw tokens on the logits' device.

    Args:
        logits: [rows, vocab] float32.
        best: [rows] int64, of `likeliest`.
        draws: pairs of a row of `logits` and what to draw from it.

    Returns:
        [draws] int64 on the device: a token; -1 as in `executor.sampler.sample`; or `UNSURE`.

    Raises:
        ValueError: a token id is outside the vocabulary.
    """
    device = logits.device
    rows = put(np.array([row for row, _ in draws], np.int64), device)
    tokens = best[rows]
    odd = [index for index, (_, draw) in enumerate(draws) if not is_greedy(draw)]
    if not odd:
        return tokens
    picked = [draws[index][1] for index in odd]
    places = put(np.array(odd, np.int64), device)
    table = logits[rows[places]]
    _edit(table, picked)
    drawn = _pick(table, _Settings.of(picked, device))
    return tokens.index_copy_(0, places, torch.where(tokens[places] < 0, tokens[places], drawn))


@dataclass(slots=True)
class _Settings:
    """Sampling parameters, one of each per draw: [draws, 1]."""

    temperature: Tensor  # float32; 0: greedy
    top_k: Tensor  # int64; 0: off
    top_p: Tensor  # float64
    min_p: Tensor  # float32
    point: Tensor  # float64 in [0, 1)
    host: Tensor  # bool: asks for what only the host has

    @classmethod
    def of(cls, draws: Sequence[Draw], device: torch.device) -> _Settings:
        numbers = [
            (
                draw.sampling.temperature,
                draw.sampling.top_k,
                draw.sampling.top_p,
                draw.sampling.min_p,
                uniform(draw.sampling.seed, draw.choice, draw.position),
                draw.sampling.logprobs >= 0 or _twice(draw),
            )
            for draw in draws
        ]
        columns = put(np.array(numbers, np.float64).T.copy(), device)[:, :, None]
        temperature, top_k, top_p, min_p, point, host = columns.unbind(0)
        return cls(temperature.float(), top_k.long(), top_p, min_p.float(), point, host > 0)


def _twice(draw: Draw) -> bool:
    """Whether a token is biased twice: a device adds in any order."""
    biases = draw.sampling.logit_bias
    return len({bias.token for bias in biases}) < len(biases)


def _edit(table: Tensor, draws: Sequence[Draw]) -> None:
    """Bias, forbidden tokens and penalties, as the host's sampler applies them; [draws, vocab], in place."""
    all_edits = [(row, Edits.of(draw, table.shape[1])) for row, draw in enumerate(draws)]
    some = [(row, edits) for row, edits in all_edits if edits is not None]
    if not some:
        return

    def places(ids: Sequence[NDArray[np.int64]]) -> Tensor | None:
        """Indices into the flat table, or None when there are none."""
        vocab = table.shape[1]
        flat = [row * vocab + part for (row, _), part in zip(some, ids, strict=True)]
        joined = np.concatenate(flat)
        return put(joined, table.device) if len(joined) else None

    def values(parts: Sequence[NDArray[np.float32]]) -> Tensor:
        return put(np.concatenate(parts), table.device)

    flat = table.view(-1)
    edits = [each for _, each in some]
    if (at := places([each.biased for each in edits])) is not None:
        flat.index_add_(0, at, values([each.bias for each in edits]))
    if (at := places([each.forbidden for each in edits])) is not None:
        flat.index_fill_(0, at, _NOTHING)
    if (at := places([each.repeated for each in edits])) is not None:
        near = flat[at]
        penalty = values([np.full(len(each.repeated), each.penalty) for each in edits])
        scaled = torch.where(near > 0, near / penalty, near * penalty)
        flat.index_copy_(0, at, scaled.clamp(max=float(MOST)))
    if (at := places([each.written for each in edits])) is not None:
        flat.index_copy_(0, at, flat[at] - values([each.drops for each in edits]))


def _pick(table: Tensor, asked: _Settings) -> Tensor:
    """[draws] int64: what `executor.sampler` picks from each row of [draws, vocab], or `UNSURE`."""
    vocab = table.shape[1]
    count = min(vocab, CANDIDATES)
    peak, first = table.max(dim=1, keepdim=True)
    scaled = (table - peak) / asked.temperature.clamp(min=float(LEAST))
    weights = scaled.exp()
    values, ids = _ranked(scaled, count)
    heavy = weights.gather(1, ids)
    masses = heavy.double().cumsum(dim=1)  # [draws, count]: of a candidate and all before it

    limited = (asked.top_k > 0) & (asked.top_k < vocab)
    limit = torch.where(limited, asked.top_k, vocab)
    top = (limit - 1).clamp(max=count - 1)
    total = torch.where(
        limited, masses.gather(1, top), weights.sum(dim=1, keepdim=True, dtype=torch.float64)
    )

    cut_by_p, cut_by_min = asked.top_p < 1, asked.min_p > 0

    def landing(slack: float) -> tuple[Tensor, Tensor]:
        """How many candidates are kept, and the one drawn, if every sum came out that much larger."""
        by_p = (masses < (asked.top_p + slack) * total).sum(dim=1, keepdim=True) + 1
        by_min = (heavy >= asked.min_p * (1 - slack)).sum(dim=1, keepdim=True).clamp(min=1)
        kept = torch.where(cut_by_min, torch.minimum(limit, by_min), limit)
        kept = torch.where(cut_by_p, torch.minimum(kept, by_p), kept)
        last = masses.gather(1, (kept - 1).clamp(max=count - 1))
        mass = torch.where(cut_by_p | cut_by_min, last, total)
        index = (masses <= (asked.point + slack) * mass).sum(dim=1, keepdim=True)
        return kept, torch.minimum(index, kept - 1)

    _, index = landing(-_DOUBT)
    kept, highest = landing(_DOUBT)
    # Every rank that decides something must be a true rank: above the last candidate, whose equals may be
    # among those not looked at.
    deciding = torch.where(cut_by_p | cut_by_min, kept - 1, highest)
    deciding = torch.where(limited, limit - 1, deciding)
    sure = (index == highest) & (deciding < count)
    if count < vocab:
        sure &= values.gather(1, deciding.clamp(max=count - 1)) > values[:, -1:]

    token = ids.gather(1, index.clamp(max=count - 1))
    token = torch.where(sure, token, UNSURE)
    token = torch.where(asked.temperature > 0, token, first)
    token = torch.where(peak == _NOTHING, -1, token)
    return torch.where(asked.host, UNSURE, token).squeeze(1)


def _ranked(scaled: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` greatest of each row and where they are, greatest first, equal ones by rising place."""
    ids = scaled.topk(count, dim=1, sorted=False).indices.sort(dim=1).values
    values, order = scaled.gather(1, ids).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)
