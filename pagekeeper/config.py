"""Settings of the launcher: flags, `PAGEKEEPER_*` environment twins.

Most are handed on to the child that understands them, and only when given, so that every default is written
down once, in the child's own `config.py`. A child's other settings are reached by its own environment twins
(`EXECUTOR_…`, `MEMD_…`, `GATEWAY_…`), which children inherit.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wire.logs import LogFormat, LogLevel
from wire.settings import Secret, Size, default_run_dir, flag, load


def _whole(addend: int) -> None:
    if not 0 <= addend <= 19:
        raise ValueError("must be from 0 to 19")


@dataclass(frozen=True, slots=True)
class UpConfig:
    """What `pagekeeper up` takes. None: the child's default."""

    model: str | None = flag(
        None, "folder, GGUF file or name of the model (default SmolLM2-135M-Instruct)"
    )
    served_model_name: str | None = flag(None, "name clients use for it")
    host: str = flag("127.0.0.1", "address of the API; any but loopback needs keys")
    port: int = flag(8000, "port of the API; 0 takes a free one", least=0, most=65535)
    admin_port: int = flag(
        9100, "port of memd's page on 127.0.0.1; 0 takes a free one", least=0, most=65535
    )
    api_keys: Secret | None = flag(
        None, "keys clients must present, separated by commas; better given in the environment"
    )
    api_key_file: Path | None = flag(
        None, "file of keys, one 'KEY [TENANT]' a line; KEY may be sha256:HEX"
    )
    insecure_no_auth: bool = flag(False, "allow a public --host without API keys")
    device: Literal["cpu", "cuda"] | None = flag(None, "where to compute")
    dtype: Literal["float32", "bfloat16"] | None = flag(None, "of weights and KV")
    kernels: Literal["auto", "native", "torch", "triton"] | None = flag(
        None, "code of the executor's step"
    )
    weights: Literal["auto", "plain", "file", "int8", "w8a8"] | None = flag(
        None, "how the native step holds weights"
    )
    cuda_graphs: bool | None = flag(None, "record steps that only decode (on a GPU)")
    kv_memory: Size | None = flag(None, "memory of the KV pool")
    gpu_memory_share: float | None = flag(
        None, "share of a GPU's memory to use, all in all", least=0.01, most=1
    )
    num_blocks: int | None = flag(None, "blocks of the KV pool, instead of --kv-memory", least=1)
    block_size: int | None = flag(None, "token slots per block", least=1, most=1024)
    max_model_len: int | None = flag(None, "longest prompt and output together, in tokens", least=1)
    max_step_tokens: int | None = flag(None, "tokens computed in one step", least=1)
    run_dir: Path = flag(default_run_dir(), "directory of the processes' sockets")
    start_seconds: float = flag(600.0, "longest wait until the server is ready", least=1)
    drain_seconds: float = flag(30.0, "running streams get this long to finish at the end", least=0)
    executor_nice: int = flag(
        0, "lets memd and the gateway go first when cores are few: 0 (even) to 19", check=_whole
    )
    servers_nice: int | None = flag(
        None,
        "lets a step on the CPU go before memd and the gateway: 0 (even) to 19; "
        "default: 5 with up to 4 CPUs and no --executor-nice, else 0",
        check=_whole,
    )
    log_level: LogLevel | None = flag(None, "least severe line the children log")
    log_format: LogFormat | None = flag(None, "the children's lines: text for people, or json")


@dataclass(frozen=True, slots=True)
class AtConfig:
    """What `pagekeeper status` and `pagekeeper down` take."""

    run_dir: Path = flag(default_run_dir(), "directory the server was started with")
    api_keys: Secret | None = flag(None, "the server's keys, when it has any; the first is used")
    admin_token: Secret | None = flag(None, "memd's admin token, when it has one")


# Names that other parts of this repository read: caches, compose.yaml, the tests.
_OTHERS = ("CACHE", "CORES", "MODELS", "AOT", "FUZZ", "FUZZ_OPS", "FULL")


def unknown_names(environ: Mapping[str, str] | None = None) -> list[str]:
    """A sentence for each `PAGEKEEPER_*` variable that nothing reads: most likely a slip of the pen."""
    environ = os.environ if environ is None else environ
    fields = (*dataclasses.fields(UpConfig), *dataclasses.fields(AtConfig))
    known = [f"PAGEKEEPER_{name}" for name in (*(f.name.upper() for f in fields), *_OTHERS)]
    said = []
    for name in sorted(environ):
        if name.startswith("PAGEKEEPER_") and name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            said.append(f"nothing reads the environment variable {name}{meant}")
    return said


def load_up(argv: Sequence[str]) -> UpConfig:
    """Settings of `up`; exits with status 2 on a bad value."""
    for sentence in unknown_names():
        print(f"pagekeeper up: {sentence}", file=sys.stderr)
    return load(
        UpConfig,
        program="pagekeeper up",
        prefix="PAGEKEEPER",
        description="Start memd, an executor and the gateway; keep them running until Ctrl-C.",
        argv=argv,
    )


def load_at(argv: Sequence[str], command: str, description: str) -> AtConfig:
    """Settings of the other commands; exits with status 2 on a bad value."""
    return load(
        AtConfig,
        program=f"pagekeeper {command}",
        prefix="PAGEKEEPER",
        description=description,
        argv=argv,
    )
