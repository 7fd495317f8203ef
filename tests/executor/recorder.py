"""A CUDA graph's contract on a CPU: work recorded once, replayed on the same memory."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Replays:
    """Records by keeping the work, and replays by doing it again, into the tensor it gave the first time."""

    def __init__(self) -> None:
        self.results: list[Tensor] = []
        self.replayed: list[int] = []  # rows of each replay

    def __call__(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        result = work()
        self.results.append(result)

        def again() -> None:
            result.copy_(work())
            self.replayed.append(len(result))

        return again, result
