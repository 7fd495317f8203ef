from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernels import reference
from kernels.write_kv import write_kv

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
QUANTISED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
# One step of each type at 1. Triton's interpreter cuts bfloat16 off where devices round.
STEP = {torch.float32: 2e-7, torch.float16: 2**-10, torch.bfloat16: 2**-7}


@dataclass(slots=True)
class Step:
    """Tokens of one step and a layer's cache."""

    queries: Tensor
    new_keys: Tensor
    new_values: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor
    scales: tuple[Tensor, Tensor] | None
    cos: Tensor
    sin: Tensor

    @classmethod
    def random(
        cls,
        slots: list[int],
        *,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 64,
        blocks: int = 7,
        block_size: int = 8,
        dtype: torch.dtype = torch.float32,
        cache: torch.dtype | None = None,
    ) -> Step:
        """Random tokens, views of one fused tensor, before a cache of poison."""
        tokens = len(slots)
        fused = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
        queries, keys, values = torch.split(fused, [heads, kv_heads, kv_heads], dim=1)
        angles = torch.rand(tokens, head_dim // 2) * 100
        size = blocks, block_size, kv_heads
        scales = None
        if cache in QUANTISED:
            scales = torch.full(size, float("nan")), torch.full(size, float("nan"))
        return cls(
            queries,
            keys,
            values,
            poison((*size, head_dim), cache or dtype),
            poison((*size, head_dim), cache or dtype),
            torch.tensor(slots, dtype=torch.int64),
            scales,
            angles.cos(),
            angles.sin(),
        )

    def copy(self) -> Step:
        scales = (self.scales[0].clone(), self.scales[1].clone()) if self.scales else None
        return Step(
            self.queries.clone(),
            self.new_keys.clone(),
            self.new_values.clone(),
            self.keys.clone(),
            self.values.clone(),
            self.slots,
            scales,
            self.cos,
            self.sin,
        )

    def write(self, *, turned: bool = True, by_kernel: bool = True) -> None:
        (write_kv if by_kernel else reference.write_kv)(
            self.queries,
            self.new_keys,
            self.new_values,
            self.keys,
            self.values,
            self.slots,
            cos=self.cos if turned else None,
            sin=self.sin if turned else None,
            key_scales=self.scales[0] if self.scales else None,
            value_scales=self.scales[1] if self.scales else None,
        )


def poison(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What must not be touched: NaN, or a pattern where there is none."""
    if dtype.is_floating_point:
        return torch.full(shape, float("nan"), dtype=dtype)
    return torch.full(shape, -77, dtype=dtype)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def written(cache: Tensor, slots: Tensor) -> Tensor:
    return cache.flatten(0, 1)[slots[slots >= 0]]


def untouched(cache: Tensor, before: Tensor, slots: Tensor) -> bool:
    """Whether every slot but `slots` has the bits it had."""
    other = torch.ones(cache.shape[0] * cache.shape[1], dtype=torch.bool)
    other[slots[slots >= 0]] = False
    return same_bits(cache.flatten(0, 1)[other], before.flatten(0, 1)[other])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [
        (4, 2, 64, 8),
        (3, 3, 80, 16),
        (9, 1, 96, 7),
        (12, 2, 128, 128),
        (2, 1, 256, 32),
        (6, 2, 40, 1),
    ],
)
def test_keys_and_values_land_in_their_slots_and_queries_turn_like_keys(
    heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(head_dim)
    slots = [5 * block_size + block_size // 2, 0, -1, 3 * block_size + block_size - 1, block_size]
    step = Step.random(
        slots,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    before, expected = step.copy(), step.copy()
    step.write()
    expected.write(by_kernel=False)
    rtol, atol = STEP[dtype], STEP[dtype] * 4
    torch.testing.assert_close(step.queries, expected.queries, rtol=rtol, atol=atol)
    torch.testing.assert_close(
        written(step.keys, step.slots), written(expected.keys, step.slots), rtol=rtol, atol=atol
    )
    assert same_bits(written(step.values, step.slots), step.new_values[[0, 1, 3, 4]])
    assert same_bits(step.queries[2], before.queries[2])  # a row of padding
    assert untouched(step.keys, before.keys, step.slots)
    assert untouched(step.values, before.values, step.slots)
    assert same_bits(step.new_keys, before.new_keys)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_without_angles_every_bit_is_kept(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    step = Step.random([50, 1, 2, -1, 8], heads=5, kv_heads=1, head_dim=80, dtype=dtype)
    before = step.copy()
    step.write(turned=False)
    assert same_bits(step.queries, before.queries)
    assert same_bits(written(step.keys, step.slots), before.new_keys[[0, 1, 2, 4]])
    assert same_bits(written(step.values, step.slots), before.new_values[[0, 1, 2, 4]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache", QUANTISED, ids=str)
def test_a_quantised_cache_holds_what_the_reference_quantises_each_head_to(
    cache: torch.dtype, dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    step = Step.random([50, 1, -1, 8, 20], head_dim=80, dtype=dtype, cache=cache)
    step.new_values[1] = 0
    step.new_values[3] *= 1e4
    before, expected = step.copy(), step.copy()
    step.write(turned=False)
    expected.write(turned=False, by_kernel=False)
    assert step.scales is not None
    assert expected.scales is not None
    assert before.scales is not None
    for scale, wanted, old in zip(step.scales, expected.scales, before.scales, strict=True):
        torch.testing.assert_close(
            written(scale, step.slots), written(wanted, step.slots), rtol=1e-6, atol=0
        )
        assert untouched(scale, old, step.slots)
    for stored, wanted, old in (
        (step.keys, expected.keys, before.keys),
        (step.values, expected.values, before.values),
    ):
        assert torch.equal(written(stored, step.slots).float(), written(wanted, step.slots).float())
        assert untouched(stored, old, step.slots)


@pytest.mark.parametrize(
    ("cache", "worst", "normal"),
    [
        (torch.int8, 1 / 254, 1.0),
        (torch.float8_e4m3fn, 1 / 16, 2**-6 / 448),
        (torch.float8_e5m2, 1 / 8, 2**-14 / 57344),
    ],
    ids=str,
)
def test_what_a_quantised_cache_gives_back_is_near_what_went_in(
    cache: torch.dtype, worst: float, normal: float
) -> None:
    torch.manual_seed(4)
    step = Step.random(list(range(8)), head_dim=256, cache=cache)
    step.write(turned=False)
    assert step.scales is not None
    stored = written(step.values, step.slots).float()
    back = stored * written(step.scales[1], step.slots)[..., None]
    size = step.new_values.abs()
    # An integer's error is a share of the head's largest value, a float's of the value itself; below its
    # normal numbers, of the largest again.
    limit = torch.maximum(size, size.amax(-1, keepdim=True) * normal)
    assert ((back - step.new_values).abs() <= limit * worst * 1.0001).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy, in the interpreter
@pytest.mark.parametrize("cache", QUANTISED, ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", [17, 50])
def test_a_number_that_no_scale_can_hold_stays_visible(
    cache: torch.dtype, bad: float, where: int
) -> None:
    step = Step.random([3, 9], cache=cache)
    step.new_keys[1, 0, where] = bad
    step.write(turned=False)
    assert step.scales is not None
    scales = written(step.scales[0], step.slots)
    assert scales.isnan().tolist() == [[False, False], [True, False]]


def test_tokens_may_lie_as_far_apart_as_they_like_in_each_tensor() -> None:
    torch.manual_seed(5)
    step = Step.random([3, -1, 9, 50], head_dim=64)
    wide = [torch.randn(4, width, 64) for width in (9, 7, 5)]
    step.queries, step.new_keys, step.new_values = wide[0][:, :4], wide[1][:, 1:3], wide[2][:, 2:4]
    around, expected = [each.clone() for each in wide], step.copy()
    step.write()
    expected.write(by_kernel=False)
    torch.testing.assert_close(step.queries, expected.queries, rtol=1e-6, atol=1e-6)
    assert torch.equal(wide[0][:, 4:], around[0][:, 4:])
    for cache, wanted in ((step.keys, expected.keys), (step.values, expected.values)):
        torch.testing.assert_close(cache, wanted, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_any_number_of_tokens_fills_the_slots_of_any_block(block_size: int) -> None:
    torch.manual_seed(block_size)
    for count in (1, block_size - 1, block_size, block_size + 1, 97, 100):
        slots = torch.randperm(2 * max(block_size, 64))[:count].tolist()
        blocks = 2 * max(block_size, 64) // block_size
        step = Step.random(slots, heads=2, kv_heads=1, blocks=blocks, block_size=block_size)
        before, expected = step.copy(), step.copy()
        step.write()
        expected.write(by_kernel=False)
        torch.testing.assert_close(
            written(step.keys, step.slots), written(expected.keys, step.slots), rtol=1e-6, atol=1e-6
        )
        assert untouched(step.values, before.values, step.slots)


def test_slots_past_two_to_the_31_elements_are_reached() -> None:
    # Never touched but in three slots: the system gives memory to those pages only.
    keys, values = (torch.empty(70_000, 16, 16, 256, dtype=torch.int8) for _ in range(2))
    scales = [torch.empty(70_000, 16, 16) for _ in range(2)]
    assert keys.numel() > 2**32
    slots = torch.tensor([69_999 * 16 + 15, 65_536 * 16, 2**31 // (16 * 256)])
    new = torch.randn(3, 16, 256)
    write_kv(new, new, new, keys, values, slots, key_scales=scales[0], value_scales=scales[1])
    stored = values.flatten(0, 1)[slots].float() * scales[1].flatten(0, 1)[slots][..., None]
    torch.testing.assert_close(stored, new, rtol=0, atol=0.03)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_whatever_the_slots_nothing_else_changes(data: st.DataObject) -> None:
    block_size = data.draw(st.sampled_from([1, 3, 8, 16]), "block_size")
    blocks = data.draw(st.integers(1, 6), "blocks")
    places = st.integers(0, blocks * block_size - 1)
    chosen = data.draw(st.lists(places, unique=True, max_size=6), "slots")
    padded = data.draw(st.lists(st.just(-1), max_size=2), "padding")
    slots = data.draw(st.permutations([*chosen, *padded]), "order")
    cache = data.draw(st.sampled_from([*FLOATS, *QUANTISED]), "cache")
    torch.manual_seed(len(slots))
    step = Step.random(
        slots,
        heads=3,
        kv_heads=1,
        head_dim=8,
        blocks=blocks,
        block_size=block_size,
        cache=cache,
    )
    before, expected = step.copy(), step.copy()
    step.write(turned=False)
    expected.write(turned=False, by_kernel=False)
    assert untouched(step.keys, before.keys, step.slots)
    assert untouched(step.values, before.values, step.slots)
    assert same_bits(step.queries, before.queries)
    torch.testing.assert_close(
        written(step.values, step.slots).float(),
        written(expected.values, step.slots).float(),
        rtol=STEP.get(cache, 0),
        atol=0,
    )


def test_no_tokens_are_no_launch() -> None:
    step = Step.random([])
    before = step.copy()
    step.write()
    assert same_bits(step.keys, before.keys)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"new_keys": torch.zeros(2, 2, 32)},
            r"new_keys is torch.float32 \[2, 2, 32\]; it must be \[2, 2, 64\]",
        ),
        ({"slots": torch.tensor([1, 2], dtype=torch.int32)}, "slots is torch.int32"),
        ({"cos": torch.zeros(2, 32)}, "cos and sin come together"),
        ({"cos": torch.zeros(2, 64), "sin": torch.zeros(2, 64)}, "cos is torch.float32"),
        ({"queries": torch.zeros(2, 64, 4).transpose(1, 2)}, "must be contiguous"),
        ({"queries": torch.zeros(2, 3, 64)}, "3 query heads"),
        ({"keys": torch.zeros(4, 8, 2, 64, dtype=torch.int8)}, "it must be torch.int8"),
        ({"key_scales": torch.zeros(4, 8, 2)}, "takes no key_scales"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_reason(change: dict[str, Tensor], says: str) -> None:
    given = {
        "queries": torch.zeros(2, 4, 64),
        "new_keys": torch.zeros(2, 2, 64),
        "new_values": torch.zeros(2, 2, 64),
        "keys": torch.zeros(4, 8, 2, 64),
        "values": torch.zeros(4, 8, 2, 64),
        "slots": torch.tensor([1, 2]),
    } | change
    with pytest.raises(ValueError, match=says):
        write_kv(**given)
