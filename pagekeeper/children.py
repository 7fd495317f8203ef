"""The three processes of one machine, as things to start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

from pagekeeper.config import UpConfig
from pagekeeper.supervisor import Spec
from wire.settings import flag_name

# What children leave in the run directory; removed before the first starts and after the last ended.
LEFTOVERS = (
    "memd.sock",
    "memd.json",
    "memd.lock",
    "executor-0.sock",
    "executor-0.lock",
    "gateway.json",
)

FEW_CPUS, NICE = 4, 5

_FOR_EXECUTOR = (
    "model", "served_model_name", "device", "dtype", "kv_memory", "num_blocks", "block_size",
    "max_model_len", "max_step_tokens", "kernels", "weights", "cuda_graphs", "gpu_memory_share",
)  # fmt: skip


def specs(config: UpConfig) -> list[Spec]:
    """memd, executor and gateway in the order they are started; they are stopped in the opposite one."""
    nice = _servers_nice(config)
    return [
        Spec(
            "memd",
            (*_python("memd", config), *_flag("admin_port", config.admin_port)),
            nice=nice,
            stop_seconds=5,
        ),
        Spec(
            "executor",
            (
                *_python("executor", config),
                *_given(config, _FOR_EXECUTOR),
                # By then the gateway has ended, and with it every request.
                *_flag("drain_seconds", min(config.drain_seconds, 5.0)),
            ),
            nice=config.executor_nice,
            stop_seconds=10,
        ),
        Spec(
            "gateway",
            (
                *_python("gateway", config),
                *_flag("host", config.host),
                *_flag("port", config.port),
                *_given(config, ("api_key_file",)),
                *(("--insecure-no-auth",) if config.insecure_no_auth else ()),
                *_flag("drain_seconds", config.drain_seconds),
            ),
            # Not a flag: every user of this machine can read command lines.
            env={"GATEWAY_API_KEYS": config.api_keys} if config.api_keys else {},
            nice=nice,
            stop_seconds=config.drain_seconds + 5,
        ),
    ]


def _servers_nice(config: UpConfig) -> int:
    """A step that computes on all of few CPUs goes before what can wait, unless told to wait itself."""
    if config.servers_nice is not None:
        return config.servers_nice
    if config.executor_nice:
        return 0
    affinity = getattr(os, "sched_getaffinity", None)  # not everywhere
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    return NICE if cpus <= FEW_CPUS and config.device in (None, "cpu") else 0


def _python(module: str, config: UpConfig) -> Iterator[str]:
    yield from (sys.executable, "-m", module)
    yield from _flag("run_dir", config.run_dir)
    yield from _given(config, ("log_level", "log_format"))


def _given(config: UpConfig, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        value = getattr(config, name)
        if value is not None:
            yield from _flag(name, value)


def _flag(name: str, value: Any) -> tuple[str, str]:
    return flag_name(name), str(value)
