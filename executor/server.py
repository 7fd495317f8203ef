"""The side that gateways talk to: sessions, submissions, and one `Events` per step and gateway.

Nothing here waits for a gateway: one that is gone, silent for `session_ms` or too slow to take its
events loses its session, and its requests are aborted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from executor.news import News
from executor.scheduler import Scheduler
from wire.clock import PauseClock
from wire.errors import Code, Refused
from wire.generate import (
    PROTOCOL,
    STATUS_MS,
    Abort,
    Bye,
    Delta,
    Events,
    Failed,
    GenerateCodec,
    Gone,
    Hello,
    ModelCard,
    Ping,
    Status,
    Submit,
    ToGateway,
    Tokens,
    Welcome,
)
from wire.rpc import PeerGone, PeerSlow, Router

log = logging.getLogger(__name__)

SESSION_MS = 3000
NO_TOKENS = Tokens()
MOST_BAD_FRAMES = 16  # of one gateway; then its session ends


@dataclass(slots=True)
class Session:
    """A gateway that said Hello on one connection."""

    gateway: str
    heard: float
    bad_frames: int = 0


@dataclass(slots=True)
class Served:
    """What there is to serve, once the model is loaded."""

    welcome: bytes
    scheduler: Scheduler
    status: Callable[[], Status]


class Server:
    """Owns the ROUTER socket; called from the step loop, and while the loop waits for something."""

    def __init__(
        self, router: Router, instance: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._router = router
        self._instance = instance
        self._clock = clock
        self._awake = PauseClock(clock, SESSION_MS / 2000)  # nobody is silent while we hear nothing
        self._codec = GenerateCodec()
        self._sessions: dict[bytes, Session] = {}
        self._served: Served | None = None
        self._failed: list[tuple[bytes, Failed]] = []
        self._status_due = 0.0
        self.reason = "the model is loading"  # why a Hello is not welcomed yet
        self.draining = False
        self.bad_frames = 0

    def open(self, card: ModelCard, scheduler: Scheduler, status: Callable[[], Status]) -> None:
        """From now on gateways are welcome."""
        welcome = Welcome(PROTOCOL, self._instance, SESSION_MS, card)
        self._served = Served(self._codec.encode(welcome), scheduler, status)

    def poll(self, timeout_ms: int) -> bool:
        """Wait for a message; False when none came in time."""
        return self._router.poll(timeout_ms)

    def service(self) -> None:
        """Handle what has arrived, end silent sessions, send `Status` when it is due. Never waits."""
        if self._router.more():
            for peer, payload in self._router.receive():
                self._receive(peer, payload)
        awake = self._awake()
        if awake >= self._status_due:
            self._status_due = awake + STATUS_MS / 1000
            self._every_half_second(awake)
        if self._failed:
            failed, self._failed = self._failed, []
            self.emit(News(), failed)

    def emit(self, news: News, failed: list[tuple[bytes, Failed]]) -> None:
        """Send what a step brought, one message per gateway."""
        if not news.deltas and not failed:
            for peer, tokens in news.tokens:
                if peer in self._sessions:
                    self._send(peer, self._codec.encode(Events(tokens=tokens)))
            return
        events: dict[bytes, tuple[list[Delta], list[Failed]]] = {}
        for peer, delta in news.deltas:
            events.setdefault(peer, ([], []))[0].append(delta)
        for peer, failure in failed:
            events.setdefault(peer, ([], []))[1].append(failure)
        columns = dict(news.tokens)
        for peer in events.keys() | columns.keys():
            if peer in self._sessions:
                parts = events.get(peer, ([], []))
                self._send(peer, self._codec.encode(Events(*parts, columns.get(peer, NO_TOKENS))))

    def send_status(self) -> None:
        """Tell all gateways how things are, now."""
        if self._served is None or not self._sessions:
            return
        payload = self._codec.encode(self._served.status())
        for peer in list(self._sessions):
            self._send(peer, payload)

    def close(self, message: str) -> None:
        """Tell all gateways that their sessions are over. The socket stays open."""
        payload = self._codec.encode(Gone(Code.UNAVAILABLE, message))
        for peer in list(self._sessions):
            self._send(peer, payload)
        self._sessions.clear()

    # ------------------------------------------------------------ inside

    def _receive(self, peer: bytes, payload: bytes) -> None:
        try:
            message = self._codec.decode_to_executor(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            self._bad_frame(peer, str(error))
            return
        session = self._sessions.get(peer)
        if isinstance(message, Hello):
            self._hello(peer, message)
            return
        if session is None or self._served is None:
            if not isinstance(message, Bye):
                self._answer(peer, Gone(Code.UNAVAILABLE, "no session: say Hello first"))
            return
        session.heard = self._awake()
        match message:
            case Submit():
                self._submit(peer, message, self._served.scheduler)
            case Abort():
                self._served.scheduler.abort(peer, message.id)
            case Ping():
                pass
            case Bye():
                self._end(peer, "said goodbye")

    def _hello(self, peer: bytes, hello: Hello) -> None:
        if hello.protocol[0] != PROTOCOL[0]:
            ours, theirs = (".".join(map(str, v)) for v in (PROTOCOL, hello.protocol))
            text = f"this executor speaks protocol {ours}, the gateway {theirs}: use one version"
            self._answer(peer, Gone(Code.PROTOCOL, text))
            return
        if self._served is None:
            self._answer(peer, Gone(Code.UNAVAILABLE, self.reason))
            return
        for other, session in list(self._sessions.items()):
            if other == peer or session.gateway == hello.gateway:
                self._end(other, "opened a new session")
        self._sessions[peer] = Session(hello.gateway, self._awake())
        log.info("session opened gateway=%s", hello.gateway)
        self._send(peer, self._served.welcome)
        self._send(peer, self._codec.encode(self._served.status()))

    def _submit(self, peer: bytes, submit: Submit, scheduler: Scheduler) -> None:
        try:
            if self.draining:
                raise Refused(Code.DRAINING, "this executor is shutting down: use another one")
            deadline = self._clock() + submit.deadline_ms / 1000 if submit.deadline_ms else None
            scheduler.submit(peer, submit, deadline)
        except Refused as error:
            if error.code is Code.DUPLICATE:
                # A failure ends its id for good, so the older request of that id ends with it.
                scheduler.abort(peer, submit.id)
            log.info("refused request=%d %s", submit.id, error)
            self._failed.append((peer, Failed(submit.id, error.code, error.message)))

    def _bad_frame(self, peer: bytes, why: str) -> None:
        self.bad_frames += 1
        session = self._sessions.get(peer)
        if session is None:
            return
        session.bad_frames += 1
        log.warning("dropped a malformed message gateway=%s: %s", session.gateway, why)
        if session.bad_frames > MOST_BAD_FRAMES:
            self._answer(peer, Gone(Code.PROTOCOL, f"{session.bad_frames} malformed messages"))
            self._end(peer, "sent malformed messages")

    def _every_half_second(self, awake: float) -> None:
        for peer, session in list(self._sessions.items()):
            if awake - session.heard > SESSION_MS / 1000:
                self._answer(peer, Gone(Code.UNAVAILABLE, "the session timed out"))
                self._end(peer, f"was silent for {awake - session.heard:.1f} s")
        if self._served is not None:
            self._served.scheduler.expire(self._clock())
            self._failed += self._served.scheduler.take_failures()
        self.send_status()

    def _end(self, peer: bytes, why: str) -> None:
        session = self._sessions.pop(peer, None)
        if session is not None and self._served is not None:
            aborted = self._served.scheduler.abort_all(peer)
            log.info("session ended gateway=%s: it %s; %d aborted", session.gateway, why, aborted)

    def _answer(self, peer: bytes, message: ToGateway) -> None:
        """Send to a peer that may have no session: if it cannot be reached, so be it."""
        try:
            self._router.send(peer, self._codec.encode(message))
        except (PeerGone, PeerSlow):
            log.debug("could not answer a peer without a session")

    def _send(self, peer: bytes, payload: bytes) -> None:
        try:
            self._router.send(peer, payload)
        except PeerGone:
            self._end(peer, "disconnected")
        except PeerSlow:
            self._end(peer, "was too slow to take its events")
