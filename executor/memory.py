"""The client of memd: registers, asks for a step, waits for its answer, and notices when memd is new.

Every reply carries memd's `boot_id` and `epoch`. When either changes, or memd says FENCED, STALE or GAP, all
blocks are gone: `Fenced` is raised, and the engine puts its requests back in the queue and registers again.
A message that is not answered is sent again under its own number, which memd answers at most once in effect.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Protocol

import msgspec

from executor.proposal import Wants
from wire.errors import Code, Refused
from wire.memory import (
    PROTOCOL,
    Goodbye,
    Granted,
    MemoryCodec,
    PoolSpec,
    Register,
    Registered,
    Rejected,
    Reply,
    Step,
)
from wire.rpc import Dealer, PeerGone

log = logging.getLogger(__name__)

Idle = Callable[
    [], None
]  # called every few milliseconds of a long wait; what it raises ends the wait

WAIT_MS = 20  # between calls of `idle`
RESEND_S = 0.25  # first silence after which a message is sent again; doubles up to
RESEND_MOST_S = 2.0
RENEW_LEASES = 0.25  # a step that takes longer than this many leases renews it meanwhile
SILENT_LEASES = 2  # a connection without a word for so many leases is given up for a new one
BUSY_LEASES = 2  # a pool name held by another executor is waited for this many leases
LEASE_S = 3.0  # assumed before memd says


class Fenced(Exception):
    """memd holds nothing for this executor any more: register again."""


class MemoryClient(Protocol):
    """What the engine needs of memd. At most one step is asked and not answered."""

    @property
    def lease(self) -> float:
        """Seconds without a message after which memd takes all blocks back."""

    @property
    def waited_us(self) -> int:
        """Microseconds spent waiting in `answer`, in all."""

    def register(self, idle: Idle) -> None:
        """Take a lease on an empty pool; waits until memd is there.

        Raises:
            Refused: memd will not have this executor.
        """

    def ask(self, wants: Wants) -> None:
        """Send what the next step wants, without waiting."""

    def hear(self, most_ms: int) -> Granted | None:
        """The answer, if it comes within so long; then `answer` must not be called. None also when memd says
        anything else, which `answer` then tells."""

    def answer(self, idle: Idle) -> Granted:
        """Wait for the answer to the step asked last.

        Raises:
            Fenced: memd has dropped this executor's blocks.
        """

    def renew(self) -> None:
        """While a step runs: send the message asked last again when a while has passed. It has no effect
        beside keeping the lease."""

    def stale(self) -> bool:
        """Whether so long has passed since memd last heard of us that it may be about to let go."""

    def close(self) -> None:
        """Give everything back."""


class RemoteMemory:
    """memd in its own process, over a socket."""

    def __init__(
        self,
        dealer: Dealer,
        instance: str,
        pool: PoolSpec,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._dealer = dealer
        self._instance = instance
        self._pool = pool
        self._clock = clock
        self._codec = MemoryCodec()
        self._registered: Registered | None = None
        self._number = 0
        self._payload = b""
        self._asked_at = 0.0
        self._sent = False
        self._early: list[Reply] = []  # replies that came while a step was running
        self._renewed = 0.0  # when the last message that was answered went out
        self._waited = 0.0
        self._patience = self.lease * 2 / 3  # seconds until it is not known what memd still holds

    @property
    def lease(self) -> float:
        return self._registered.lease_ms / 1000 if self._registered else LEASE_S

    @property
    def waited_us(self) -> int:
        return int(self._waited * 1e6)

    def register(self, idle: Idle) -> None:
        started = self._clock()
        busy_until = started + BUSY_LEASES * self.lease
        payload = self._codec.encode(Register(PROTOCOL, self._instance, self._pool))
        self._registered = None
        self._early.clear()
        told = False
        connected_at = started
        while True:
            sent_at = self._clock()
            if sent_at - connected_at > SILENT_LEASES * self.lease:
                self._dealer.reconnect()
                connected_at = sent_at
            connected = self._send(payload)
            reply = self._first_registration(sent_at + (1.0 if connected else 0.1), idle)
            match reply:
                case Registered():
                    self._registered = reply
                    self._patience = self.lease * 2 / 3
                    self._number = 0
                    self._renewed = sent_at
                    log.info(
                        "registered pool=%s generation=%d epoch=%d",
                        self._pool.name,
                        reply.generation,
                        reply.epoch,
                    )
                    return
                case Rejected(code=Code.POOL_BUSY) if self._clock() < busy_until:
                    self._pause(0.2, idle)
                case Rejected(code=Code.FENCED | Code.STALE | Code.GAP):
                    self._pause(0.05, idle)
                case Rejected():
                    raise Refused(reply.code, reply.message)
                case None if not told and self._clock() - started > 1:
                    told = True
                    log.warning("waiting for the memory daemon to answer")

    def ask(self, wants: Wants) -> None:
        registered = self._need_registration()
        self._number += 1
        self._payload = self._codec.encode(
            Step(
                self._instance,
                registered.generation,
                registered.epoch,
                self._number,
                wants.commits,
                wants.frees,
                wants.forks,
                wants.appends,
                wants.admits,
                wants.fills,
            )
        )
        self._asked_at = self._clock()
        self._sent = self._send(self._payload)

    def hear(self, most_ms: int) -> Granted | None:
        if self._early or not self._dealer.poll(most_ms):
            return None
        payload = self._dealer.take()
        if payload is None or (reply := self._decoded(payload)) is None:
            return None
        try:
            granted = self._judge(reply)
        except Fenced:
            self._early.append(reply)
            return None
        if granted is not None:
            self._renewed = self._asked_at
        return granted

    def answer(self, idle: Idle) -> Granted:
        started = self._clock()
        try:
            return self._answer(started, idle)
        finally:
            self._waited += self._clock() - started

    def renew(self) -> None:
        now = self._clock()
        if now - self._asked_at < RENEW_LEASES * self.lease:
            return
        if replies := list(self._replies()):
            self._early += replies
            self._renewed = self._asked_at
        self._asked_at = now
        self._sent = self._send(self._payload)

    def stale(self) -> bool:
        return self._clock() - self._renewed > self._patience

    def close(self) -> None:
        if self._registered is not None:
            goodbye = Goodbye(self._instance, self._registered.generation)
            self._send(self._codec.encode(goodbye))
            self._registered = None

    # ------------------------------------------------------------ inside

    def _answer(self, started: float, idle: Idle) -> Granted:
        patience, told = RESEND_S, False
        # What was asked while memd was away has not been sent at all.
        resend_at = started + (patience if self._sent else 0.0)
        while True:
            early, self._early = self._early, []
            for reply in chain(early, self._replies()):
                if (granted := self._judge(reply)) is not None:
                    self._renewed = self._asked_at
                    if told:
                        log.info("the memory daemon answers again")
                    return granted
            now = self._clock()
            if now >= resend_at:
                self._asked_at = now
                self._sent = self._send(self._payload)
                resend_at = now + (patience if self._sent else 0.05)
                patience = min(2 * patience, RESEND_MOST_S) if self._sent else RESEND_S
            if not told and now - started > self.lease * 2 / 3:
                told = True
                log.warning(
                    "no answer from the memory daemon for %.1f s: nothing is computed until it "
                    "comes (step=%d)",
                    now - started,
                    self._number,
                )
            if now - started > SILENT_LEASES * self.lease:
                self._dealer.reconnect()
                raise Fenced(f"memd has been silent for {now - started:.1f} s")
            if not self._dealer.poll(WAIT_MS):
                idle()

    def _judge(self, reply: Reply) -> Granted | None:
        """The answer waited for, or None for one of another message; raises Fenced."""
        registered = self._need_registration()
        if reply.boot_id != registered.boot_id or reply.epoch != registered.epoch:
            raise Fenced(f"memd is a new one: epoch {registered.epoch} became {reply.epoch}")
        match reply:
            case Granted() if reply.number == self._number:
                return reply
            case Granted():
                return None  # a repeated answer to an earlier step
            case Registered():
                if reply.generation != registered.generation:
                    raise Fenced("a repeated registration was answered late")
                return None
            case Rejected(code=Code.FENCED | Code.STALE | Code.GAP):
                if reply.number not in (0, self._number):
                    return None
                raise Fenced(reply.message)
            case Rejected():
                log.error("memd refused step=%d: %s: %s", reply.number, reply.code, reply.message)
                raise Fenced(reply.message)

    def _first_registration(self, until: float, idle: Idle) -> Registered | Rejected | None:
        """The newest answer to a registration, or None when none came; other replies are old."""
        while True:
            answers = [
                reply
                for reply in self._replies()
                if (isinstance(reply, Registered) and reply.instance == self._instance)
                or (isinstance(reply, Rejected) and reply.number == 0)
            ]
            if answers:
                # Asked twice because memd was slow, it registered twice: only the last one counts.
                return answers[-1]
            if self._clock() >= until:
                return None
            if not self._dealer.poll(WAIT_MS):
                idle()

    def _replies(self) -> Iterator[Reply]:
        """Lazily: to look for one more after the awaited one costs as much as the rest, for nothing."""
        for payload in self._dealer.receive():
            if (reply := self._decoded(payload)) is not None:
                yield reply

    def _decoded(self, payload: bytes) -> Reply | None:
        try:
            return self._codec.decode_reply(payload)
        except (msgspec.DecodeError, RecursionError) as error:
            log.error("dropped a malformed message from memd: %s", error)
            return None

    def _send(self, payload: bytes) -> bool:
        try:
            self._dealer.send(payload)
        except PeerGone:
            return False
        return True

    def _pause(self, seconds: float, idle: Idle) -> None:
        until = self._clock() + seconds
        while self._clock() < until:
            time.sleep(WAIT_MS / 1000)
            idle()

    def _need_registration(self) -> Registered:
        if self._registered is None:
            raise Fenced("not registered")
        return self._registered
