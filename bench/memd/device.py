"""What computes while memd answers: threads that go through more memory than caches hold, as a step does."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

FLOATS = 16 << 20  # 64 MiB a thread


class Device:
    """Memory that threads go through; it is made when first needed and kept."""

    def __init__(self) -> None:
        self._data: list[npt.NDArray[np.float32]] = []

    @contextmanager
    def computing(self, threads: int) -> Iterator[None]:
        """Keep `threads` threads busy, outside Python's lock."""
        while len(self._data) < threads:
            self._data.append(np.ones(FLOATS, np.float32))
        stop = threading.Event()

        def work(data: npt.NDArray[np.float32]) -> None:
            while not stop.is_set():
                np.multiply(data, 1.000001, out=data)

        crew = [threading.Thread(target=work, args=(data,)) for data in self._data[:threads]]
        for thread in crew:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in crew:
                thread.join()
