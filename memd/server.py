"""The loop around the core: decode, call, encode, and count what goes wrong on the way.

Everything here runs on one asyncio loop and in one thread, so a message is handled whole before anything
else looks at the core: the admin server never sees half a step.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import msgspec

from memd.core import Memory
from memd.invariants import Broken
from wire.clock import PauseClock
from wire.errors import Code
from wire.memory import MAX_STEP, MemoryCodec, Rejected, Reply, Step
from wire.rpc import Limits, PeerGone, PeerSlow, Router, watch

log = logging.getLogger(__name__)

LIMITS = Limits(max_message=MAX_STEP)
TICK_S = 0.1
TURN_S = 0.005  # of messages that follow each other closely; then whoever asks over HTTP has a turn
LOOK_S = 1.0  # between two looks at the socket file
MOST_BAD_FRAMES = 8  # of one peer; what it sends after that is not even decoded
QUIET_S = 1.0  # after a line about a rejection, none about another with the same code
MOST_BAD_PEERS = 1024  # remembered; the one known longest is forgotten first
BUCKETS = (2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.25, 1.0)  # seconds


@dataclass(slots=True)
class Meter:
    """What the server has seen since it started."""

    messages: int = 0  # decoded
    bad_frames: int = 0  # not decodable, or of more parts than one
    dropped: int = 0  # of peers with too many bad frames
    internal_errors: int = 0
    peer_gone: int = 0  # replies nobody waited for
    peer_slow: int = 0  # replies lost because the peer does not read
    rejected: Counter[str] = field(default_factory=Counter)  # by code
    leases_ended: Counter[str] = field(default_factory=Counter)  # by reason
    step_buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    step_seconds: float = 0.0  # decode, core, encode and send, all steps together


class Server:
    """Answers executors on a router.

    Args:
        memory: the core.
        router: bound; closed by whoever made it.
        clock: seconds, standing still while the process does.
        on_broken: called once when this server is of no more use: the core's state was found broken after
            an unexpected error (nothing is answered from then on, because a wrong grant is worse than
            none), or the socket file is gone.
    """

    def __init__(
        self,
        memory: Memory,
        router: Router,
        clock: PauseClock,
        on_broken: Callable[[], None],
    ) -> None:
        self.memory = memory
        self.meter = Meter()
        self.clock = clock
        self._router = router
        self._on_broken = on_broken
        self._halted = False
        self._bad: dict[bytes, int] = {}
        self._pauses_told = 0
        self._looked = clock()  # for the socket file
        self._quiet_until: dict[str, float] = {}  # by code
        codec = MemoryCodec()
        self._decode, self._encode = codec.decode_request, codec.encode
        self._undo: list[Callable[[], None]] = []

    # ------------------------------------------------------------ on the loop

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer whatever arrives from now on, and look at the leases ten times a second."""
        handle: asyncio.TimerHandle

        def turn() -> None:
            nonlocal handle
            self.tick()
            handle = loop.call_later(TICK_S, turn)

        handle = loop.call_later(TICK_S, turn)
        self._undo = [watch(loop, self._router, self.drain), lambda: handle.cancel()]

    def stop(self) -> None:
        for undo in self._undo:
            undo()
        self._undo = []

    def tick(self) -> None:
        """End the leases that are over, let go of what they held, and see that we can be reached."""
        now = self.clock()
        if now - self._looked >= LOOK_S and not self._halted:
            self._looked = now
            if not self._router.reachable():
                # Those connected could go on, but none could come back.
                self._halted = True
                log.critical(
                    "the socket file was removed or replaced: stopping, to be started anew"
                )
                self._on_broken()
        if self.clock.pauses > self._pauses_told:
            self._pauses_told = self.clock.pauses
            log.warning("this process stood still for a while; leases were not counted down")
        ended = self.memory.tick(now)
        for lease in ended:
            self.meter.leases_ended[lease.reason] += 1
            log.log(
                logging.WARNING if lease.reason == "lease" else logging.INFO,
                "registration over pool=%s instance=%s generation=%d reason=%s sequences=%d used=%d",
                lease.pool,
                lease.instance,
                lease.generation,
                lease.reason,
                lease.sequences,
                lease.used,
            )
        if ended:
            gc.collect()  # a pool is full of cycles, and full collections happen only here

    def drain(self) -> None:
        """Answer all messages that wait."""
        clock, meter = self.clock, self.meter
        end = perf_counter() + TURN_S
        for peer, payload in self._router.receive():
            if self._halted:
                return
            if self._bad and self._bad.get(peer, 0) >= MOST_BAD_FRAMES:
                meter.dropped += 1
                continue
            started = perf_counter()
            try:
                request = self._decode(payload)
            except (msgspec.DecodeError, RecursionError) as error:
                self._send(peer, self._refuse_frame(peer, payload, error))
                continue
            meter.messages += 1
            try:
                reply = self.memory.answer(clock(), request, payload)
            except Exception:
                number = request.number if isinstance(request, Step) else 0
                reply = self._unexpected(number)
            if isinstance(reply, Rejected):
                self._note_rejected(reply)
            self._send(peer, reply)
            if isinstance(request, Step):
                taken = perf_counter() - started
                meter.step_seconds += taken
                meter.step_buckets[bisect_left(BUCKETS, taken)] += 1
                self._finish()
                if perf_counter() > end:
                    return  # called again at once if more has come

    def _finish(self) -> None:
        """The answer has gone: do what the step left to do, while the executor reads.

        On a CPU shared with us the thread that carries the answer waits for us to step aside, so do that
        first. To sleep until it is idle instead leaves all this to the next message, where steps follow each
        other closely, and going round the loop takes as long as the rest of the step.
        """
        os.sched_yield()
        try:
            self.memory.settle()
        except Exception:
            self._unexpected(0)

    def _send(self, peer: bytes, reply: Reply) -> None:
        try:
            self._router.send(peer, self._encode(reply))
        except PeerGone:
            self.meter.peer_gone += 1
        except PeerSlow:
            # It will ask again with the same number, or its lease will end.
            self.meter.peer_slow += 1

    # ------------------------------------------------------------ what should not happen

    def _refuse_frame(self, peer: bytes, payload: bytes, error: Exception) -> Rejected:
        self.meter.bad_frames += 1
        if peer not in self._bad and len(self._bad) >= MOST_BAD_PEERS:
            del self._bad[next(iter(self._bad))]
        count = self._bad[peer] = self._bad.get(peer, 0) + 1
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        log.warning("bad frame peer=%s bytes=%d: %s", peer.hex(), len(payload), reason)
        if count == MOST_BAD_FRAMES:
            log.warning("peer=%s sent %d bad frames: it is not heard any more", peer.hex(), count)
        return Rejected(
            self.memory.boot_id,
            self.memory.epoch,
            _number_of(payload),
            Code.INVALID,
            f"message of {len(payload)} bytes is not understood: {reason}; run one release on both sides",
        )

    def _note_rejected(self, reply: Rejected) -> None:
        code = reply.code.value
        self.meter.rejected[code] += 1
        # An executor may repeat itself as fast as it can; the log need not.
        if (now := self.clock()) >= self._quiet_until.get(code, now):
            self._quiet_until[code] = now + QUIET_S
            log.warning("rejected step=%d code=%s: %s", reply.number, code, reply.message)

    def _unexpected(self, number: int) -> Rejected:
        """A bug in the core. Go on only if every rule still holds."""
        self.meter.internal_errors += 1
        log.exception("unexpected error at step=%d", number)
        try:
            self.memory.check()
        except Broken as broken:
            log.critical("memory is inconsistent, stopping: %s", str(broken)[:2000])
            self._halted = True
            self._on_broken()
        return Rejected(
            self.memory.boot_id,
            self.memory.epoch,
            number,
            Code.INTERNAL,
            "memd failed on this message and its log says why; register again, and report it",
        )


def _number_of(payload: bytes) -> int:
    """The step number in a frame that breaks some other rule; 0 when there is none to be found."""
    try:
        frame: Any = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return 0
    match frame:
        case ["step", _, _, _, int(number), *_] if 0 <= number < 1 << 53:
            return number
    return 0
