"""What this machine's GPU allows: whether it can be used, and how many KV blocks it has room for."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable

import torch

from executor.gpu import GpuRunner

log = logging.getLogger(__name__)

_MOST_BLOCKS = 1 << 24  # that memd can name


def why_no_gpu() -> str | None:
    """One line that says why torch has no GPU here and what to do, or None if it has one."""
    if torch.cuda.is_available():
        return None
    if torch.version.cuda is None and torch.version.hip is None:
        return (
            f"torch {torch.__version__} is a build for CPUs: install a CUDA build of it, or use "
            "--device cpu"
        )
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # torch has no type for it
        story = str(error).strip().splitlines()[0].rstrip(".")
        return (
            f"no GPU can be used: {story}. Look at nvidia-smi and CUDA_VISIBLE_DEVICES (in a container, "
            "also at its GPU reservation), or use --device cpu"
        )
    return "torch sees no GPU: CUDA_VISIBLE_DEVICES may hide it; or use --device cpu"


def free_memory(device: torch.device) -> str:
    """For messages: what is free."""
    free, total = torch.cuda.mem_get_info(device)
    return f"{free / 2**30:.1f} of {device}'s {total / 2**30:.1f} GiB are free"


def blocks_that_fit(total: int, elsewhere: int, own: int, share: float, each: int) -> int:
    """KV blocks in what is left of a device's memory.

    Args:
        total: bytes of the device.
        elsewhere: bytes in use by others: processes, the driver.
        own: most bytes this process takes besides K and V: weights, a step's scratch, graphs.
        share: of the total that all together may take.
        each: bytes of a block.
    """
    return min(_MOST_BLOCKS, max(0, int((total * share - elsewhere - own) // each)))


def measured_blocks(
    build: Callable[[int], GpuRunner], enough: int, device: torch.device, share: float
) -> int:
    """KV blocks that fit beside everything else, found by running the largest step once.

    Args:
        build: makes a runner with so many blocks.
        enough: blocks for that step.
        share: of the device's memory to use.

    Raises:
        torch.OutOfMemoryError, MemoryError: there is no room even for that step.
    """
    torch.cuda.reset_peak_memory_stats(device)
    probe = build(enough)
    each = probe.block_bytes
    probe.largest_step()
    own = torch.cuda.max_memory_reserved(device) - enough * each
    del probe
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    elsewhere = total - free - torch.cuda.memory_reserved(device)
    blocks = blocks_that_fit(total, elsewhere, own, share, each)
    gib = 2**30
    log.info(
        "measured: weights and scratch %.2f GiB, others %.2f GiB, left for K and V %.2f of %.2f GiB",
        own / gib,
        elsewhere / gib,
        blocks * each / gib,
        total / gib,
    )
    return blocks
