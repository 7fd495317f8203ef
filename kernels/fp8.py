"""float8 in integer arithmetic, for kernels: the same bits on every device, with or without the type.

The four bits of exponent and three of mantissa of float8_e4m3fn are the upper bits of a float16 divided by
2^8, subnormals included, so that converting is shifting; float8_e5m2 is the upper byte of a float16
(Micikevicius et al., "FP8 Formats for Deep Learning", 2022).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def encode(x: tl.tensor) -> tl.tensor:
    """float32 of at most 448 in size to the bits of the nearest float8_e4m3fn, ties to even, as uint8."""
    bits = x.to(tl.int32, bitcast=True)
    # Twenty of float32's mantissa bits go; a carry into the exponent is meant.
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    normal = rounded.to(tl.float32, bitcast=True)
    # Below 2^-6 steps are 2^-9 wide, as are float32's from 2^14 on: adding that rounds.
    subnormal = (x + 24576.0) - 24576.0
    nearest = tl.where(tl.abs(x) < 0.015625, subnormal, normal) * 0.00390625
    half = nearest.to(tl.float16).to(tl.int16, bitcast=True)
    return (((half >> 8) & 0x80) | ((half >> 7) & 0x7F)).to(tl.uint8)


@triton.jit
def encode_e5m2(x: tl.tensor) -> tl.tensor:
    """float32 of at most 57344 in size to the bits of the nearest float8_e5m2, ties to even, as uint8."""
    bits = x.to(tl.int32, bitcast=True)
    # As above, with one bit less. By way of float16 it would be rounded twice.
    rounded = (bits + 0xFFFFF + ((bits >> 21) & 1)) & -0x200000
    normal = rounded.to(tl.float32, bitcast=True)
    # Below 2^-14 steps are 2^-16 wide, as are float32's from 2^7 on.
    subnormal = (x + 192.0) - 192.0
    nearest = tl.where(tl.abs(x) < 0.00006103515625, subnormal, normal)
    return (nearest.to(tl.float16).to(tl.int16, bitcast=True) >> 8).to(tl.uint8)


@triton.jit
def decode(bits: tl.tensor) -> tl.tensor:
    """The bits of float8_e4m3fn, as uint8, to the same number in float16; NaN becomes 480 or -480."""
    # The sign, extended, is also the bit after it: that one goes.
    half = (bits.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -0x4001
    return half.to(tl.float16, bitcast=True) * 256.0
