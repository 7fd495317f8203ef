"""How fast this machine reads memory now: small batches are bound by it, and neighbours change it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy

MEGABYTES = 128  # read by each thread: far more than any cache holds
ROUNDS = 3


def read_bandwidth(threads: int = 2) -> float:
    """GB/s that `threads` threads read together; the best of a few rounds, some tenths of a second in all."""
    shares = [numpy.ones(MEGABYTES << 17, dtype=numpy.int64) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(ROUNDS):
            began = time.perf_counter()
            # numpy lets go of the interpreter lock while it adds.
            list(pool.map(numpy.sum, shares))
            best = max(
                best, threads * MEGABYTES / 1024 * 1.073741824 / (time.perf_counter() - began)
            )
    return best
