"""The reference against school arithmetic: what all else is measured by must be right by itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.options import Options
from kernels.reference import copy_blocks, decode, prefill, write_kv
from tests.kernels.paged import NAN, QUANTISED, Paged, assert_close, options

ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"window": 1},
    {"window": 9},
    {"softcap": 2.0},
    {"sinks": True},
    {"slopes": True},
    {"window": 9, "softcap": 2.0, "sinks": True, "slopes": True},
)


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def by_definition(
    paged: Paged,
    row: int,
    position: int,
    query: Tensor,  # [heads, head_dim]
    scale: float,
    asked: Options,
) -> Tensor:  # [heads, head_dim] float64
    """One token's attention, head by head and slot by slot."""
    size, kv_heads = paged.keys.shape[1:3]
    results = []
    for head, one in enumerate(query.double()):
        kv_head = head // (len(query) // kv_heads)
        weights: list[float] = []
        values: list[Tensor] = []
        for seen in range(position + 1):
            if asked.window is not None and position - seen >= asked.window:
                continue
            slot = int(paged.tables[row, seen // size]), seen % size, kv_head
            key, value = paged.keys[slot].double(), paged.values[slot].double()
            if paged.key_scales is not None and paged.value_scales is not None:
                key, value = key * paged.key_scales[slot], value * paged.value_scales[slot]
            score = float(one @ key) * scale
            if asked.softcap is not None:
                score = asked.softcap * math.tanh(score / asked.softcap)
            if asked.slopes is not None:
                score -= float(asked.slopes[head]) * (position - seen)
            weights.append(math.exp(score))
            values.append(value)
        total = sum(weights)
        if asked.sinks is not None:
            total += math.exp(float(asked.sinks[head]))
        results.append(torch.tensor(weights, dtype=torch.float64) @ torch.stack(values) / total)
    return torch.stack(results)


@pytest.mark.parametrize("stored", [torch.float32, *QUANTISED], ids=str)
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_attention_is_the_definition_for_chunks_and_for_single_tokens(
    stored: torch.dtype, asked: dict[str, Any]
) -> None:
    counts, lengths = [1, 7, 4, 0, 1], [1, 7, 8, 5, 19]
    paged = Paged.random(lengths, kv_heads=2, head_dim=16, block_size=4, stored=stored)
    queries, chosen = torch.randn(13, 6, 16), options(6, **asked)
    starts = torch.tensor([0, *counts]).cumsum(0)
    cache = (paged.keys, paged.values, paged.tables)
    same: dict[str, Any] = {"scale": 0.3, "options": chosen, **paged.scales()}
    got = prefill(queries, *cache, starts, paged.lengths, 7, **same)
    alone = decode(queries[:5], *cache, paged.lengths, **same)
    token = 0
    for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        wanted = by_definition(paged, row, length - 1, queries[row], 0.3, chosen)
        assert_close(alone[row], wanted)
        for position in range(length - count, length):
            wanted = by_definition(paged, row, position, queries[token], 0.3, chosen)
            assert_close(got[token], wanted)
            token += 1


def test_an_empty_row_is_zeros_whatever_its_table_names() -> None:
    paged = Paged.random([0, 3])
    paged.tables[0] = 2**31 - 1
    out = torch.full((2, 2, 64), NAN)
    got = decode(
        torch.randn(2, 2, 64),
        paged.keys,
        paged.values,
        paged.tables,
        paged.lengths,
        scale=1.0,
        out=out,
    )
    assert got is out
    assert not got[0].any()
    assert got[1].isfinite().all()


def test_a_single_token_gets_the_same_bits_alone_and_in_any_company() -> None:
    lengths = torch.randint(1, 60, (12,)).tolist()
    paged = Paged.random(lengths, kv_heads=2, head_dim=16, block_size=4)
    queries = torch.randn(12, 4, 16)

    def attended(which: list[int]) -> Tensor:
        rows = torch.tensor(which)
        table, length = paged.tables[rows], paged.lengths[rows]
        return decode(queries[rows], paged.keys, paged.values, table, length, scale=0.25)

    together = attended(list(range(12)))
    for index in range(12):
        assert torch.equal(attended([index])[0], together[index])
    assert torch.equal(attended([5, 3, 11])[1], together[3])


def test_a_batch_too_large_to_gather_at_once_is_cut_without_a_trace() -> None:
    size, count = 1024, 200  # together more slots than are gathered at once
    keys, values = torch.randn(4, size, 1, 2), torch.randn(4, size, 1, 2)
    queries, tables = torch.randn(count, 1, 2), torch.full((count, 1), 2)
    got = decode(queries, keys, values, tables, torch.full((count,), size), scale=1.0)
    wanted = torch.softmax(queries[:, 0] @ keys[2, :, 0].T, -1) @ values[2, :, 0]
    torch.testing.assert_close(got[:, 0], wanted, rtol=0, atol=1e-5)


def test_rotation_turns_pairs_by_the_tokens_angles_as_complex_numbers_turn() -> None:
    queries, keys = torch.randn(3, 4, 16), torch.randn(3, 2, 16)
    angles = torch.rand(3, 8) * 100
    turns = torch.polar(torch.ones(3, 1, 8), angles[:, None])
    wanted = [torch.complex(heads[..., :8], heads[..., 8:]) * turns for heads in (queries, keys)]
    cache, other = torch.full((2, 4, 2, 16), NAN), torch.full((2, 4, 2, 16), NAN)
    before = keys.clone()
    slots = torch.tensor([6, 1, 3])
    write_kv(queries, keys, keys, cache, other, slots, cos=angles.cos(), sin=angles.sin())
    assert_close(queries, torch.cat((wanted[0].real, wanted[0].imag), -1))
    assert_close(cache.flatten(0, 1)[slots], torch.cat((wanted[1].real, wanted[1].imag), -1))
    assert torch.equal(other.flatten(0, 1)[slots], before)
    assert cache.isnan().sum() == other.isnan().sum() == 5 * 2 * 16


def test_copies_move_whole_blocks_of_every_layer_and_touch_nothing_else() -> None:
    keys, values = torch.randn(3, 10, 4, 2, 8), torch.randn(3, 10, 4, 2, 8)
    expected = keys.clone(), values.clone()
    copy_blocks(keys, values, torch.tensor([1, 1, 7]), torch.tensor([4, 9, 2]))
    for cache, wanted in zip((keys, values), expected, strict=True):
        for source, target in ((1, 4), (1, 9), (7, 2)):
            wanted[:, target] = cache[:, source]
        assert torch.equal(cache, wanted)
