"""The executor's settings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wire.logs import LogFormat, LogLevel
from wire.sampling import MAX_CHOICES
from wire.settings import Size, default_run_dir, flag, load

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def _check_name(name: str) -> None:
    if name and not _NAME.fullmatch(name):
        raise ValueError("must be 1 to 64 letters, digits, dots, dashes or underscores")


@dataclass(frozen=True, slots=True)
class Config:
    """See each field's help. The environment twin of `--kv-memory` is `EXECUTOR_KV_MEMORY`."""

    model: str = flag("smollm2", "a folder, a .gguf file, or a name this executor knows")
    served_model_name: str = flag("", "what clients call the model; empty: the model's own name")
    run_dir: Path = flag(default_run_dir(), "where the sockets are")
    index: int = flag(0, "which executor of this run directory", least=0, most=999)
    device: Literal["cpu", "cuda"] = flag("cpu", "what computes")
    dtype: Literal["float32", "bfloat16"] = flag("bfloat16", "of weights, activations, K and V")
    kernels: Literal["auto", "native", "torch", "triton"] = flag(
        "auto",
        "code of the step: native (for CPUs, built at first use), triton (for GPUs) or torch (plain, "
        "anywhere); auto: the fastest that can run here",
    )
    cuda_graphs: bool = flag(True, "record steps that only decode as CUDA graphs (triton)")
    weights: Literal["auto", "plain", "file", "int8", "w8a8"] = flag(
        "auto",
        "how the native CPU step holds weights: plain: as --dtype says; file: as a GGUF file of Q4_0, "
        "Q4_1 or Q8_0 has them; int8: 8 bits made of any weights; w8a8: 8 bits of weights and inputs, which "
        "changes texts; auto: file if it can",
    )
    kv_memory: Size | None = flag(
        None, "memory for K and V; default: 1GiB, on a GPU what --gpu-memory-share leaves", least=1
    )
    gpu_memory_share: float = flag(
        0.9, "share of a GPU's memory to use, all in all (triton)", least=0.01, most=1
    )
    num_blocks: int | None = flag(
        None, "KV blocks to be granted, instead of --kv-memory", least=1, most=(1 << 24) - 1
    )
    block_size: int = flag(16, "tokens in one KV block", least=1, most=1024)
    max_model_len: int | None = flag(
        None, "most tokens of prompt and output; default: the model's context", least=1
    )
    max_step_tokens: int | None = flag(
        None,
        "most tokens computed in one step; default: 256 on a CPU, 512 on a GPU",
        least=MAX_CHOICES,
        most=65536,
    )
    max_sequences: int = flag(256, "most sequences running at once", least=1, most=4096)
    max_waiting: int = flag(1024, "most requests in the queue", least=1)
    max_waiting_tokens: int = flag(1_000_000, "most prompt tokens in the queue", least=1)
    threads: int | None = flag(None, "CPU threads; default: torch's choice", least=1, most=1024)
    pool_name: str = flag(
        "", "name of the pool at memd; empty: the model's name and --index", check=_check_name
    )
    drain_seconds: float = flag(30.0, "after SIGTERM, time to finish what runs", least=0)
    step_timeout: float = flag(
        120.0, "seconds after which a step is taken for stuck and the executor ends", least=1
    )
    log_level: LogLevel = flag("info", "least severe log line that is written")
    log_format: LogFormat = flag("text", "lines for people, or JSON objects for machines")

    @property
    def step_tokens(self) -> int:
        """Most tokens computed in one step.

        On a CPU 256 are as fast a token as 512, and tokens that are decoded beside prompts, of which there
        are more then, cost less than those of steps of their own.
        """
        return self.max_step_tokens or (256 if self.device == "cpu" else 512)

    @property
    def socket(self) -> Path:
        """Where gateways connect."""
        return self.run_dir / f"executor-{self.index}.sock"

    @property
    def pool(self) -> str:
        """Name of the pool at memd."""
        if self.pool_name:
            return self.pool_name
        stem = Path(self.model).name.removesuffix(".gguf")
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("._-")[:56] or "model"
        return f"{plain}-{self.index}"


def read(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """Settings from flags and environment; exits with status 2 on a bad value."""
    return load(
        Config,
        program="executor",
        prefix="EXECUTOR",
        description="Computes: holds a model's weights and KV tensors, and schedules requests.",
        argv=argv,
        environ=environ,
    )
