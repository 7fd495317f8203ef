from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import fp8
from kernels.reference import LARGEST

SIZE = 4096


@triton.jit
def _encode(numbers: tl.tensor, bits: tl.tensor, SIZE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)
    tl.store(bits + at, fp8.encode(tl.load(numbers + at)))


@triton.jit
def _encode_e5m2(numbers: tl.tensor, bits: tl.tensor, SIZE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)
    tl.store(bits + at, fp8.encode_e5m2(tl.load(numbers + at)))


@triton.jit
def _decode(bits: tl.tensor, numbers: tl.tensor, SIZE: tl.constexpr) -> None:
    at = tl.arange(0, SIZE)
    tl.store(numbers + at, fp8.decode(tl.load(bits + at)))


def every_value(dtype: torch.dtype) -> Tensor:
    """All finite numbers the type has, in order, as float32."""
    values = torch.arange(256).to(torch.uint8).view(dtype).float()
    return values[values.isfinite()].sort().values


def encoded(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    padded = torch.zeros(SIZE)
    padded[: len(numbers)] = numbers
    bits = torch.empty(SIZE, dtype=torch.uint8)
    kernel = _encode if dtype == torch.float8_e4m3fn else _encode_e5m2
    kernel[(1,)](padded, bits, SIZE=SIZE)
    return bits[: len(numbers)].view(dtype).float()


@pytest.mark.parametrize(
    ("dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)], ids=str
)
def test_each_number_becomes_the_nearest_one_and_of_two_as_near_the_even(
    dtype: torch.dtype, largest: float
) -> None:
    values = every_value(dtype)
    assert values.max() == largest == LARGEST[dtype]
    middle = (values[1:] + values[:-1]) / 2
    torch.manual_seed(0)
    numbers = torch.cat(
        [
            values,
            middle,
            middle.nextafter(torch.tensor(-1e9)),
            middle.nextafter(torch.tensor(1e9)),
            torch.randn(2500) * 10 ** torch.linspace(-6, 4, 2500),
            torch.tensor([1e9, -1e9, 1e-30, 0.0]),
        ]
    ).clamp(-largest * 1.0000003, largest * 1.0000003)
    assert len(numbers) <= SIZE
    assert torch.equal(encoded(numbers, dtype), numbers.to(dtype).float())


def test_every_number_of_the_type_is_read_exactly() -> None:
    bits = torch.arange(SIZE).to(torch.uint8)
    numbers = torch.empty(SIZE, dtype=torch.float16)
    _decode[(1,)](bits, numbers, SIZE=SIZE)
    expected = bits.view(torch.float8_e4m3fn).float()
    finite = expected.isfinite()
    assert torch.equal(numbers[finite].float(), expected[finite])
    assert numbers[:256][~finite[:256]].tolist() == [480.0, -480.0]
