"""The one thread on which everything that touches the device runs.

The step loop hands it a piece of work, does what can be done beside it, and waits; while it waits it can
still answer gateways and renew its lease, however long the device takes. To wake a thread takes longer than
what must happen between two steps, so that is left with the device's thread, as `then`: it makes the next
piece of work out of the result of the last. It only ever runs while the loop waits, never beside it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")
Work = Callable[[], Any]
Then = Callable[[Any], Work | None]  # takes a result; returns what is to be run next


class Worker:
    """Runs one piece of work at a time. It does not keep the process alive."""

    def __init__(self, name: str = "device") -> None:
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        # Results that nothing was done about yet, errors, and a word that all is done.
        self._done: queue.SimpleQueue[_Result | BaseException | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._then: Then | None = None  # of a loop that waits
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Callable[[], Result], idle: Callable[[], None], every: float) -> Result:
        """Run `work` and return what it returns, or raise what it raises.

        Args:
            idle: as of `wait`.
        """
        results: list[Result] = []
        self.start(work)
        self.wait(results.append, idle, every)
        return results[0]

    def start(self, work: Work) -> None:
        """Have `work` run; `wait` must be called before more is started."""
        self._work.put(work)

    def wait(self, then: Then, idle: Callable[[], None], every: float) -> None:
        """Wait for the work that was started, and for `then`; raise what one of them raises.

        Args:
            then: called with the result, on the device's thread if it comes while this waits. What it
                returns has been started when this returns.
            idle: called each `every` seconds meanwhile, never beside `then`. What it raises ends the wait,
                not the work: the worker must not be used again.
        """
        given = False
        while True:
            if not given:
                given, self._then = True, then
            try:
                done = self._done.get(timeout=every)
            except queue.Empty:
                if self._take_then() is not None:  # else it is running, or a result is there
                    given = False
                    idle()
                continue
            if done is None:
                return
            if isinstance(done, BaseException):
                raise done
            self._take_then()  # the result was there first
            if (work := then(done.value)) is not None:
                self.start(work)
            return

    def close(self) -> None:
        """Let the thread end once it is done with what it has."""
        self._work.put(None)

    def _take_then(self) -> Then | None:
        with self._lock:
            then, self._then = self._then, None
        return then

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            next_work: Work | None = work
            while next_work is not None:
                next_work = self._do(next_work)

    def _do(self, work: Work) -> Work | None:
        """Run it, and what the loop left to be done then; returns what follows at once."""
        try:
            result = work()
            then = self._take_then()
            if then is None:
                self._done.put(_Result(result))
                return None
            following = then(result)
        except BaseException as error:
            self._take_then()
            self._done.put(error)
            return None
        self._done.put(None)
        return following


class _Result:
    """Of work that ended before anyone waited."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value
