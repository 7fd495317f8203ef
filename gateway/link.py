"""One executor as seen from this gateway: a session, submissions, what comes back, aborts that always go out.

A link holds a DEALER socket on the asyncio loop. It says `Hello` until it is welcomed, pings, and watches:
an executor that is silent, disconnected or has forgotten the session has lost all requests, and each of
them ends at once with `Code.LOST`.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec

from gateway.inbox import Inbox, Submission
from gateway.metrics import Metrics
from gateway.served import Model, build_model
from gateway.template import BadTemplate
from gateway.vocabulary import BadTokenizer
from wire.clock import PauseClock
from wire.errors import Code, Refused
from wire.generate import (
    MAX_TO_GATEWAY,
    PING_MS,
    PROTOCOL,
    Abort,
    Bye,
    Events,
    Failed,
    GenerateCodec,
    Gone,
    Hello,
    ModelCard,
    Ping,
    Status,
    Submit,
    ToExecutor,
    Welcome,
)
from wire.rpc import Dealer, Limits, PeerGone, watch
from wire.sampling import Sampling

log = logging.getLogger(__name__)

SILENCE_S = 3.0  # an executor's Status comes twice a second; this long without anything: lost
FORGOTTEN_S = 5.0  # an executor that says it has nothing to do does not run what we wait for
_HELLO_S = 0.5
_MISMATCH_S = 5.0  # until an executor of another version is asked again
_BEAT_S = 0.25
_SEEK_S = 0.05  # the same while there is no session: a restart should not be felt


@dataclass(slots=True, frozen=True)
class SubmitOptions:
    """What all submissions of one HTTP request have in common."""

    sampling: Sampling
    n: int = 1
    priority: int = 0
    tenant: str = ""


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as they travel: uint32, little-endian."""
    return struct.pack(f"<{len(tokens)}I", *tokens)


class Link:
    """One executor, as seen from this gateway.

    Attributes:
        name: of its socket.
        status: the last it reported; None without a session.
        model: what it serves; None until the first welcome.
    """

    def __init__(
        self,
        index: int,
        name: str,
        endpoint: str,
        gateway: str,
        codec: GenerateCodec,
        metrics: Metrics,
    ) -> None:
        self.index = index
        self.name = name
        self.status: Status | None = None
        self.model: Model | None = None
        self._endpoint = endpoint
        self._hello = Hello(PROTOCOL, gateway)
        self._codec = codec
        self._metrics = metrics
        self._live: dict[int, Submission] = {}
        self._unsent: list[Abort] = []  # aborts the socket could not take; sent with the next beat
        self._session: str | None = None  # the executor's instance, once welcomed
        self._building: asyncio.Task[None] | None = None
        self._problem = "it has not answered yet"
        self._heard = self._greeted = self._pinged = 0.0
        self._idle_since: float | None = None
        self._closing = False

    # ------------------------------------------------------------ what others ask

    @property
    def load(self) -> int:
        """Sequences it has or is about to have."""
        reported = self.status.running + self.status.waiting if self.status else 0
        return max(reported, len(self._live))

    def not_ready(self) -> str:
        """Why it takes no requests now, for people; empty when it does."""
        if self._session is None or self.model is None or self.status is None:
            return self._problem
        if self.status.draining:
            return "it is shutting down"
        return "" if self.status.ready else self.status.reason or "it is not ready"

    def submit(
        self, inbox: Inbox, base: int, id: int, tokens: Sequence[int], rest: SubmitOptions
    ) -> None:
        """Send a request whose choices appear in `inbox` from index `base` on.

        Raises:
            Refused: it cannot be sent.
        """
        message = Submit(
            id=id,
            tokens=pack(tokens),
            sampling=rest.sampling,
            n=rest.n,
            priority=rest.priority,
            tenant=rest.tenant,
        )
        if not self._send(message):
            log.warning("executor=%s takes no request now: its socket is full or gone", self.name)
            raise Refused(
                Code.UNAVAILABLE, "The model takes no requests now; try again in a few seconds."
            )
        submission = Submission(self, id, inbox, base, rest.n, self._clock())
        self._live[id] = submission
        inbox.add(submission)

    def abort(self, id: int) -> None:
        """Tell the executor that nobody waits for `id`, unless it is finished already."""
        if self._live.pop(id, None) is not None and not self._send(Abort(id)):
            self._unsent.append(Abort(id))

    # ------------------------------------------------------------ the socket

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._clock = PauseClock(loop.time, SILENCE_S / 2)  # looked at with every beat
        limits = Limits(max_message=MAX_TO_GATEWAY, queue=4096)
        self._dealer = Dealer(self._endpoint, limits)
        self._unwatch: Callable[[], None] = watch(loop, self._dealer, self._receive)
        self._timer = loop.call_soon(self._beat)

    def close(self) -> None:
        self._closing = True
        self._send(Bye())
        self._timer.cancel()
        if self._building is not None:
            self._building.cancel()
        self._lose("this gateway stops")
        self._unwatch()
        self._dealer.close()
        if self.model is not None:
            self.model.vocabulary.close()

    def _send(self, message: ToExecutor) -> bool:
        try:
            self._dealer.send(self._codec.encode(message))
        except PeerGone:
            return False
        return True

    def _beat(self) -> None:
        now = self._clock()
        if self._session is None:
            self._timer = self._loop.call_later(_SEEK_S, self._beat)
            if now - self._greeted >= _HELLO_S and self._send(self._hello):
                self._greeted = now
            return
        self._timer = self._loop.call_later(_BEAT_S, self._beat)
        if now - self._heard > SILENCE_S:
            self._receive()  # it may be this loop that was busy
        if now - self._heard > SILENCE_S:
            self._lose(f"it has been silent for {SILENCE_S:g} s")
        elif now - self._pinged >= PING_MS / 1000:
            self._pinged = now
            if not self._send(Ping()):
                self._lose("its connection broke")
        while self._unsent and self._send(self._unsent[-1]):
            self._unsent.pop()
        self._fail_forgotten(now)

    def _receive(self) -> None:
        for payload in self._dealer.receive():
            try:
                message = self._codec.decode_to_gateway(payload)
            except (msgspec.DecodeError, RecursionError) as error:
                log.error("executor=%s sent a malformed message: %s", self.name, error)
                continue
            self._heard = self._clock()
            match message:
                case Events():
                    self._on_events(message)
                case Status():
                    self._on_status(message)
                case Welcome():
                    self._on_welcome(message)
                case Gone():
                    self._on_gone(message)

    # ------------------------------------------------------------ what arrives

    def _on_events(self, events: Events) -> None:
        for delta in chain(events.deltas, events.tokens.deltas()):
            submission = self._live.get(delta.id)
            if submission is None or delta.index not in submission.open:
                continue  # aborted meanwhile, or the choice was ended by a stop string
            submission.touched = self._heard
            if delta.finish:
                submission.open.discard(delta.index)
                if not submission.open:
                    del self._live[delta.id]
            submission.inbox.put(submission.base + delta.index, delta)
        for failed in events.failed:
            self._on_failed(failed)

    def _on_failed(self, failed: Failed) -> None:
        if (submission := self._live.pop(failed.id, None)) is not None:
            submission.inbox.fail(Refused(failed.code, failed.message))

    def _on_status(self, status: Status) -> None:
        if self._session is None:
            return
        self.status = status
        self._metrics.on_executor_status(self.index, status)
        if status.running or status.waiting:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._heard

    def _on_welcome(self, welcome: Welcome) -> None:
        if welcome.protocol[0] != PROTOCOL[0]:
            self._problem = (
                f"it speaks protocol {welcome.protocol[0]}, this gateway {PROTOCOL[0]}: "
                "run the same version of both"
            )
            log.error("executor=%s: %s", self.name, self._problem)
            self._greeted = self._heard + _MISMATCH_S
            return
        if self._session not in (None, welcome.executor):
            self._lose("it was restarted")
        if self._session is None:
            log.info("executor=%s instance=%s: session open", self.name, welcome.executor)
        self._session = welcome.executor
        if self.model is None or self.model.card != welcome.card:
            if self._building is not None:
                self._building.cancel()
            self._building = self._loop.create_task(self._build(welcome.card))

    def _on_gone(self, gone: Gone) -> None:
        if self._session is not None:
            self._lose(f"it ended the session: {gone.message}")
        elif gone.code == Code.PROTOCOL:
            self._problem = gone.message
            self._greeted = self._heard + _MISMATCH_S

    async def _build(self, card: ModelCard) -> None:
        self._problem = "its tokenizer is being loaded"
        try:
            model = await asyncio.to_thread(build_model, card)
        except (BadTokenizer, BadTemplate) as error:
            self._problem = str(error)
            log.error("executor=%s: %s", self.name, error)
            return
        self.model = model
        log.info("executor=%s serves model=%s", self.name, card.name)

    # ------------------------------------------------------------ what is lost

    def _lose(self, why: str) -> None:
        """The session is over: every request of it ends now."""
        if self._session is None:
            return
        level = logging.INFO if self._closing else logging.WARNING
        log.log(level, "executor=%s lost requests=%d: %s", self.name, len(self._live), why)
        self._session = self.status = self._idle_since = None
        self._problem = f"it is not connected: {why}"
        self._greeted = 0.0
        self._unsent.clear()
        self._metrics.on_executor_gone(self.index)
        lost, self._live = self._live, {}
        for submission in lost.values():
            submission.inbox.fail(
                Refused(
                    Code.LOST,
                    "The model broke off before this request was finished; send the request again "
                    "in a few seconds.",
                )
            )

    def _fail_forgotten(self, now: float) -> None:
        """No client waits for a request that the executor does not know of."""
        if self._idle_since is None:
            return
        for id, submission in list(self._live.items()):
            if now - max(submission.touched, self._idle_since) > FORGOTTEN_S:
                log.error("executor=%s request=%d: nothing came and it is idle", self.name, id)
                self.abort(id)
                submission.inbox.fail(
                    Refused(Code.INTERNAL, "The executor lost track of this request; retry.")
                )
