from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import reference
from kernels.swap import gather_blocks, scatter_blocks
from tests.kernels.test_copy_blocks import TYPES, huge, random_bits, same_bits


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("block_size", "kv_heads", "head_dim"),
    [(8, 3, 80), (1, 1, 4), (16, 8, 128), (7, 5, 96), (32, 2, 64), (64, 1, 256), (128, 1, 80)],
)
def test_blocks_go_out_and_come_back_to_other_places_bit_for_bit(
    block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, ids: torch.dtype
) -> None:
    inner = block_size, kv_heads, head_dim
    cache = random_bits((3, 9, *inner), dtype)
    before = cache.clone()
    buffer, expected = (random_bits((3, 4, *inner), dtype) for _ in range(2))
    blocks, places = torch.tensor([[8, 2], [1, 7], [8, 0], [5, 8]], dtype=ids).unbind(1)
    gather_blocks(cache, blocks, buffer)
    reference.gather_blocks(cache, blocks, expected)
    assert same_bits(buffer, expected)
    assert same_bits(cache, before)
    scatter_blocks(buffer, places, cache)
    reference.scatter_blocks(expected, places, before)
    assert same_bits(cache, before)


@pytest.mark.parametrize("count", [1, 7, 8, 9, 97, 100])
def test_blocks_are_as_many_as_there_are(count: int) -> None:
    cache = random_bits((2, 100, 8, 1, 4), torch.float16)
    blocks, buffer = torch.randperm(100)[:count], random_bits((2, count, 8, 1, 4), torch.float16)
    gather_blocks(cache, blocks, buffer)
    assert same_bits(buffer, cache[:, blocks])
    other, expected = cache.flip(1).contiguous(), cache.flip(1).contiguous()
    scatter_blocks(buffer, blocks, other)
    reference.scatter_blocks(buffer, blocks, expected)
    assert same_bits(other, expected)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_only_the_named_blocks_change(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 7), "blocks")
    places = data.draw(st.lists(st.integers(0, count - 1), unique=True), "places")
    cache = random_bits((2, count, 3, 1, 4), torch.float16)
    expected = cache.clone()
    buffer = random_bits((2, len(places), 3, 1, 4), torch.float16)
    ids = torch.tensor(places, dtype=torch.int64)
    scatter_blocks(buffer, ids, cache)
    for index, place in enumerate(places):
        expected[:, place] = buffer[:, index]
    assert same_bits(cache, expected)


def test_scales_are_swapped_by_the_same_calls() -> None:
    scales = random_bits((2, 6, 5, 3), torch.float32)
    buffer = torch.empty(2, 2, 5, 3)
    gather_blocks(scales, torch.tensor([5, 2]), buffer)
    assert same_bits(buffer, scales[:, [5, 2]])


def test_blocks_past_65535_and_offsets_past_two_to_the_31_words_are_reached(tmp_path: Path) -> None:
    cache = huge(tmp_path / "cache")
    cache[:, 89_998] = 5
    buffer = torch.zeros(3, 2, 16, 8, 256, dtype=torch.int8)
    gather_blocks(cache, torch.tensor([89_998, 89_998]), buffer)
    assert (buffer == 5).all()
    scatter_blocks(buffer, torch.tensor([89_999, 2]), cache)
    assert (cache[:, 89_999] == 5).all()
    assert (cache[:, 2] == 5).all()


def test_no_blocks_are_no_launch() -> None:
    cache = torch.zeros(2, 3, 4, 1, 8)
    none = torch.tensor([], dtype=torch.int64)
    gather_blocks(cache, none, torch.zeros(2, 0, 4, 1, 8))
    scatter_blocks(torch.zeros(2, 0, 4, 1, 8), none, cache)
    assert not cache.any()


def test_a_buffer_of_another_size_or_type_is_refused_with_what_would_fit() -> None:
    cache = torch.zeros(2, 3, 4, 1, 8)
    with pytest.raises(ValueError, match=r"float32 \[2, 1, 4, 1, 8\]"):
        gather_blocks(cache, torch.tensor([1]), torch.zeros(2, 2, 4, 1, 8))
    with pytest.raises(ValueError, match=r"a buffer of torch\.float16"):
        scatter_blocks(torch.zeros(2, 1, 4, 1, 8).half(), torch.tensor([1]), cache)
