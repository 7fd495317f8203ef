"""Server-sent events as OpenAI's clients read them, and a stream that does not wait for ever.

An event is `data: `, one line of JSON, LF LF; the last is exactly `data: [DONE]`. What is constant in a
stream's chunks is encoded once per choice: a token costs one encoded string and a few joins.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

import msgspec
from aiohttp import hdrs, web

from gateway.errors import ApiError, error_body

# Keeps proxies from closing a silent stream. Empty lines, which every reader passes over, and not a comment:
# some clients strip each chunk of its line ends before they look for the ends of events, and would glue a
# comment to all that follows.
PING = b"\n\n"
DONE = b"data: [DONE]\n\n"
PING_S = 15.0

HIGH_WATER = 16 << 10  # bytes in our buffer above which nothing is written
_SOCKET_BUFFER = 64 << 10  # bytes in the kernel's; its default would hide a reader that stopped
_UNBOUNDED = 1 << 30  # aiohttp's own flow control is switched off: it has no time limit
_POLL_S = 0.02

# Line ends to some clients' `splitlines`, though not to the standard's.
_LINE_ENDS = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
_encode = msgspec.json.Encoder().encode


def event(data: bytes) -> bytes:
    """One event that holds `data`, a single line."""
    return b"data: " + data + b"\n\n"


def json_text(text: str) -> bytes:
    """`text` as a JSON string in one line, whatever a reader takes for a line end."""
    encoded = _encode(text)
    if text.isascii():
        return encoded
    return encoded.decode().translate(_LINE_ENDS).encode()


def reset(transport: asyncio.Transport) -> None:
    """Close a connection at once, and have the kernel forget what the client left unread."""
    if (connection := transport.get_extra_info("socket")) is not None:
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


class SlowReader(ConnectionResetError):
    """The client did not read for too long; its connection was aborted."""


class EventStream:
    """A response of events.

    Args:
        request: answered by this stream.
        write_timeout: seconds without any progress after which the connection is aborted.
    """

    def __init__(self, request: web.Request, write_timeout: float) -> None:
        self._request = request
        self._write_timeout = write_timeout
        self._chunked = False
        self._response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the client left")
        self._transport = transport

    async def open(self) -> web.StreamResponse:
        """Send the headers."""
        connection = self._transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BUFFER)
        self._transport.set_write_buffer_limits(high=_UNBOUNDED)
        await self._response.prepare(self._request)
        self._chunked = self._response.headers.get(hdrs.TRANSFER_ENCODING) == "chunked"
        return self._response

    async def send(self, events: bytes) -> None:
        """Write whole events; returns when little enough is left unsent.

        Raises:
            SlowReader: nothing was read for `write_timeout` seconds.
            ConnectionResetError: the client left.
        """
        await self._response.write(events)
        if self._transport.get_write_buffer_size() > HIGH_WATER:
            await self._drained()

    def ready(self) -> bool:
        """Whether `push` may be called: the client is there and reads."""
        transport = self._transport
        return not transport.is_closing() and transport.get_write_buffer_size() <= HIGH_WATER

    def push(self, events: bytes) -> None:
        """Write whole events at once, between two calls of `send`, without a coroutine.

        What aiohttp would do for them, which only frames: a chunk to HTTP/1.1, plain bytes to HTTP/1.0,
        as the headers it sent say. It keeps nothing of a response's body but a count for access logs.
        """
        if self._chunked:
            events = b"%x\r\n%b\r\n" % (len(events), events)
        self._transport.write(events)

    async def fail(self, error: ApiError) -> None:
        """End the stream with an error event."""
        await self.send(event(error_body(error)))
        await self.close()

    async def close(self) -> None:
        """End the response; the connection may serve another."""
        await self._response.write_eof()
        if not self._transport.is_closing():
            self._transport.set_write_buffer_limits()

    async def _drained(self) -> None:
        loop = asyncio.get_running_loop()
        least, progress = self._transport.get_write_buffer_size(), loop.time()
        while (left := self._transport.get_write_buffer_size()) > HIGH_WATER:
            if self._transport.is_closing():
                raise ConnectionResetError("the client left")
            if left < least:
                least, progress = left, loop.time()
            elif loop.time() - progress > self._write_timeout:
                reset(self._transport)
                raise SlowReader(f"the client read nothing for {self._write_timeout:g} s")
            await asyncio.sleep(_POLL_S)
