"""The front door: what every connection and request passes before a handler sees it.

aiohttp has no deadline for request headers nor for what clients leave unread, no cap on connections, and
answers malformed HTTP in plain text. `GuardedRunner` serves an application with all that put right;
`protect` gives an application its middlewares in the one order that is safe.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import struct
from http import HTTPStatus
from typing import Any, cast

from aiohttp import hdrs, web

from gateway import auth, cors, errors
from gateway.config import CONFIG, GatewayConfig
from gateway.errors import ApiError, error_body, error_response, new_request_id, retry_headers
from gateway.sse import reset
from wire.errors import Code

log = logging.getLogger(__name__)

_LINGER = (
    2.0  # seconds to swallow what a refused client still sends, so that it can read the refusal
)
_REFUSED_AT_ONCE = 256  # connections over the cap that get an answer; any more are dropped
_LOOKS = 4  # at what a client leaves unread, in one write timeout; at least one a second
_BYTES_ACKED = 120  # offset of that counter, 64 bits wide, in Linux's struct tcp_info


def protect(app: web.Application, config: GatewayConfig) -> None:
    """Put the perimeter around `app`: errors outermost, then CORS, then authentication.

    Call it before adding middlewares of your own. Create `app` with `client_max_size=config.max_body`.

    Raises:
        ValueError: the API keys cannot be used, or there are none although the network can reach us.
    """
    keys = auth.load_keys(config)
    auth.check_exposure(config, keys)
    app[CONFIG] = config
    app[auth.KEYS] = keys
    app[errors.BODY_TIMEOUT] = config.body_timeout
    app.middlewares.extend((errors.error_middleware, cors.cors_middleware, auth.auth_middleware))
    app.on_response_prepare.append(errors.on_prepare)
    app.on_response_prepare.append(cors.on_prepare)


def connection_limit(wanted: int) -> int:
    """`wanted`, or nine tenths of the file descriptors this process may open when that is less."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else min(wanted, soft * 9 // 10)


def _raw(error: ApiError) -> bytes:
    """A whole HTTP response for a connection that has no request to answer."""
    body = error_body(error)
    lines = [
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}",
        "Content-Type: application/json; charset=utf-8",
        f"Content-Length: {len(body)}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in retry_headers(error).items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


class GuardedHandler(web.RequestHandler):
    """aiohttp's protocol with a deadline for headers and OpenAI bodies for malformed HTTP."""

    __slots__ = (
        "_acked",
        "_header_deadline",
        "_header_timeout",
        "_heard",
        "_line",
        "_looks",
        "_unsent",
    )

    def __init__(self, manager: web.Server, *, header_timeout: float, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._header_timeout = header_timeout
        self._header_deadline: asyncio.TimerHandle | None = None
        self._heard = False  # whether part of a request has arrived
        self._line: (
            asyncio.Transport
        )  # as `transport`, which aiohttp forgets while the last bytes leave
        self._unsent = self._acked = self._looks = 0  # see `unmoved`

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._line = cast(asyncio.Transport, transport)
        self._arm()

    def data_received(self, data: bytes) -> None:
        requests = self._request_count
        super().data_received(data)
        if self._request_count != requests:
            self._disarm()
        elif not self._request_in_progress and not self._messages:
            # Part of a request's head on a kept-alive connection. While a handler runs, data is the
            # body's, which `decode_body` bounds. (A head begun before the last answer and then left is
            # as good as idle: the keep-alive timer closes it.)
            self._heard = True
            self._arm()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def unmoved(self) -> int:
        """How many calls in a row, this one included, found bytes unsent of which the client took none.

        Counting calls and not seconds forgives this process's own pauses.
        """
        unsent = self._line.get_write_buffer_size()
        # What is written meanwhile can hide from the buffer's size that the client reads.
        acked = _acknowledged(self._line) if unsent else self._acked
        moved = not unsent or unsent < self._unsent or acked > self._acked
        self._unsent, self._acked = unsent, acked
        self._looks = 0 if moved else self._looks + 1
        return self._looks

    def hang_up(self) -> None:
        """Close without sending what waits, also when the connection is closing already."""
        reset(self._line)

    def _arm(self) -> None:
        if self._header_deadline is None:
            self._header_deadline = self._loop.call_later(self._header_timeout, self._too_slow)

    def _disarm(self) -> None:
        self._heard = False
        if self._header_deadline is not None:
            self._header_deadline.cancel()
            self._header_deadline = None

    def _too_slow(self) -> None:
        self._header_deadline = None
        if self._request_in_progress or self._messages or self.transport is None:
            return
        if self._heard:
            error = ApiError(
                408,
                f"The request's headers did not arrive within {self._header_timeout:g} s.",
                code="header_timeout",
            )
            self.transport.write(_raw(error))
        self.force_close()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Give refusals made before any middleware (a bad Expect header) the same body as the rest."""
        if isinstance(resp, web.HTTPException) and resp.status >= 400:
            resp = error_response(ApiError(resp.status, resp.text or resp.reason))
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what no middleware could: bytes that are not HTTP, and errors outside of them."""
        if isinstance(exc, ConnectionError):
            # The client left, or a response that had begun was given up, which is in the log already.
            log.debug("connection of %s broke: %s", request.remote, exc)
            raise exc
        if status < 500:
            log.debug("malformed request from %s: %s", request.remote, message)
        else:
            log.error("error outside the application", exc_info=exc)
        if request.writer.output_size > 0:
            raise ConnectionResetError("the response has started")
        said = (message or "").strip().splitlines()
        text = (
            f"The request is not valid HTTP: {said[0][:200] if said else 'malformed'}."
            if status < 500
            else "The server hit an unexpected error; its log has the details."
        )
        error = ApiError(
            status,
            text,
            type="invalid_request_error" if status < 500 else "server_error",
            code="malformed_http" if status < 500 else "internal_error",
            headers={hdrs.CONNECTION: "close"},
        )
        response = error_response(error)
        response.headers["x-request-id"] = new_request_id(request)
        return response


def _acknowledged(transport: asyncio.Transport) -> int:
    """Bytes that the other side's kernel has taken so far; 0 when this one does not tell."""
    try:
        connection = transport.get_extra_info("socket")
        told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 8)
        return int(struct.unpack_from("=Q", told, _BYTES_ACKED)[0])
    except (AttributeError, OSError, ValueError, struct.error):
        return 0


class _Refusal(asyncio.Protocol):
    """Tells one client that no connection is left, then closes."""

    def __init__(self, door: _Door) -> None:
        self._door = door

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports do not derive from asyncio's.
        transport = cast(asyncio.Transport, transport)
        transport.write(self._door.refusal)
        transport.write_eof()
        # What the client still sends is read and dropped: closing on unread data would reset the
        # connection and lose the answer.
        asyncio.get_running_loop().call_later(_LINGER, transport.close)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._door.refusing -= 1


class _Drop(asyncio.Protocol):
    """Closes a connection without a word."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class _Door:
    """Makes the protocol of each accepted connection; stands in for `web.Server`."""

    def __init__(self, server: web.Server, config: GatewayConfig, options: dict[str, Any]) -> None:
        self._server = server
        self._options = options
        self._header_timeout = config.header_timeout
        self.limit = connection_limit(config.max_connections)
        self.refusing = 0
        self.refusal = _raw(
            errors.from_refusal(
                Code.OVERLOADED,
                f"This server has its {self.limit} connections in use; retry later "
                "(--max-connections, GATEWAY_MAX_CONNECTIONS).",
            )
        )

    def __call__(self) -> asyncio.Protocol:
        if len(self._server.connections) < self.limit:
            return GuardedHandler(
                self._server, header_timeout=self._header_timeout, **self._options
            )
        if self.refusing >= _REFUSED_AT_ONCE:
            return _Drop()
        self.refusing += 1
        return _Refusal(self)


class _Sweep:
    """Drops the clients that read nothing for `write_timeout` seconds while something waits for them.

    aiohttp waits for such a client without a limit: in the middle of an ordinary response, and for the end
    of any response when it closes.
    """

    def __init__(self, server: web.Server, write_timeout: float) -> None:
        self._server = server
        self._every = min(1.0, write_timeout / _LOOKS)
        self._patience = round(write_timeout / self._every)
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._every, self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._every, self._look)
        for client in self._server.connections:
            # The first of the calls only begins to count.
            if isinstance(client, GuardedHandler) and client.unmoved() > self._patience:
                log.debug("dropped %s, which does not read", client.peername)
                client.hang_up()


class GuardedRunner(web.AppRunner):
    """Serves an application behind the door. Handlers of clients that left are cancelled."""

    def __init__(self, app: web.Application, config: GatewayConfig) -> None:
        # Options of every connection. Bodies stay compressed: they are refused (`decode_body`).
        self._options: dict[str, Any] = {
            "access_log": None,
            "auto_decompress": False,
            "keepalive_timeout": config.keepalive_timeout,
            "lingering_time": _LINGER,
            "max_field_size": 8190,
            "max_headers": 128,
            "max_line_size": 8190,
        }
        super().__init__(
            app,
            handler_cancellation=True,
            shutdown_timeout=_LINGER,
            **self._options,
        )
        self._config = config
        self._sweep: _Sweep | None = None

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Accept connections; returns the address bound, for port 0.

        Raises:
            OSError: the address cannot be bound.
        """
        assert self.server is not None
        loop = asyncio.get_running_loop()
        door = _Door(self.server, self._config, {**self._options, "loop": loop})
        listener = await loop.create_server(door, host, port, backlog=1024, reuse_address=True)
        self._listener = listener
        self._sweep = _Sweep(self.server, self._config.write_timeout)
        bound = listener.sockets[0].getsockname()
        return bound[0], bound[1]

    def stop_listening(self) -> None:
        """Accept no more connections; open ones stay."""
        self._listener.close()

    async def cleanup(self) -> None:
        """End all connections; those whose clients do not read are not waited for."""
        await super().cleanup()
        if self._sweep is not None:
            self._sweep.stop()
