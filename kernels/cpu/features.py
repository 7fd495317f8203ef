"""What this CPU can do, and which builds of the native step it can therefore run."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@dataclass(slots=True, frozen=True)
class Variant:
    """One way to compile the step."""

    name: str
    machine: frozenset[str]  # as platform.machine() names them
    needs: frozenset[str]  # features as /proc/cpuinfo names them
    flags: tuple[str, ...]  # for g++ and clang++


_X86 = frozenset({"x86_64", "AMD64"})
_ARM = frozenset({"aarch64", "arm64"})
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl")
_NEEDS_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi2"})
_NEEDS_AVX512 = _NEEDS_AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}

# Fastest first.
VARIANTS = (
    Variant(
        "avx512-bf16",
        _X86,
        _NEEDS_AVX512 | {"avx512_bf16", "avx512_vnni"},
        (*_AVX512, "-mavx512bf16", "-mavx512vnni"),
    ),
    Variant("avx512", _X86, _NEEDS_AVX512, _AVX512),
    Variant("avx2", _X86, _NEEDS_AVX2, _AVX2),
    Variant("sse2", _X86, frozenset(), ()),
    Variant("neon", _ARM, frozenset(), ()),
)


def cpu_features(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Features that the CPU has and the system lets programs use; empty where there is no such file."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):  # x86 and Arm
            return frozenset(value.split())
    return frozenset()


def usable(
    features: Iterable[str] | None = None, machine: str | None = None
) -> tuple[Variant, ...]:
    """The variants this CPU can run, fastest first; none for a kind of CPU that is not known.

    Args:
        features: of the CPU; default: this one's.
        machine: kind of CPU as `platform.machine` names it; default: this one's.
    """
    has = cpu_features() if features is None else frozenset(features)
    kind = platform.machine() if machine is None else machine
    return tuple(v for v in VARIANTS if kind in v.machine and v.needs <= has)
