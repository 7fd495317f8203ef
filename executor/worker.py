"""The one thread on which everything that touches the device runs.

The step loop hands it a piece of work and waits, so nothing ever runs side by side; but while it waits it can
still answer gateways and renew its lease, however long the device takes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")
Work = Callable[[], Any]


class Worker:
    """Runs work in the order given. It does not keep the process alive."""

    def __init__(self, name: str = "device") -> None:
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], Result], idle: Callable[[], None], every: float) -> Result:
        """Run `work` and return what it returns, or raise what it raises.

        Args:
            idle: called each `every` seconds meanwhile. What it raises ends the wait, not the work: the
                worker must not be used again.
        """
        self._work.put(work)
        while True:
            try:
                result, error = self._done.get(timeout=every)
            except queue.Empty:
                idle()
                continue
            if error is not None:
                raise error
            return result  # type: ignore[no-any-return]

    def close(self) -> None:
        """Let the thread end once it is done with what it has."""
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                self._done.put((work(), None))
            except BaseException as error:
                self._done.put((None, error))
