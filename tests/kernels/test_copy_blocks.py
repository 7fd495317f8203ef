from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor.kv import copy_ids
from kernels import reference
from kernels.copy_blocks import CHUNK, copy_blocks
from memd.core import Memory
from tests.memd.driver import KEY, Driver
from tests.memd.fuzz import queue_something
from tests.memd.naive import Naive
from wire.memory import Copy, Granted, Reply, Request

TYPES = (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn)


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Any bits at all, NaN among them."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).view(shape)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("block_size", "kv_heads", "head_dim"),
    [(8, 3, 80), (1, 1, 4), (16, 8, 128), (7, 5, 96), (32, 2, 64), (64, 1, 256), (128, 1, 80)],
)
def test_every_byte_of_each_block_is_copied_and_no_other_changes(
    block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype, ids: torch.dtype
) -> None:
    shape = (3, 9, block_size, kv_heads, head_dim)
    keys, values = random_bits(shape, dtype), random_bits(shape, dtype)
    expected = keys.clone(), values.clone()
    sources, targets = torch.tensor([8, 2, 2, 5], dtype=ids), torch.tensor([1, 7, 3, 4], dtype=ids)
    copy_blocks(keys, values, sources, targets)
    reference.copy_blocks(*expected, sources, targets)
    assert same_bits(keys, expected[0])
    assert same_bits(values, expected[1])


@pytest.mark.parametrize("size", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_scales_go_with_their_blocks_whatever_their_number(size: int) -> None:
    keys, values = (random_bits((2, 5, size, 1, 8), torch.int8) for _ in range(2))
    scales = [random_bits((2, 5, size, 1), torch.float32) for _ in range(2)]
    ids = torch.tensor([4, 0]), torch.tensor([2, 3])
    expected = [tensor.clone() for tensor in (keys, values, *scales)]
    copy_blocks(keys, values, *ids, key_scales=scales[0], value_scales=scales[1])
    reference.copy_blocks(
        expected[0], expected[1], *ids, key_scales=expected[2], value_scales=expected[3]
    )
    for tensor, wanted in zip((keys, values, *scales), expected, strict=True):
        assert same_bits(tensor, wanted)


def huge(file: Path) -> Tensor:
    """[3, 90,000, 16, 8, 256] int8: more than 2^31 words of four bytes, in a file that takes no more than
    the pages that are written."""
    shape = (3, 90_000, 16, 8, 256)
    cache = torch.from_file(str(file), True, torch.Size(shape).numel(), dtype=torch.int8)
    assert cache.numel() > 2**33
    return cache.view(shape)


def test_blocks_past_65535_and_offsets_past_two_to_the_31_words_are_reached(tmp_path: Path) -> None:
    keys, values = (huge(tmp_path / name) for name in ("keys", "values"))
    keys[:, 89_998], values[:, 89_998] = 5, 7
    keys[:, 3], values[:, 3] = 11, 13
    copy_blocks(keys, values, torch.tensor([89_998, 3]), torch.tensor([2, 89_999]))
    assert (keys[:, 2] == 5).all()
    assert (values[:, 2] == 7).all()
    assert (keys[:, 89_999] == 11).all()
    assert (values[:, 89_999] == 13).all()


@pytest.mark.parametrize("count", [1, 7, 8, 9, 97, 100])
def test_ids_are_as_many_as_there_are_and_may_lie_apart_differently(count: int) -> None:
    keys, values = (random_bits((1, 201, 8, 1, 4), torch.float16) for _ in range(2))
    expected = keys.clone(), values.clone()
    ids = torch.randperm(200)[: 2 * count] + 1
    apart, aside = torch.zeros(count, 3, dtype=torch.int64), ids[count:].clone()
    apart[:, 1] = ids[:count]
    for sources, targets in ((apart[:, 1], aside), (aside, apart[:, 1])):
        copy_blocks(keys, values, sources, targets)
        reference.copy_blocks(*expected, sources, targets)
        assert same_bits(keys, expected[0])
        assert same_bits(values, expected[1])
        keys[:] = expected[0][:] = random_bits(tuple(keys.shape), torch.float16)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_copies_that_obey_the_rule_are_the_same_in_any_order(data: st.DataObject) -> None:
    blocks = data.draw(st.integers(2, 8), "blocks")
    order = data.draw(st.permutations(range(blocks)), "order")
    cut = data.draw(st.integers(1, blocks - 1), "cut")
    targets = order[cut:]
    sources = data.draw(
        st.lists(st.sampled_from(order[:cut]), min_size=len(targets), max_size=len(targets))
    )
    keys, values = (random_bits((2, blocks, 3, 1, 4), torch.float32) for _ in range(2))
    expected = keys.clone(), values.clone()
    ids = torch.tensor(sources), torch.tensor(targets)
    copy_blocks(keys, values, *ids)
    for index in reversed(range(len(targets))):
        reference.copy_blocks(*expected, *(side[index : index + 1] for side in ids))
    assert same_bits(keys, expected[0])
    assert same_bits(values, expected[1])


class Recorder(Memory):
    """memd's core that keeps the copies it ordered, step by step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.ordered: list[list[Copy]] = []

    def handle(self, now: float, request: Request, *rest: Any, **named: Any) -> Reply:
        reply = super().handle(now, request, *rest, **named)
        if isinstance(reply, Granted) and reply.copies:
            self.ordered.append(reply.copies)
        return reply


def random_steps(seed: int, blocks: int) -> list[list[Copy]]:
    """The copies of steps in which sequences come, fork, grow, share prefixes and go."""
    rng = random.Random(seed)
    core = Recorder(boot_id="boot", epoch=7, key=KEY)
    naive = Naive(Driver(blocks, 4, under=core))
    for _ in range(300):
        for _ in range(rng.randint(1, 12)):
            queue_something(rng, naive, 2, 21)
        naive.send()
        if len(naive.seqs) > 16:
            for seq in list(naive.seqs.values())[: rng.randint(1, 12)]:
                naive.free(seq)
    return core.ordered


@pytest.mark.parametrize("seed", [1, 2])
def test_what_memd_orders_for_forks_appends_and_hits_can_be_copied_side_by_side(seed: int) -> None:
    ordered = random_steps(seed, 64)
    assert sum(len(copies) > 1 for copies in ordered) > 20
    torch.manual_seed(seed)
    keys, values = (random_bits((2, 64, 4, 1, 8), torch.bfloat16) for _ in range(2))
    expected = keys.clone(), values.clone()
    for copies in ordered:
        ids = torch.from_numpy(copy_ids(copies, 64))
        copy_blocks(keys, values, ids[:, 0], ids[:, 1])
        for index in torch.randperm(len(ids)):
            one = ids[index : index + 1]
            reference.copy_blocks(*expected, one[:, 0], one[:, 1])
        # Sequences write on: no two blocks stay the same.
        block = int(torch.randint(0, 64, ()))
        keys[:, block] = expected[0][:, block] = random_bits((2, 4, 1, 8), torch.bfloat16)
        assert same_bits(keys, expected[0])
        assert same_bits(values, expected[1])


def test_no_copies_are_no_launch() -> None:
    keys, values = (random_bits((1, 3, 2, 1, 8), torch.float16) for _ in range(2))
    before = keys.clone()
    copy_blocks(
        keys, values, torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64)
    )
    assert same_bits(keys, before)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"targets": torch.tensor([1, 2])}, "must be lists of one length"),
        ({"values": torch.zeros(1, 4, 2, 1, 8)}, "must be alike"),
        ({"keys": torch.zeros(1, 6, 2, 1, 8)[:, ::2]}, "must be contiguous"),
        (
            dict.fromkeys(("keys", "values"), torch.zeros(1, 3, 1, 1, 3, dtype=torch.int8)),
            "a block of keys has 3 bytes",
        ),
        ({"key_scales": torch.zeros(1, 3, 2, 1)}, "come together"),
        (
            {"key_scales": torch.zeros(1, 4, 2, 1), "value_scales": torch.zeros(1, 4, 2, 1)},
            "key_scales have shape",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_a_reason(change: dict[str, Tensor], says: str) -> None:
    given = {
        "keys": torch.zeros(1, 3, 2, 1, 8),
        "values": torch.zeros(1, 3, 2, 1, 8),
        "sources": torch.tensor([1]),
        "targets": torch.tensor([2]),
    } | change
    with pytest.raises(ValueError, match=says):
        copy_blocks(**given)
