"""Every kernel on the device against the plain reference on the same device, over awkward sizes and types."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.gpu.setting import Setting
from kernels import reference
from kernels.copy_blocks import copy_blocks
from kernels.decode import decode
from kernels.options import Options
from kernels.prefill import prefill
from kernels.swap import gather_blocks, scatter_blocks
from kernels.write_kv import write_kv
from tests.kernels.paged import CLOSE, Paged, options

# block size, head size, KV heads, queries per KV head
SHAPES = ((8, 64, 3, 3), (16, 128, 2, 4), (16, 80, 1, 7), (32, 96, 2, 4), (128, 256, 1, 8))
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
STORED = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
ASKED: tuple[dict[str, float | bool], ...] = (
    {"window": 20},
    {"softcap": 5.0},
    {"sinks": True, "slopes": True},
    {"window": 70, "softcap": 2.0, "sinks": True, "slopes": True},
)


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison: `run` gives the greatest difference."""

    kernel: str
    what: str
    limit: float
    run: Callable[[], float]


def check(setting: Setting, progress: Callable[[float], None]) -> dict[str, object]:
    """Run all cases; a case that raises counts as one that differs.

    Returns:
        Of each kernel: cases, greatest difference by type, and the failures in words.
    """
    cases = list(_cases(setting))
    found: dict[str, dict[str, float]] = {}
    failures: list[str] = []
    torch.manual_seed(0)
    for done, case in enumerate(cases):
        of_kernel = found.setdefault(case.kernel, {"cases": 0, "worst": 0.0})
        try:
            with torch.device(setting.device):
                difference = case.run()
        except Exception as error:  # the device's own words; the other cases still tell something
            failures.append(f"{case.kernel}, {case.what}: {type(error).__name__}: {error}"[:300])
            difference = 0.0
        of_kernel["cases"] += 1
        of_kernel["worst"] = max(of_kernel["worst"], difference)
        if not difference <= case.limit:
            failures.append(f"{case.kernel}, {case.what}: {difference:.2e} above {case.limit:.0e}")
        progress((done + 1) / len(cases))
    return {"kernels": found, "failures": failures}


def _cases(setting: Setting) -> Iterator[Case]:
    shapes = SHAPES[:1] if setting.interpret else SHAPES
    dtypes = FLOATS[:1] if setting.interpret else FLOATS
    asked = ASKED[-1:] if setting.interpret else ASKED
    for shape in shapes:
        for dtype in dtypes:
            yield from _attention(setting, shape, dtype, None, {})
    for stored in STORED[: 1 if setting.interpret else None]:
        yield from _attention(setting, shapes[-1], setting.dtype, stored, {})
    for one in asked:
        yield from _attention(setting, shapes[0], setting.dtype, None, one)
    for dtype in dtypes:
        kinds: tuple[torch.dtype | None, ...] = (None, *STORED)
        for kind in kinds:
            name = f"{dtype} to {kind or dtype}"
            yield Case("write_kv", name, 0.0, _write(dtype, kind))
        yield Case("copy_blocks", str(dtype), 0.0, _copy(dtype))
        yield Case("swap", str(dtype), 0.0, _swap(setting, dtype))
    if not setting.interpret and setting.free() > 24 << 30:
        yield Case("decode", "offsets past 2^31", CLOSE[torch.bfloat16], _far)


def _attention(
    setting: Setting,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    stored: torch.dtype | None,
    asked: dict[str, float | bool],
) -> Iterator[Case]:
    size, head_dim, kv_heads, group = shape
    name = f"block {size}, {kv_heads}x{group} heads of {head_dim}, {dtype} on {stored or dtype} {asked}"
    lengths = [size + 3, 0, 1]
    if not setting.interpret:
        lengths += [size - 1, size, size + 1, 1021, *range(3, 100)]

    def paged() -> Paged:
        return Paged.random(
            lengths, kv_heads=kv_heads, head_dim=head_dim, block_size=size, stored=stored or dtype
        )

    def decodes() -> float:
        cache = paged()
        queries = torch.randn(len(lengths), kv_heads * group, head_dim).to(dtype)
        places = queries, cache.keys, cache.values, cache.tables, cache.lengths
        same = _settings(cache, kv_heads * group, head_dim, asked)
        return _apart(decode(*places, **same), reference.decode(*places, **same))

    def prefills() -> float:
        cache = paged()
        counts = [min(length, 1 + 37 * row % 61) for row, length in enumerate(lengths)]
        starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
        queries = torch.randn(sum(counts), kv_heads * group, head_dim).to(dtype)
        places = queries, cache.keys, cache.values, cache.tables, starts, cache.lengths
        same = _settings(cache, kv_heads * group, head_dim, asked)
        most = max(counts)
        return _apart(prefill(*places, most, **same), reference.prefill(*places, most, **same))

    yield Case("decode", name, CLOSE[dtype], decodes)
    yield Case("prefill", name, CLOSE[dtype], prefills)


def _settings(
    cache: Paged, heads: int, head_dim: int, asked: dict[str, float | bool]
) -> dict[str, Any]:
    return {"scale": head_dim**-0.5, "options": options(heads, **asked), **cache.scales()}


def _apart(got: Tensor, wanted: Tensor) -> float:
    """The greatest difference, relative where numbers are above 1; infinite when one is not a number."""
    got, wanted = got.float(), wanted.float()
    difference = ((got - wanted).abs() / wanted.abs().clamp(min=1)).max().item()
    return difference if difference == difference else float("inf")


def _write(dtype: torch.dtype, stored: torch.dtype | None) -> Callable[[], float]:
    """Stored values may differ by one step of their type, so they are compared as numbers."""

    def run() -> float:
        tokens, heads, kv_heads, head_dim, blocks, size = 13, 6, 2, 64, 9, 16
        fused = torch.randn(tokens, heads + 2 * kv_heads, head_dim).to(dtype)
        slots = torch.randperm(blocks * size)[:tokens]
        slots[5] = -1
        angles = torch.rand(tokens, head_dim // 2) * 100
        results = []
        for write in (write_kv, reference.write_kv):
            queries, keys, values = torch.split(fused.clone(), [heads, kv_heads, kv_heads], dim=1)
            shape = blocks, size, kv_heads, head_dim
            caches = [torch.zeros(shape).to(stored or dtype) for _ in range(2)]
            scales = [torch.zeros(blocks, size, kv_heads) if stored else None for _ in range(2)]
            write(
                queries,
                keys,
                values,
                caches[0],
                caches[1],
                slots,
                cos=angles.cos(),
                sin=angles.sin(),
                key_scales=scales[0],
                value_scales=scales[1],
            )
            results.append(
                [queries]
                + [
                    cache.float() * (1 if scale is None else scale[..., None])
                    for cache, scale in zip(caches, scales, strict=True)
                ]
            )
        step = {None: CLOSE[dtype], torch.int8: 0.05, torch.float8_e5m2: 0.6}.get(stored, 0.3)
        worst = max(_apart(got, wanted) for got, wanted in zip(*results, strict=True))
        return 0.0 if worst <= step else worst

    return run


def _copy(dtype: torch.dtype) -> Callable[[], float]:
    def run() -> float:
        keys, values = (torch.randn(2, 40, 16, 2, 64).to(dtype) for _ in range(2))
        order = torch.randperm(40)
        mine, theirs = (keys.clone(), values.clone()), (keys.clone(), values.clone())
        copy_blocks(mine[0], mine[1], order[:15], order[15:30])
        reference.copy_blocks(theirs[0], theirs[1], order[:15], order[15:30])
        return float(sum((a != b).sum().item() for a, b in zip(mine, theirs, strict=True)))

    return run


def _swap(setting: Setting, dtype: torch.dtype) -> Callable[[], float]:
    """To pinned memory and back to other places."""

    def run() -> float:
        cache = torch.randn(2, 40, 16, 2, 64).to(dtype)
        order = torch.randperm(40)
        pinned = setting.device.type == "cuda"
        buffer = torch.empty(2, 10, 16, 2, 64, dtype=dtype, device="cpu", pin_memory=pinned)
        gather_blocks(cache, order[:10], buffer)
        setting.wait()
        other = torch.zeros_like(cache)
        scatter_blocks(buffer, order[10:20], other)
        wanted = torch.zeros_like(cache)
        wanted[:, order[10:20]] = cache[:, order[:10]]
        return float((other != wanted).sum().item())

    return run


def _far() -> float:
    """Blocks whose elements lie past 2^31, and ids past 65,535."""
    size, kv_heads, head_dim = 16, 8, 128
    blocks = (1 << 31) // (size * kv_heads * head_dim) + 70_000
    keys, values = (
        torch.randn(size * kv_heads * head_dim, dtype=torch.bfloat16)
        .expand(blocks, -1)
        .contiguous()
        .view(blocks, size, kv_heads, head_dim)
        for _ in range(2)
    )
    tables = torch.tensor([[blocks - 1, 65_536, blocks - 2], [blocks - 3, 1, 2]], dtype=torch.int32)
    for block in tables.flatten().tolist():
        keys[block].normal_()
        values[block].normal_()
    lengths = torch.tensor([3 * size, 2 * size - 3], dtype=torch.int32)
    queries = torch.randn(2, 32, head_dim, dtype=torch.bfloat16)
    places = queries, keys, values, tables, lengths
    asked = Options()
    return _apart(
        decode(*places, scale=head_dim**-0.5, options=asked),
        reference.decode(*places, scale=head_dim**-0.5, options=asked),
    )
