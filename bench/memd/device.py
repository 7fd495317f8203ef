"""What computes while memd answers: threads that go through more memory than caches hold, as a step does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

FLOATS = 16 << 20  # 64 MiB a thread: more than caches hold


@contextmanager
def computing(threads: int) -> Iterator[None]:
    """Keep `threads` threads busy outside Python's lock."""
    stop = threading.Event()

    def work() -> None:
        data = np.ones(FLOATS, np.float32)
        while not stop.is_set():
            np.multiply(data, 1.000001, out=data)

    crew = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    for thread in crew:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in crew:
            thread.join()
