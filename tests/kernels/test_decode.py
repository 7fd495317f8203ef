from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.decode import choose_splits, decode
from kernels.options import Options
from tests.kernels.paged import (
    NAN,
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
    {"window": 1000},
    {"softcap": 5.0},
    {"sinks": True},
    {"slopes": True},
    {"window": 70, "softcap": 2.0, "sinks": True, "slopes": True},
)


@pytest.fixture(autouse=True)
def _same_numbers_every_time() -> None:
    torch.manual_seed(0)


def check(
    paged: Paged,
    group: int,
    dtype: torch.dtype = torch.float32,
    asked: Options | None = None,
    splits: int | None = None,
) -> None:
    _, _, kv_heads, head_dim = paged.keys.shape
    queries = torch.randn(len(paged.lengths), kv_heads * group, head_dim).to(dtype)
    places = (queries, paged.keys, paged.values, paged.tables, paged.lengths)
    same = {"scale": head_dim**-0.5, "options": asked or Options(), **paged.scales()}
    got = decode(*places, splits=splits, **same)
    assert got.dtype == dtype
    assert_close(got, reference.decode(*places, **same))


@pytest.mark.parametrize(
    ("block_size", "head_dim", "kv_heads", "group", "splits"),
    [
        (8, 64, 3, 3, None),
        (16, 64, 2, 1, 3),
        (16, 80, 1, 7, 1),
        (32, 96, 2, 4, 2),
        (64, 128, 2, 2, None),
        (128, 256, 1, 8, 3),
    ],
)
def test_awkward_lengths_equal_the_reference(
    block_size: int, head_dim: int, kv_heads: int, group: int, splits: int | None
) -> None:
    lengths = [1, block_size - 1, block_size, block_size + 1, 0, 197, 2 * block_size]
    paged = Paged.random(lengths, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size)
    check(paged, group, splits=splits)


@pytest.mark.parametrize("stored", QUANTISED, ids=str)
def test_every_number_of_a_byte_comes_out_as_it_is(stored: torch.dtype) -> None:
    numbers = torch.arange(256).to(torch.uint8).view(stored)
    numbers = numbers.float().nan_to_num(0, 0, 0).to(stored)
    values = numbers.view(4, 1, 1, 64).expand(4, 8, 1, 64)
    tables, lengths = torch.arange(4, dtype=torch.int32)[:, None], torch.ones(4, dtype=torch.int32)
    scales, queries = torch.ones(4, 8, 1), torch.randn(4, 1, 64)
    for dtype in FLOATS:
        got = decode(
            queries.to(dtype),
            values,
            values,
            tables,
            lengths,
            scale=1.0,
            key_scales=scales,
            value_scales=scales,
        )
        assert torch.equal(got, numbers.view(4, 1, 64).to(dtype))


def test_more_heads_than_one_program_takes_equal_the_reference() -> None:
    check(Paged.random([5, 0, 70], kv_heads=1), 71, splits=2)


@pytest.mark.parametrize("stored", [None, *QUANTISED], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_pair_of_types_equals_the_reference(
    dtype: torch.dtype, stored: torch.dtype | None
) -> None:
    paged = Paged.random([31, 0, 150], stored=stored or dtype)
    check(paged, 2, dtype, splits=2)


@pytest.mark.parametrize("stored", QUANTISED, ids=str)
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float16, 1e-4), (torch.float16, 1e-2), (torch.bfloat16, 1e-4), (torch.bfloat16, 1e9)],
)
def test_one_byte_values_of_any_size_keep_their_digits(
    stored: torch.dtype, dtype: torch.dtype, size: float
) -> None:
    paged = Paged.random([31, 150], kv_heads=1, head_dim=32, stored=stored, value_size=size)
    queries = torch.randn(2, 3, 32).to(dtype)
    cache = (paged.keys, paged.values, paged.tables, paged.lengths)
    got = decode(queries, *cache, scale=0.2, splits=2, **paged.scales())
    wanted = reference.decode(queries.float(), *cache, scale=0.2, **paged.scales())
    assert_close_for_their_size(got, wanted)


@pytest.mark.parametrize("stored", QUANTISED, ids=str)
@pytest.mark.parametrize("size", [1e-12, 1e6, 1e36])
def test_queries_that_float16_cannot_hold_are_multiplied_with_one_byte_keys(
    stored: torch.dtype, size: float
) -> None:
    paged = Paged.random([31, 150], kv_heads=1, head_dim=32, stored=stored, key_size=1 / size)
    queries = (torch.randn(2, 3, 32) * size).bfloat16()
    cache = (paged.keys, paged.values, paged.tables, paged.lengths)
    got = decode(queries, *cache, scale=0.2, **paged.scales())
    wanted = reference.decode(queries.float(), *cache, scale=0.2, **paged.scales())
    assert_close_for_their_size(got, wanted)


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_broken_head_spoils_itself_alone() -> None:
    paged = Paged.random([40, 9], kv_heads=2, head_dim=32, stored=torch.int8)
    assert paged.value_scales is not None
    paged.value_scales[paged.tables[1, 0], 3, 1] = NAN
    queries = torch.randn(2, 4, 32).bfloat16()
    queries[0, 0, 5] = float("inf")
    cache = (paged.keys, paged.values, paged.tables, paged.lengths)
    got = decode(queries, *cache, scale=0.2, **paged.scales())
    assert got.isnan().any(-1).tolist() == [[True, False, False, False], [False, False, True, True]]


def test_scales_of_zero_are_zeros() -> None:
    paged = Paged.random([40], stored=torch.float8_e4m3fn)
    paged.values.view(torch.uint8)[:] = 0x38
    for scales in (paged.key_scales, paged.value_scales):
        assert scales is not None
        scales[:] = 0
    queries = torch.randn(1, 4, 64).half()
    cache = (paged.keys, paged.values, paged.tables, paged.lengths)
    assert not decode(queries, *cache, scale=0.2, **paged.scales()).any()


@pytest.mark.parametrize("splits", [1, 3])
def test_of_a_table_the_ids_of_its_blocks_are_read_and_no_memory_behind_them(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged = Paged.random([1, 197, 16, 0, 17], kv_heads=1, head_dim=16)
    watched = Watched(paged, monkeypatch)
    places = (torch.randn(5, 2, 16), paged.keys, paged.values, watched.tables, paged.lengths)
    decode(*places, scale=0.2, splits=splits)
    assert watched.entries_read() == [[0], list(range(13)), [0], [], [0, 1]]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_every_option_equals_the_reference(asked: dict[str, float | bool], splits: int) -> None:
    paged = Paged.random([1, 19, 211, 0], head_dim=64)
    check(paged, 3, asked=options(6, **asked), splits=splits)


def test_a_hundred_sequences_of_mixed_length_equal_the_reference() -> None:
    lengths = torch.randint(0, 70, (100,)).tolist()
    check(Paged.random(lengths, kv_heads=1, head_dim=16), 4)


def test_a_long_context_is_split_by_itself_and_put_together_right() -> None:
    check(Paged.random([3000, 5], kv_heads=1), 2)


def test_an_empty_row_is_zeros_whatever_was_in_its_place_and_nothing_is_read_for_it() -> None:
    paged = Paged.random([40])
    nowhere = torch.full((3, 4), 2**31 - 1, dtype=torch.int32)
    nowhere[1] = paged.tables[0, :4]
    lengths = torch.tensor([0, 40, 0], dtype=torch.int32)
    queries = torch.randn(3, 4, 64)
    for splits in (1, 2):
        out = torch.full((3, 4, 64), float("nan"))
        decode(
            queries, paged.keys, paged.values, nowhere, lengths, scale=0.1, out=out, splits=splits
        )
        assert not out[[0, 2]].any()
        assert out[1].isfinite().all()


def test_views_of_larger_tensors_are_read_and_written_in_place() -> None:
    paged = Paged.random([50, 7], kv_heads=2)
    both = torch.stack((paged.keys, paged.values), dim=1)
    fused = torch.randn(2, 4 + 2 + 2, 64)
    wide = torch.zeros(2, 2, 4, 64)
    decode(
        fused[:, :4], both[:, 0], both[:, 1], paged.tables, paged.lengths, scale=0.2, out=wide[:, 1]
    )
    places = (fused[:, :4], paged.keys, paged.values, paged.tables, paged.lengths)
    assert_close(wide[:, 1], reference.decode(*places, scale=0.2))
    assert not wide[:, 0].any()


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("stored", [torch.float16, torch.int8], ids=str)
def test_of_the_cache_written_slots_are_read_and_no_others(
    stored: torch.dtype, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    paged = Paged.random([1, 197, 16, 0, 17], kv_heads=1, head_dim=16, stored=stored)
    watched = Watched(paged, monkeypatch)
    places = (torch.randn(5, 2, 16).half(), paged.keys, paged.values, watched.tables, paged.lengths)
    decode(*places, scale=0.2, splits=splits, **paged.scales())
    for cache in (paged.keys, paged.values, paged.key_scales, paged.value_scales):
        assert cache is None or torch.equal(watched.slots_read(cache), paged.owned())


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("stored", [torch.float32, torch.int8], ids=str)
def test_no_two_tensors_need_have_the_same_strides(stored: torch.dtype, splits: int) -> None:
    paged = Paged.random([50, 7], kv_heads=2, stored=stored)
    queries, out = torch.randn(2, 5, 64)[:, :4], torch.full((2, 3, 4, 96), 7.0)
    rest = (paged.tables, paged.lengths)
    spread = paged.spread()
    decode(
        queries, spread.keys, spread.values, *rest,
        scale=0.2, splits=splits, out=out[:, 1, :, :64], **spread.scales(),
    )  # fmt: skip
    wanted = reference.decode(queries, paged.keys, paged.values, *rest, scale=0.2, **paged.scales())
    assert_close(out[:, 1, :, :64], wanted)
    assert (out[:, ::2] == 7).all()
    assert (out[..., 64:] == 7).all()


@pytest.mark.parametrize("block_size", [1, 12, 24])
def test_blocks_of_no_power_of_two_equal_the_reference(block_size: int) -> None:
    lengths = [1, block_size, block_size + 1, 0, 97]
    check(Paged.random(lengths, head_dim=16, block_size=block_size), 2, splits=2)


def test_blocks_past_65535_at_offsets_past_2_to_the_31_are_read() -> None:
    # 2.1 GiB that nobody touches but for the last block.
    last = 139_999
    cache = torch.empty(last + 1, 16, 1, 1024, dtype=torch.int8)[..., :64]
    assert cache.stride(0) * last > 2**31
    content = torch.randint(-127, 128, (2, 16, 1, 64), dtype=torch.int8)
    scales = torch.empty(last + 1, 16, 1)
    scales[last] = 0.01
    queries, table = torch.randn(1, 2, 64), torch.tensor([[last]], dtype=torch.int32)
    lengths = torch.tensor([13], dtype=torch.int32)
    cache[last] = content[0]
    got = decode(
        queries, cache, cache, table, lengths, scale=0.1, key_scales=scales, value_scales=scales
    )
    small = content[0][None].float() * 0.01
    assert_close(got, reference.decode(queries, small, small, table * 0, lengths, scale=0.1))


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_nothing_outside_the_tables_reaches_the_result(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([8, 16, 32]))
    lengths = data.draw(st.lists(st.integers(0, 5 * block_size), min_size=1, max_size=5))
    needed = sum(-(-length // block_size) for length in lengths)
    order = data.draw(st.permutations(range(1, needed + 4)))
    stored = data.draw(st.sampled_from([torch.float32, torch.int8, torch.float8_e4m3fn]))
    window = data.draw(st.none() | st.integers(1, 3 * block_size))
    splits = data.draw(st.sampled_from([None, 1, 2, 5]))
    paged = Paged.random(
        lengths, kv_heads=1, head_dim=16, block_size=block_size, stored=stored, order=order
    )
    check(paged, 2, asked=Options(window=window), splits=splits)


def test_a_scale_that_would_turn_scores_around_is_refused() -> None:
    paged = Paged.random([9])
    places = (torch.randn(1, 4, 64), paged.keys, paged.values, paged.tables, paged.lengths)
    with pytest.raises(ValueError, match=r"scale is -1\.0 and softcap None: both must be above 0"):
        decode(*places, scale=-1.0)
    with pytest.raises(ValueError, match="softcap 0"):
        decode(*places, scale=1.0, options=Options(softcap=0.0))


def test_tensors_that_do_not_fit_are_refused() -> None:
    paged = Paged.random([9])
    rest = (paged.tables, paged.lengths)
    queries = torch.randn(1, 4, 64)
    with pytest.raises(ValueError, match="5 heads of 64 cannot read 2 KV heads"):
        decode(torch.randn(1, 5, 64), paged.keys, paged.values, *rest, scale=1.0)
    with pytest.raises(ValueError, match="both must be the same"):
        decode(queries, paged.keys, paged.values.half(), *rest, scale=1.0)
    with pytest.raises(ValueError, match="side by side"):
        decode(queries[..., ::2], paged.keys[..., ::2], paged.values[..., ::2], *rest, scale=1.0)


def test_tables_lengths_and_results_that_do_not_lie_side_by_side_are_refused() -> None:
    paged = Paged.random([40, 9])
    queries = torch.randn(2, 4, 64)
    tables = paged.tables.repeat_interleave(2, 1)[:, ::2]
    lengths = paged.lengths.repeat_interleave(2)[::2]
    cache = (paged.keys, paged.values)
    with pytest.raises(ValueError, match="a row's ids must lie side by side"):
        decode(queries, *cache, tables, paged.lengths, scale=1.0)
    with pytest.raises(ValueError, match="lengths have a stride of 2"):
        decode(queries, *cache, paged.tables, lengths, scale=1.0)
    for out in (queries.new_empty(2, 4, 128)[..., ::2], queries.new_empty(1, 4, 64)):
        with pytest.raises(ValueError, match="the elements of a head side by side"):
            decode(queries, *cache, paged.tables, paged.lengths, scale=1.0, out=out)


def test_scales_that_do_not_fit_the_cache_are_refused() -> None:
    paged = Paged.random([9], stored=torch.int8)
    fit = paged.value_scales
    assert fit is not None
    blocks, size, heads = fit.shape
    rest = (paged.tables, paged.lengths)

    def attend(cache: Tensor, keys: Tensor | None, values: Tensor | None) -> None:
        queries = torch.randn(1, 4, 64)
        decode(queries, cache, cache, *rest, scale=1.0, key_scales=keys, value_scales=values)

    attend(paged.keys, fit, fit)
    with pytest.raises(ValueError, match=r"int8 needs key_scales and .*, but key_scales is None"):
        attend(paged.keys, None, None)
    with pytest.raises(ValueError, match="but value_scales is None"):
        attend(paged.keys, fit, None)
    with pytest.raises(ValueError, match=r"float16 takes no key_scales .*, but value_scales is \["):
        attend(paged.keys.half(), None, fit)
    with pytest.raises(ValueError, match=r"value_scales is torch.float16 on cpu: .*float32 on cpu"):
        attend(paged.keys, fit, fit.half())
    with pytest.raises(ValueError, match=r"key_scales is torch.float32 on meta"):
        attend(paged.keys, fit.to("meta"), fit)
    for wrong in (fit[:-1], fit[..., :1], fit[..., None], fit.flatten(0, 1)):
        with pytest.raises(ValueError, match=rf"it must be \[{blocks}, {size}, {heads}\]"):
            attend(paged.keys, fit, wrong)
    with pytest.raises(ValueError, match=r"strides .* side by side"):
        attend(paged.keys, fit, fit.permute(2, 0, 1).contiguous().permute(1, 2, 0))


@pytest.mark.parametrize("slots", [108, 132, 304])
def test_a_device_is_filled_by_few_sequences_and_not_flooded_by_many(slots: int) -> None:
    assert choose_splits(8, 200, slots) == 1
    assert choose_splits(8, 16_384, slots) * 8 >= slots * 0.75
    for units in (1, 8, 64, 512, 4096):
        for longest in (1, 300, 2048, 131_072):
            splits = choose_splits(units, longest, slots)
            assert 1 <= splits <= 64
            assert splits == 1 or splits * units <= 8 * slots
