from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.decode import decode
from kernels.options import Options
from kernels.prefill import prefill
from tests.kernels.paged import (
    QUANTISED,
    Paged,
    Watched,
    assert_close,
    assert_close_for_their_size,
    options,
)

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ASKED = (
    {"window": 1},
    {"window": 20},
    {"window": 90},
    {"window": 1000},
    {"softcap": 5.0},
    {"sinks": True},
    {"slopes": True},
    {"window": 70, "softcap": 2.0, "sinks": True, "slopes": True},
)


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def starts_of(counts: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(counts)], dtype=torch.int32)


def check(
    paged: Paged,
    counts: list[int],
    group: int = 2,
    dtype: torch.dtype = torch.float32,
    asked: Options | None = None,
) -> None:
    _, _, kv_heads, head_dim = paged.keys.shape
    queries = torch.randn(sum(counts), kv_heads * group, head_dim).to(dtype)
    places = (queries, paged.keys, paged.values, paged.tables, starts_of(counts), paged.lengths)
    same = {"scale": head_dim**-0.5, "options": asked or Options(), **paged.scales()}
    got = prefill(*places, max(counts), **same)
    assert got.dtype == dtype
    assert_close(got, reference.prefill(*places, max(counts), **same))


@pytest.mark.parametrize(
    ("block_size", "head_dim", "kv_heads", "group"),
    [
        (8, 64, 3, 3),
        (16, 80, 1, 7),
        (32, 96, 2, 1),
        (64, 128, 1, 4),
        (128, 256, 1, 2),
    ],
)
def test_awkward_chunks_over_awkward_contexts_equal_the_reference(
    block_size: int, head_dim: int, kv_heads: int, group: int
) -> None:
    counts = [1, block_size - 1, 0, 1, block_size + 1, 37, 5]
    lengths = [1, block_size - 1, block_size, 131, block_size + 1, 101, block_size * 2]
    paged = Paged.random(lengths, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size)
    check(paged, counts, group)


def test_more_heads_than_a_usual_program_has_rows_equal_the_reference() -> None:
    check(Paged.random([5, 0, 20], kv_heads=1), [2, 0, 1], 71)


@pytest.mark.parametrize("stored", [None, *QUANTISED], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_pair_of_types_equals_the_reference(
    dtype: torch.dtype, stored: torch.dtype | None
) -> None:
    check(Paged.random([31, 9, 150], stored=stored or dtype), [31, 0, 17], 2, dtype)


@pytest.mark.parametrize("stored", QUANTISED, ids=str)
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float16, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 1e-4), (torch.bfloat16, 1e9)],
)
def test_one_byte_values_of_any_size_keep_their_digits(
    stored: torch.dtype, dtype: torch.dtype, size: float
) -> None:
    paged = Paged.random([31, 150], kv_heads=1, head_dim=32, stored=stored, value_size=size)
    queries = torch.randn(20, 2, 32).to(dtype)
    cache = (paged.keys, paged.values, paged.tables, starts_of([3, 17]), paged.lengths, 17)
    got = prefill(queries, *cache, scale=0.2, **paged.scales())
    wanted = reference.prefill(queries.float(), *cache, scale=0.2, **paged.scales())
    assert_close_for_their_size(got, wanted)


@pytest.mark.parametrize("stored", QUANTISED, ids=str)
@pytest.mark.parametrize("size", [1e-12, 1e6, 1e36])
def test_queries_that_float16_cannot_hold_are_multiplied_with_one_byte_keys(
    stored: torch.dtype, size: float
) -> None:
    paged = Paged.random([31, 150], kv_heads=1, head_dim=32, stored=stored, key_size=1 / size)
    queries = (torch.randn(20, 2, 32) * size).bfloat16()
    cache = (paged.keys, paged.values, paged.tables, starts_of([3, 17]), paged.lengths, 17)
    got = prefill(queries, *cache, scale=0.2, **paged.scales())
    wanted = reference.prefill(queries.float(), *cache, scale=0.2, **paged.scales())
    assert_close_for_their_size(got, wanted)


def test_of_a_table_the_ids_of_its_blocks_are_read_and_no_memory_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paged = Paged.random([1, 197, 16, 9, 17], kv_heads=1, head_dim=16, stored=torch.float16)
    watched = Watched(paged, monkeypatch)
    cache = (paged.keys, paged.values, watched.tables, starts_of([1, 40, 16, 0, 2]), paged.lengths)
    prefill(torch.randn(59, 2, 16).half(), *cache, 40, scale=0.2)
    assert watched.entries_read() == [[0], list(range(13)), [0], [], [0, 1]]


@pytest.mark.parametrize("counts", [[1, 2, 3], [1, 19, 150]], ids=["short", "long"])
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_every_option_equals_the_reference(
    asked: dict[str, float | bool], counts: list[int]
) -> None:
    paged = Paged.random([1, 19, 211], kv_heads=1)
    check(paged, counts, 3, asked=options(3, **asked))


def test_a_hundred_sequences_of_mixed_length_equal_the_reference() -> None:
    lengths = torch.randint(1, 70, (100,))
    counts = (torch.rand(100) ** 3 * (lengths + 1)).int().tolist()
    check(Paged.random(lengths.tolist(), kv_heads=1, head_dim=16), counts, 4)


def test_more_sequences_than_are_searched_together_find_their_own() -> None:
    lengths, counts = [1] * 270 + [3, 9], [1, *[0] * 268, 1, 2, 5]
    check(Paged.random(lengths, kv_heads=1, head_dim=16, block_size=8), counts)


def test_a_prompt_in_chunks_equals_the_prompt_at_once() -> None:
    paged = Paged.random([113])
    queries = torch.randn(113, 4, 64)
    cache, table = (paged.keys, paged.values), paged.tables
    whole = prefill(queries, *cache, table, starts_of([113]), paged.lengths, 113, scale=0.1)
    for first, end in ((0, 50), (50, 51), (51, 113)):
        here, seen = starts_of([end - first]), torch.tensor([end], dtype=torch.int32)
        part = prefill(queries[first:end], *cache, table, here, seen, end - first, scale=0.1)
        assert_close(part, whole[first:end])


def test_chunks_of_one_token_equal_decode() -> None:
    paged = Paged.random([1, 40, 77])
    queries = torch.randn(3, 4, 64)
    cache = (queries, paged.keys, paged.values, paged.tables)
    got = prefill(*cache, starts_of([1, 1, 1]), paged.lengths, 1, scale=0.1)
    assert_close(got, decode(*cache, paged.lengths, scale=0.1))


def test_views_of_larger_tensors_are_read_and_tokens_past_the_last_row_are_left_alone() -> None:
    paged = Paged.random([50, 7])
    both = torch.stack((paged.keys, paged.values), dim=1)
    fused, wide = torch.randn(12, 8, 64), torch.full((12, 2, 4, 64), 7.0)
    starts = starts_of([3, 4])
    rest = (paged.tables, starts, paged.lengths, 4)
    prefill(fused[:, :4], both[:, 0], both[:, 1], *rest, scale=0.2, out=wide[:, 1])
    wanted = reference.prefill(fused[:7, :4], paged.keys, paged.values, *rest, scale=0.2)
    assert_close(wide[:7, 1], wanted)
    assert (wide[7:] == 7).all()
    assert (wide[:, 0] == 7).all()


@pytest.mark.parametrize("stored", [torch.float16, torch.int8], ids=str)
def test_of_the_cache_written_slots_are_read_and_no_others(
    stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged = Paged.random([1, 197, 16, 17], kv_heads=1, head_dim=16, stored=stored)
    watched = Watched(paged, monkeypatch)
    cache = (paged.keys, paged.values, watched.tables, starts_of([1, 40, 16, 2]), paged.lengths)
    prefill(torch.randn(59, 2, 16).half(), *cache, 40, scale=0.2, **paged.scales())
    for tensor in (paged.keys, paged.values, paged.key_scales, paged.value_scales):
        assert tensor is None or torch.equal(watched.slots_read(tensor), paged.owned())


@pytest.mark.parametrize("stored", [torch.float32, torch.int8], ids=str)
def test_no_two_tensors_need_have_the_same_strides(stored: torch.dtype) -> None:
    paged = Paged.random([50, 7], stored=stored)
    queries, out = torch.randn(7, 5, 64)[:, :4], torch.full((7, 3, 4, 96), 7.0)
    rest = (paged.tables, starts_of([3, 4]), paged.lengths, 4)
    spread = paged.spread()
    prefill(
        queries, spread.keys, spread.values, *rest,
        scale=0.2, out=out[:, 1, :, :64], **spread.scales(),
    )  # fmt: skip
    wanted = reference.prefill(
        queries, paged.keys, paged.values, *rest, scale=0.2, **paged.scales()
    )
    assert_close(out[:, 1, :, :64], wanted)
    assert (out[:, ::2] == 7).all()
    assert (out[..., 64:] == 7).all()


@pytest.mark.parametrize("block_size", [1, 12, 24])
def test_blocks_of_no_power_of_two_equal_the_reference(block_size: int) -> None:
    lengths = [1, block_size, block_size + 1, 97]
    counts = [1, block_size, 1, 41]
    check(Paged.random(lengths, head_dim=16, block_size=block_size), counts)


def test_blocks_past_65535_at_offsets_past_2_to_the_31_are_read() -> None:
    # 2.1 GiB that nobody touches but for the last two blocks: one that all queries see, one with their own.
    last = 139_999
    cache = torch.empty(last + 1, 16, 1, 1024, dtype=torch.int8)[..., :64]
    assert cache.stride(0) * (last - 1) > 2**31
    content = torch.randint(-127, 128, (2, 16, 1, 64), dtype=torch.int8)
    cache[last - 1 :] = content
    scales = torch.empty(last + 1, 16, 1)
    scales[last - 1 :] = 0.01
    queries, table = torch.randn(5, 2, 64), torch.tensor([[1, 0]], dtype=torch.int32)
    rest = (starts_of([5]), torch.tensor([16 + 5], dtype=torch.int32), 5)
    far = (cache, cache, table + last - 1)
    got = prefill(queries, *far, *rest, scale=0.1, key_scales=scales, value_scales=scales)
    small = content.float() * 0.01
    assert_close(got, reference.prefill(queries, small, small, table, *rest, scale=0.1))


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_nothing_outside_the_tables_reaches_the_result(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([8, 16, 32]))
    lengths = data.draw(st.lists(st.integers(1, 5 * block_size), min_size=1, max_size=5))
    counts = [data.draw(st.integers(0, length)) for length in lengths]
    needed = sum(-(-length // block_size) for length in lengths)
    order = data.draw(st.permutations(range(1, needed + 4)))
    stored = data.draw(st.sampled_from([torch.float32, torch.int8, torch.float8_e4m3fn]))
    window = data.draw(st.none() | st.integers(1, 3 * block_size))
    paged = Paged.random(
        lengths, kv_heads=1, head_dim=16, block_size=block_size, stored=stored, order=order
    )
    check(paged, counts, asked=Options(window=window))
