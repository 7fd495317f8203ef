"""CUDA graphs for steps that only decode: the launches of a whole step recorded once, replayed as one.

At small batches a GPU is done with a layer sooner than Python can launch the next one; a graph takes the host
out of it. It has fixed shapes, so steps are padded to one of a few batch sizes, the *buckets*.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

_SMALL = (1, 2, 4)
_STEP = 8  # between larger buckets: at most 7 rows of padding, and GEMMs like multiples of 8


def buckets(most: int) -> list[int]:
    """Batch sizes to record, rising, for batches of up to `most` rows: 1, 2, 4, 8, 16, 24, ... most."""
    sizes = [size for size in (*_SMALL, *range(_STEP, most, _STEP)) if size < most]
    return [*sizes, most]


class Recorder(Protocol):
    """Runs a function once and returns what repeats it on the same memory."""

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """What repeats the work, and the tensor the work returns, written anew each time."""


class CudaRecorder:
    """Records CUDA graphs that share one pool of scratch memory: they never run side by side."""

    def __init__(self) -> None:
        self._pool: Any = None  # torch's handle

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()  # compiles kernels and fills caches, which a recording must not do
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            result = work()
        self._pool = self._pool or graph.pool()
        return graph.replay, result


class Graphs:
    """One recording per bucket."""

    def __init__(self, step: Callable[[int], Tensor], most: int, record: Recorder) -> None:
        """
        Args:
            step: computes a batch of so many rows from memory that stays where it is.
            most: rows of the largest batch.
            record: how to record.
        """
        self._step = step
        self._record = record
        self._sizes = buckets(most)
        self._recorded: dict[int, tuple[Callable[[], None], Tensor]] = {}

    def capture(self) -> Iterator[tuple[int, int]]:
        """Record all, the largest first, whose scratch memory the others then use; yields (done, of)."""
        for done, size in enumerate(reversed(self._sizes), 1):
            self._recorded[size] = self._record(lambda rows=size: self._step(rows))  # type: ignore[misc]
            yield done, len(self._sizes)

    def bucket(self, rows: int) -> int | None:
        """The recorded batch size for so many rows; None: there is none."""
        place = bisect.bisect_left(self._sizes, rows)
        if place == len(self._sizes) or self._sizes[place] not in self._recorded:
            return None
        return self._sizes[place]

    def replay(self, bucket: int) -> Tensor:
        """Compute a batch of `bucket` rows; what is returned holds until the next one."""
        again, result = self._recorded[bucket]
        again()
        return result
