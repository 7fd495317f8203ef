"""What a runner launches is what is compiled ahead of time, and no more."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch

from executor.gpu import GpuRunner
from executor.load import LoadedModel
from executor.models.config import ModelConfig
from executor.models.decoder import Decoder, Linear
from executor.models.rope import Rope
from executor.plan import Plan, Row
from kernels import aot
from kernels.dispatch import Kernels, kernels_for
from kernels.launch import Call, Launch
from tests.executor.recorder import Replays
from wire.memory import Copy

ROOT = Path(aot.__file__).parent.parent
CONTEXT = 20_000


def config(
    heads: int, kv_heads: int, head_dim: int, window: int | None, norms: bool
) -> ModelConfig:
    """Two layers, the second with the window and without rotation; small but for its heads."""
    return ModelConfig(
        architecture="any",
        vocab_size=8,
        hidden=8,
        intermediate=8,
        layers=2,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=CONTEXT,
        norm_epsilon=1e-6,
        rope=Rope("default", 1e4),
        tied=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=norms,
        windows=(None, window),
        rotated=(True, False),
    )


def runners(kernels: Kernels) -> Iterator[GpuRunner]:
    """All sizes of heads, types and windows, with ratios of heads, sizes of blocks and the rest in turns."""
    ratios = cycle([(9, 3), (4, 4), (32, 8), (2, 1), (71, 1), (1, 1), (28, 4), (32, 16), (64, 4)])
    block_sizes = cycle([8, 16, 32, 64, 128])
    norms = cycle([False, False, True])
    device = torch.device("cpu")
    types, windows = (torch.bfloat16, torch.float32), (None, 300)
    for head_dim, dtype, window, _ in product((64, 80, 96, 128, 256), types, windows, range(2)):
        shape = config(*next(ratios), head_dim, window, next(norms))
        model = Decoder(shape, dtype, device)
        yield GpuRunner(
            LoadedModel(model, shape, card=None, digest=""),  # type: ignore[arg-type]
            num_blocks=CONTEXT // 8 + 2,
            block_size=next(block_sizes),
            device=device,
            dtype=dtype,
            kernels=kernels,
            step_tokens=200,
            sequences=12,
            record=Replays(),
        )


def plans(block_size: int, rng: random.Random) -> Iterator[Plan]:
    """Steps of all kinds: batches of any size, chunks and contexts of any length, alone and mixed, copies."""

    def row(seq: int, start: int, tokens: int) -> Row:
        return Row(seq, start, [0] * tokens, [1] * -(-(start + tokens) // block_size))

    for tokens in (1, 2, 3, 5, 8, 9, 17, 33, 129):
        yield Plan(0, [row(0, rng.randrange(CONTEXT - tokens), tokens)])
    for longest in (1, 600, CONTEXT):
        for batch in (1, 12):
            yield Plan(0, [row(seq, rng.randrange(longest), 1) for seq in range(batch)])
    for _ in range(4):
        tokens_of = [rng.choice((1, 1, 2, 5, 30)) for _ in range(rng.randrange(2, 12))]
        rows = [row(seq, rng.randrange(2000), count) for seq, count in enumerate(tokens_of)]
        copies = [Copy(3 + 2 * index, 4 + 2 * index) for index in range(rng.randrange(4))]
        yield Plan(0, rows, copies)


def beyond_runners(launch: Launch) -> bool:
    """Whether a kernel is compiled for what it can do but no runner asks of it."""
    asked = {"key_scales", "softcap", "sinks", "slopes"} & set(launch.signature)
    return bool(asked) or launch.name == "swap" or "*fp16" in launch.signature.values()


@pytest.mark.timeout(300)  # half a minute, where cores are free
def test_whatever_a_runner_launches_is_compiled_ahead_of_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    met: dict[str, dict[str, Launch]] = {target.name: {} for target in aot.TARGETS}
    current = ""

    def on_each_target(kernel: Any) -> Any:
        def launch(*args: Any, **options: Any) -> None:
            nonlocal current
            for name in met:
                current = name
                kernel(*args, **options)

        return launch

    def describe(call: Call) -> None:
        launch = call.describe("")
        met[current].setdefault(launch.key, launch)

    monkeypatch.setattr(Call, "run", describe)
    for module in ("kernels.decode", "kernels.prefill"):
        monkeypatch.setattr(f"{module}.architecture", lambda device: current)
    # Numbers do not matter here.
    monkeypatch.setattr(Linear, "__call__", lambda self, x: x.new_zeros(len(x), len(self.weight)))
    monkeypatch.setattr(Decoder, "_normed", lambda self, x, weight: x)
    real = kernels_for("triton", torch.device("cpu"))
    parts = (real.write_kv, real.decode, real.prefill, real.copy_blocks)
    rng = random.Random(0)
    for runner in runners(Kernels("triton", *map(on_each_target, parts))):
        runner.warm_up()
        runner.largest_step()
        for plan in (*runner.variants(), *plans(runner.kv.keys.shape[2], rng)):
            runner.run(plan)
    for target, launched in met.items():
        known = {
            launch.key: launch
            for module in aot.modules()
            for launch in aot.launches(module, target)
        }
        assert not [launched[key] for key in launched.keys() - known.keys()]
        unmet = [known[key] for key in known.keys() - launched.keys()]
        assert not [launch.note for launch in unmet if not beyond_runners(launch)]


# In a process of its own: here kernels are made for the interpreter, which has no kinds.
ASK_TRITON = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from kernels import aot
from kernels.launch import Call

describe = Call.describe

def compare(call, note):
    launch, function = describe(call, note), call.function
    binder = create_function_from_signature(function.signature, function.params, backend)
    _, kinds, _ = binder(**call.arguments, **call.constants)
    for name, (kind, key) in zip(function.arg_names, kinds, strict=True):
        if kind == "constexpr":
            assert launch.constants[name] == key, (note, name, key)
        else:
            assert launch.signature[name] == kind, (note, name, kind)
            assert ("D" if name in launch.aligned else "") == (key or ""), (note, name, key)
    return launch

Call.describe = compare
for target in aot.TARGETS:
    backend = make_backend(GPUTarget(target.backend, target.arch, target.warp))
    print(sum(len(aot.launches(module, target.name)) for module in aot.modules()))
"""


def test_a_launch_is_described_as_triton_would_specialise_it() -> None:
    run = subprocess.run(
        [sys.executable, "-c", "import os; del os.environ['TRITON_INTERPRET']\n" + ASK_TRITON],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    assert all(int(count) > 50 for count in run.stdout.split())
