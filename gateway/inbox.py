"""What comes back for one HTTP request, which may be several submissions of several choices."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

import msgspec

from wire.generate import Delta

# Takes a delta of a choice at once, or returns False to have it waited for; it must not block.
Sink = Callable[[int, Delta], bool]


class Aborts(Protocol):
    """The part of a link an inbox needs."""

    def abort(self, id: int) -> None:
        """Nobody waits for request `id` any more. Harmless when it is finished."""


class Submission:
    """One `Submit` that is not finished yet."""

    __slots__ = ("base", "id", "inbox", "link", "open", "touched")

    def __init__(self, link: Aborts, id: int, inbox: Inbox, base: int, n: int, now: float) -> None:
        self.link = link
        self.id = id
        self.inbox = inbox
        self.base = base  # index of its first choice among the inbox's
        self.open = set(range(n))  # choices that may still bring something
        self.touched = now


class Inbox:
    """What comes back for one HTTP request: deltas by choice, or its failure.

    Deltas that arrive faster than they are taken are merged, so an inbox holds at most one delta per
    choice, and no more tokens than the request may generate.

    While `take` waits with a sink, a delta goes straight to it, and whoever waits sleeps on: waking a task
    for every token of every stream costs more than the rest of the token.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[int, Delta] = {}
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Sink | None = None  # set while somebody waits and nothing has come for them
        self._patience = 0.0
        self._until = 0.0  # when the waiter is to be woken without anything
        self._moved = False  # the sink took something since the last tick
        self._submissions: list[Submission] = []

    async def take(self, patience: float, sink: Sink | None = None) -> list[tuple[int, Delta]]:
        """All that has arrived, as (choice, delta); waits for something, about `patience` seconds at most.

        Empty when nothing came. What `sink` takes is not waited for, and starts the patience anew.
        Raises:
            Refused: the request failed; everything that arrived before was taken.
            Exception: as `sink` raised it.
        """
        if not self._waiting and self._failure is None:
            # No timer of its own: one for every token of every stream would cost more than the token.
            self._patience = patience
            self._until = self._loop.time() + patience
            self._waiter = self._loop.create_future()
            self._sink = sink
            try:
                await self._waiter
            finally:
                self._waiter = self._sink = None
        if self._waiting:
            taken = list(self._waiting.items())
            self._waiting.clear()
            return taken
        if self._failure is not None:
            raise self._failure
        return []

    def finish(self, choice: int) -> None:
        """This choice needs nothing more (a stop string ended it). Other choices go on; a submission
        none of whose choices is needed is aborted."""
        self._waiting.pop(choice, None)
        for submission in self._submissions:
            index = choice - submission.base
            if index in submission.open:
                submission.open.discard(index)
                if not submission.open:
                    submission.link.abort(submission.id)

    def close(self) -> None:
        """Nothing is needed any more: abort what is unfinished. Harmless when repeated."""
        for submission in self._submissions:
            submission.link.abort(submission.id)
        self._submissions.clear()
        self._waiting.clear()

    def add(self, submission: Submission) -> None:
        self._submissions.append(submission)

    def put(self, choice: int, delta: Delta) -> None:
        if self._sink is not None:
            try:
                if self._sink(choice, delta):
                    self._moved = True
                    return
            except Exception as error:  # whoever waits reports it; others' deltas go on
                self.fail(error)
                return
        if (earlier := self._waiting.get(choice)) is not None:
            delta = msgspec.structs.replace(
                delta,
                tokens=earlier.tokens + delta.tokens,
                cached=earlier.cached or delta.cached,
                queued_ms=earlier.queued_ms or delta.queued_ms,
                logprobs=earlier.logprobs + delta.logprobs,
            )
        self._waiting[choice] = delta
        self._wake()

    def fail(self, failure: Exception) -> None:
        """End the request; the first failure is the one reported."""
        self._failure = self._failure or failure
        self._wake()

    def tick(self, now: float) -> None:
        """Called now and then: ends a wait that has lasted as long as it may."""
        if self._moved:
            self._moved = False
            self._until = now + self._patience
        elif now >= self._until:
            self._wake()

    def _wake(self) -> None:
        self._sink = None  # what comes from now on is behind what wakes
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
