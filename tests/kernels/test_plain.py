"""The references of attention against torch's own on contiguous keys, and against school arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import plain
from kernels.options import Options
from tests.kernels.paged import QUANTISED, Paged, assert_close


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def contiguous(cache: Tensor, scales: Tensor | None, table: Tensor, length: int) -> Tensor:
    """[1, kv_heads, length, head_dim], one slot after the other."""
    size = cache.shape[1]
    slots = [(int(table[position // size]), position % size) for position in range(length)]
    found = torch.stack([cache[slot].float() for slot in slots])
    if scales is not None:
        found = found * torch.stack([scales[slot] for slot in slots])[..., None]
    return found.transpose(0, 1)[None]


def torchs_own(
    paged: Paged, row: int, queries: Tensor, scale: float, options: Options
) -> Tensor:  # [count, heads, head_dim]
    length, (count, heads, _) = int(paged.lengths[row]), queries.shape
    key = contiguous(paged.keys, paged.key_scales, paged.tables[row], length)
    value = contiguous(paged.values, paged.value_scales, paged.tables[row], length)
    distance = torch.arange(length - count, length)[:, None] - torch.arange(length)[None, :]
    hidden = distance < 0
    if options.window is not None:
        hidden = hidden | (distance >= options.window)
    mask = torch.zeros(heads, count, length).masked_fill(hidden, -math.inf)
    if options.slopes is not None:
        mask = mask - options.slopes[:, None, None] * distance
    if options.sinks is not None:  # a key of zeros that scores what the mask says
        key, value = F.pad(key, (0, 0, 1, 0)), F.pad(value, (0, 0, 1, 0))
        sink = options.sinks[:, None, None].expand(heads, count, 1)
        mask = torch.cat((sink, mask), dim=-1)
    return F.scaled_dot_product_attention(
        queries.transpose(0, 1)[None].float(),
        key,
        value,
        attn_mask=mask[None],
        scale=scale,
        enable_gqa=True,
    )[0].transpose(0, 1)


@pytest.mark.parametrize("stored", [torch.float32, *QUANTISED], ids=str)
@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("biased", [False, True])
def test_both_equal_torch_on_contiguous_keys(
    stored: torch.dtype, window: int | None, biased: bool
) -> None:
    paged = Paged.random([1, 15, 16, 50], block_size=16, head_dim=16, stored=stored)
    options = Options(
        window=window,
        sinks=torch.randn(6) if biased else None,
        slopes=torch.rand(6) if biased else None,
    )
    counts, starts = [1, 15, 4, 1], [0, 1, 16, 20, 21]
    queries = torch.randn(21, 6, 16)
    cache = (paged.keys, paged.values, paged.tables)
    same: dict[str, Any] = {"scale": 0.3, "options": options, **paged.scales()}
    got = plain.prefill(queries, *cache, torch.tensor(starts), paged.lengths, 15, **same)
    last = torch.tensor(starts[1:]) - 1
    alone = plain.decode(queries[last], *cache, paged.lengths, **same)
    for row, count in enumerate(counts):
        here = slice(starts[row], starts[row] + count)
        wanted = torchs_own(paged, row, queries[here], 0.3, options)
        assert_close(got[here], wanted)
        assert_close(alone[row], wanted[-1])


def test_a_soft_cap_bends_scores_before_softmax() -> None:
    keys = torch.tensor([1.0, 4.0]).view(1, 2, 1, 1)
    values = torch.tensor([10.0, 20.0]).view(1, 2, 1, 1)
    got = plain.decode(
        torch.ones(1, 1, 1),
        keys,
        values,
        torch.tensor([[0]]),
        torch.tensor([2]),
        scale=2.0,
        options=Options(softcap=3.0),
    )
    scores = [3 * math.tanh(2 / 3), 3 * math.tanh(8 / 3)]
    first, second = (math.exp(score) for score in scores)
    assert got.item() == pytest.approx((10 * first + 20 * second) / (first + second))


def test_an_empty_row_is_zeros() -> None:
    paged = Paged.random([0, 3])
    cache = (paged.keys, paged.values, paged.tables, paged.lengths)
    got = plain.decode(torch.randn(2, 2, 64), *cache, scale=1.0)
    assert not got[0].any()
    assert got[1].isfinite().all()
