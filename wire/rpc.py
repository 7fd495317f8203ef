"""Sockets with every limit set, and nothing on them but msgpack in one frame.

ROUTER and DEALER over ipc, non-blocking: a process drains what has arrived, handles it, and sends
without waiting. That serves both a plain loop (the executor's, which alternates with the device) and an
asyncio loop (`watch`, used by memd and the gateway), at half the cost of zmq's own asyncio layer.

libzmq defaults that hurt and are set here: unlimited message size, linger and send timeouts, a ROUTER
that drops silently for an unknown or slow peer, a DEALER that queues for a peer that is not there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq
import zmq.backend

MAX_IPC_PATH = 107  # bytes in sockaddr_un.sun_path, less the closing zero

# Made once: zmq's flags are Python enums, and adding two takes longer than sending.
_NOW = int(zmq.NOBLOCK)
_NOW_AND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_send = zmq.backend.Socket.send  # what zmq.Socket.send calls, after things that are not used here


class PeerGone(Exception):
    """The peer is not connected (any more); the message was not sent."""


class PeerSlow(Exception):
    """The peer's queue is full; the message was not sent."""


class BadEndpoint(ValueError):
    """An address this server will not use, and why."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one socket. Sizes in bytes, queue lengths in messages, times in milliseconds."""

    max_message: int = 1 << 20
    queue: int = 1024
    connect_ms: int = 1000
    handshake_ms: int = 2000
    reconnect_ms: int = 50
    reconnect_max_ms: int = 2000
    heartbeat_ms: int = 500
    heartbeat_timeout_ms: int = 5000


def private_directory(path: Path) -> Path:
    """Make `path` (and parents) a directory that only this user can enter; returns it.

    Raises:
        BadEndpoint: it belongs to someone else, or others may enter it.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise BadEndpoint(
            f"{path} belongs to uid {found.st_uid}, not to this process's {os.geteuid()}: "
            "choose another --run-dir"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise BadEndpoint(
            f"{path} has mode {stat.S_IMODE(found.st_mode):o}, so other users could reach the "
            f"sockets in it: chmod 700 {path}, or choose another --run-dir"
        )
    return path


def ipc(path: Path) -> str:
    """The endpoint of a socket file.

    Raises:
        BadEndpoint: the path is too long for a Unix socket.
    """
    if len(os.fsencode(path)) > MAX_IPC_PATH:
        raise BadEndpoint(
            f"socket path {path} has {len(os.fsencode(path))} bytes, the system allows "
            f"{MAX_IPC_PATH}: choose a shorter --run-dir"
        )
    return f"ipc://{path}"


class _Socket:
    """A zmq socket whose every limit is set; closes without waiting."""

    def __init__(self, kind: int, limits: Limits) -> None:
        self._context = zmq.Context(io_threads=1)
        self._kind = kind
        self._limits = limits
        self.raw = self._open()
        self._watch_raw()
        self.empty = False  # looked since the last send, and nothing waited

    def _watch_raw(self) -> None:
        """A poller is made once: a socket's own `poll` makes one for every call."""
        self._poller = zmq.Poller()
        self._poller.register(self.raw, zmq.POLLIN)

    def _open(self) -> zmq.Socket[bytes]:
        raw: zmq.Socket[bytes] = self._context.socket(self._kind)
        limits = self._limits
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, limits.max_message),
            (zmq.SNDHWM, limits.queue),
            (zmq.RCVHWM, limits.queue),
            (zmq.SNDTIMEO, 0),
            (zmq.RCVTIMEO, 0),
            (zmq.CONNECT_TIMEOUT, limits.connect_ms),
            (zmq.HANDSHAKE_IVL, limits.handshake_ms),
            (zmq.RECONNECT_IVL, limits.reconnect_ms),
            (zmq.RECONNECT_IVL_MAX, limits.reconnect_max_ms),
            (zmq.HEARTBEAT_IVL, limits.heartbeat_ms),
            (zmq.HEARTBEAT_TIMEOUT, limits.heartbeat_timeout_ms),
            (zmq.IMMEDIATE, 1),
        ):
            raw.setsockopt(option, value)
        return raw

    @property
    def closed(self) -> bool:
        return bool(self.raw.closed)

    def poll(self, timeout_ms: int) -> bool:
        """Wait until something can be received; False after `timeout_ms`."""
        return bool(self._poller.poll(timeout_ms))

    def more(self) -> bool:
        """Whether a message waits. Trying to take one costs three times as much where none does, and pyzmq
        makes more of asking for an option than of polling."""
        self.empty = not self._poller.poll(0)
        return not self.empty

    def close(self) -> None:
        self.raw.close(linger=0)
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()


class Router(_Socket):
    """The side that binds. Peers get identities from libzmq, so no two can share one."""

    def __init__(self, endpoint: str, limits: Limits) -> None:
        super().__init__(zmq.ROUTER, limits)
        self.raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self.raw.bind(endpoint)
        except zmq.ZMQError:
            super().close()
            raise
        self._file = Path(endpoint.removeprefix("ipc://"))
        self._inode = self._file.stat().st_ino

    def reachable(self) -> bool:
        """Whether the socket file is still ours; without it nobody can connect any more."""
        try:
            return self._file.stat().st_ino == self._inode
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return True  # it cannot be told

    def close(self) -> None:
        """Close, and remove the socket file, which libzmq leaves; not one that a successor has made."""
        if not self.closed:
            with contextlib.suppress(FileNotFoundError):
                if self._file.stat().st_ino == self._inode:
                    self._file.unlink()
        super().close()

    def receive(self, most: int = 1024) -> Iterator[tuple[bytes, bytes]]:
        """Yield up to `most` waiting (peer, payload) pairs; messages of any other shape are dropped."""
        for _ in range(most):
            try:
                peer = self.raw.recv(_NOW)
            except zmq.Again:
                self.empty = True
                return
            payload = self._payload()  # a message is there whole, or not at all
            self.empty = False
            if payload is not None:
                yield peer, payload
            if not self.more():
                return

    def _payload(self) -> bytes | None:
        """The next part, which must be the last of its message: else None, and the rest is dropped."""
        first = part = self.raw.recv(_NOW, copy=False)
        while part.more:
            part = self.raw.recv(_NOW, copy=False)
        return first.bytes if part is first else None

    def send(self, peer: bytes, payload: bytes) -> None:
        """Queue one message for a peer.

        Raises:
            PeerGone: it is not connected.
            PeerSlow: its queue is full.
        """
        self.empty = False
        try:
            _send(self.raw, peer, _NOW_AND_MORE)
            _send(self.raw, payload, _NOW)
        except zmq.Again:
            raise PeerSlow from None
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.ENOTCONN):
                raise PeerGone from None
            raise


class Dealer(_Socket):
    """The side that connects, and reconnects by itself."""

    def __init__(self, endpoint: str, limits: Limits) -> None:
        super().__init__(zmq.DEALER, limits)
        self._endpoint = endpoint
        self.raw.connect(endpoint)

    def reconnect(self) -> None:
        """Start over with a new connection. libzmq does not come back by itself from every error: not, for
        one, from a message larger than the limit."""
        self.raw.close(linger=0)
        self.raw = self._open()
        self._watch_raw()
        self.raw.connect(self._endpoint)

    def take(self) -> bytes | None:
        """The next payload, if one has arrived: `receive` for one who waits for just one."""
        try:
            payload = self.raw.recv(_NOW)
        except zmq.Again:
            self.empty = True
            return None
        self.empty = False
        return payload

    def receive(self, most: int = 1024) -> Iterator[bytes]:
        """Yield up to `most` waiting payloads. Peers send messages of one part; were there more, each would
        be a payload of its own."""
        for _ in range(most):
            if (payload := self.take()) is None:
                return
            yield payload
            if not self.more():
                return

    def send(self, payload: bytes) -> None:
        """Queue one message.

        Raises:
            PeerGone: nobody is connected, or the queue is full.
        """
        self.empty = False
        try:
            _send(self.raw, payload, _NOW)
        except zmq.Again:
            raise PeerGone from None


def watch(
    loop: asyncio.AbstractEventLoop, socket: _Socket, drain: Callable[[], None], every: float = 0.1
) -> Callable[[], None]:
    """Call `drain` on `loop` whenever `socket` may have something to receive; returns the undo.

    zmq's descriptor is edge-triggered and a send can swallow an edge, so `drain` must receive until
    nothing is left, and is also called every `every` seconds, and again while EVENTS says there is more.
    """
    handle: asyncio.TimerHandle | None = None
    stopped = False

    def ready() -> None:
        if stopped or socket.closed:
            return
        socket.empty = False
        drain()
        # More than one drain's worth, or an edge lost to a send inside it: come back soon.
        if not socket.empty and not socket.closed and socket.more():
            loop.call_soon(ready)

    def tick() -> None:
        nonlocal handle
        ready()
        if not stopped:
            handle = loop.call_later(every, tick)

    descriptor = int(socket.raw.get(zmq.FD))
    loop.add_reader(descriptor, ready)
    handle = loop.call_later(every, tick)
    loop.call_soon(ready)

    def stop() -> None:
        nonlocal stopped
        stopped = True
        if handle is not None:
            handle.cancel()
        loop.remove_reader(descriptor)

    return stop
