"""What chat and text completions share: from a checked request to pieces of text, metrics and usage.

A `Generation` is one HTTP request in the engine's hands. It is a context: leaving it, in whatever way,
aborts what is unfinished and records how it ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from aiohttp import web

from gateway.choice import Choice, Piece
from gateway.config import CONFIG
from gateway.engine import Engine
from gateway.errors import REQUEST_ID, ApiError, from_refusal
from gateway.inbox import Inbox, Sink
from gateway.limits import Ticket
from gateway.link import SubmitOptions
from gateway.metrics import METRICS, Metrics
from gateway.openai import PromptTokensDetails, Usage
from gateway.served import Model
from gateway.sse import DONE, PING, PING_S, EventStream
from wire.errors import Code, Refused
from wire.generate import Delta

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class Job:
    """A checked request.

    Attributes:
        prompts: token ids, one list per prompt; each gets `options.n` choices.
        echoes: text each choice of a prompt begins with, one per prompt.
    """

    prompts: Sequence[Sequence[int]]
    echoes: Sequence[str]
    options: SubmitOptions
    stops: Sequence[str] = ()
    include_stop: bool = False

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.options.n


class Generation:
    """One HTTP request being generated.

    Args:
        ticket: told when the first token is there; whoever took it gives it back.
        arrived: `time.monotonic()` when the request came in.
    """

    def __init__(
        self,
        engine: Engine,
        model: Model,
        metrics: Metrics,
        ticket: Ticket,
        job: Job,
        arrived: float,
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._ticket = ticket
        self.job = job
        self._arrived = arrived
        self._first: float | None = None  # when the first token came
        self._last = [0.0] * job.choices  # when the last token of each choice came
        self._inbox: Inbox
        self._open = job.choices
        self._choices = [
            Choice(
                index,
                model.vocabulary.detokenizer(job.prompts[index // job.options.n]),
                job.stops,
                job.include_stop,
                job.options.sampling.min_tokens,
                len(job.echoes[index // job.options.n]),
            )
            for index in range(job.choices)
        ]
        # Last pieces of choices that ended at a stop string while they were pushed.
        self._ended: dict[int, Piece] = {}
        self._reason = "abort"

    def __enter__(self) -> Self:
        self._inbox = self._engine.open()
        try:
            self._engine.submit(self._inbox, self.job.prompts, self.job.options)
        except Refused as refused:
            self._engine.release(self._inbox)
            raise from_refusal(refused.code, refused.message) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._engine.release(self._inbox)
        now = time.monotonic()
        self._metrics.on_finish(
            self._reason,
            sum(map(len, self.job.prompts)),
            sum(choice.generated for choice in self._choices),
            now - self._arrived,
            None
            if self._first is None
            else max(choice.queued_ms for choice in self._choices) / 1000,
            None if self._first is None else self._first - self._arrived,
        )

    @property
    def finished(self) -> bool:
        """Every choice has had its finish reason."""
        return self._open == 0

    async def next(self, patience: float, sink: Sink | None = None) -> list[Piece]:
        """The next pieces; empty when nothing came within `patience` seconds.

        Args:
            sink: made by `self.sink`; what it takes is not waited for.

        Raises:
            ApiError: the executor refused the request or is gone.
        """
        try:
            taken = await self._inbox.take(patience, sink)
        except Refused as refused:
            self._reason = "error"
            raise from_refusal(refused.code, refused.message) from None
        now = time.monotonic()
        pieces = []
        for index, delta in taken:
            choice = self._choices[index]
            if choice.finished:
                if (ended := self._ended.pop(index, None)) is None:
                    continue
                piece = ended
            else:
                piece = choice.feed(delta)
                self._observe(index, now)
            pieces.append(piece)
            if piece.finish is not None:
                self._open -= 1
                self._reason = piece.finish
                if not delta.finish:
                    self._inbox.finish(index)
        if self._open:
            self._reason = "abort"
        return pieces

    def sink(self, events: EventStream, render: Callable[[Piece], bytes]) -> Sink:
        """Writes what `next` would bring as it comes. Whatever is not a plain piece is left to `next`: the
        end of a choice, a client that left or reads slowly."""
        choices, last, monotonic = self._choices, self._last, time.monotonic
        on_token_gap = self._metrics.on_token_gap

        def sink(index: int, delta: Delta) -> bool:
            if delta.finish or not events.ready():
                return False
            choice = choices[index]
            if choice.finished:
                return True
            piece = choice.feed(delta)
            now = monotonic()
            if earlier := last[index]:
                on_token_gap(now - earlier)
            last[index] = now
            if piece.finish is not None:
                self._ended[index] = piece  # at a stop string
                return False
            events.push(render(piece))
            return True

        return sink

    def usage(self) -> Usage:
        """Prompt tokens are counted once per prompt, whatever the number of choices."""
        prompt = sum(map(len, self.job.prompts))
        generated = sum(choice.generated for choice in self._choices)
        cached = sum(choice.cached for choice in self._choices[:: self.job.options.n])
        return Usage(prompt, generated, prompt + generated, PromptTokensDetails(cached))

    def _observe(self, index: int, now: float) -> None:
        if self._first is None:
            self._first = now
            self._ticket.started()
            self._metrics.on_first_token(now - self._arrived)
        elif self._last[index]:
            self._metrics.on_token_gap(now - self._last[index])
        self._last[index] = now


async def collect(generation: Generation) -> list[list[Piece]]:
    """Everything, by choice. Raises ApiError as `Generation.next` does."""
    pieces: list[list[Piece]] = [[] for _ in range(generation.job.choices)]
    while not generation.finished:
        for piece in await generation.next(PING_S):
            pieces[piece.choice].append(piece)
    return pieces


async def stream(
    request: web.Request,
    generation: Generation,
    render: Callable[[Piece], bytes],
    last: Callable[[Usage], bytes] | None,
) -> web.StreamResponse:
    """Answer with a stream of events.

    Nothing is sent before the executor has answered, so that its refusals have an HTTP status. After
    the first byte a failure is an error event. Pieces after the first are written where they arrive;
    this coroutine sleeps until there is something else to do.

    Args:
        render: one piece as an event.
        last: the event with the usage, when it was asked for.
    """
    pieces = await generation.next(PING_S)
    events = EventStream(request, request.app[CONFIG].write_timeout)
    response = await events.open()
    sink = generation.sink(events, render)
    try:
        while not generation.finished:
            await events.send(b"".join(map(render, pieces)) or PING)
            pieces = await generation.next(PING_S, sink)
        closing = [*map(render, pieces), last(generation.usage()) if last else b"", DONE]
        await events.send(b"".join(closing))
    except ApiError as error:
        return await _fail(request, events, response, error)
    except ConnectionError:
        raise  # the client left
    except Exception:
        log.exception("unexpected error in a stream request=%s", request[REQUEST_ID])
        message = f"The server hit an unexpected error (request id {request[REQUEST_ID]}); retry."
        return await _fail(request, events, response, from_refusal(Code.INTERNAL, message))
    await events.close()
    return response


async def _fail(
    request: web.Request, events: EventStream, response: web.StreamResponse, error: ApiError
) -> web.StreamResponse:
    request.app[METRICS].on_error(error.code or str(error.status))
    await events.fail(error)
    return response
