"""Admin HTTP: what is in memory and who holds it, for people and scrapers. Reads only, except an audit.

It shares memd's one loop with the executors' socket, so every answer is bounded: lists are paged, the map is
sampled and lets messages through between its cells. Only an audit takes as long as it takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from time import monotonic, perf_counter
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from msgspec import Meta, Struct
from prometheus_client.exposition import choose_encoder

from memd import metrics, views
from memd.access import CHALLENGE, OPEN_PATHS, HostList, Token, same_origin
from memd.config import Config
from memd.invariants import Broken
from memd.pool import Pool
from memd.server import Server

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
MOST_CONNECTIONS = 256
HEADER_SECONDS = 10.0  # an open connection that has asked nothing for this long is closed
CELLS_AT_ONCE = 128

_SECURITY = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class Failure(Exception):
    """A request that gets an error: status, code for programs, sentence for people."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def response(self) -> web.Response:
        body = {"error": {"code": self.code, "message": self.message}}
        return _json(body, self.status, self.headers)


def _own_fault(record: logging.LogRecord) -> bool:
    """Leaves out aiohttp's error and traceback for each request that is no HTTP: anybody can send those."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


class NoQuery(Struct, forbid_unknown_fields=True):
    """A path without parameters."""


class PoolQuery(Struct, forbid_unknown_fields=True):
    pool: str = ""  # may be left out while there is one pool


class SequencesQuery(PoolQuery):
    after: Annotated[int, Meta(ge=0, le=2**53 - 1)] = 0
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


class BlocksQuery(SequencesQuery):
    state: views.State | None = None


Query = TypeVar("Query", bound=Struct)


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body),
        status=status,
        content_type="application/json",
        headers=headers,
    )


def _query(request: web.Request, kind: type[Query]) -> Query:
    pairs = request.query
    if len(pairs) != len(set(pairs)):
        raise Failure(400, "invalid_request", "a query parameter is given twice: give it once")
    try:
        return msgspec.convert(dict(pairs), kind, strict=False)
    except msgspec.ValidationError as error:
        raise Failure(400, "invalid_request", f"query: {error}") from None


def _number(request: web.Request, what: str) -> int:
    text = request.match_info["id"]
    if not (text.isascii() and text.isdecimal() and len(text) <= 16):
        raise Failure(400, "invalid_request", f"{what} {text[:32]!r} is not a whole number")
    return int(text)


class Admin:
    """The routes, and the site they are served on."""

    def __init__(self, server: Server, config: Config) -> None:
        self._server = server
        self._host, self._port = config.admin_host, config.admin_port
        self._hosts = HostList(config.admin_host, config.allowed_hosts)
        self._token = None if config.admin_token is None else Token(config.admin_token)
        self._registry = metrics.registry(server)
        self._page = Path(__file__).with_name("page.html").read_bytes()
        self._runner: web.AppRunner | None = None
        self._reaper: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ the site

    async def start(self) -> str:
        """Bind; returns the URL.

        Raises:
            OSError: the address is taken, or not this machine's.
        """
        app = web.Application(middlewares=[self._guard], client_max_size=64 << 10)
        app.add_routes(
            [
                web.get("/", self.page),
                web.get("/health", self.health),
                web.get("/ready", self.ready),
                web.get("/metrics", self.metrics),
                web.get("/v1/state", self.state),
                web.get("/v1/map", self.map),
                web.get("/v1/blocks", self.blocks),
                web.get("/v1/blocks/{id}", self.block),
                web.get("/v1/sequences", self.sequences),
                web.get("/v1/sequences/{id}", self.sequence),
                web.post("/v1/audit", self.audit),
            ]
        )
        log.addFilter(_own_fault)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=log,
            handle_signals=False,
            handler_cancellation=True,
            keepalive_timeout=30,
            shutdown_timeout=1,
            max_line_size=4096,
            max_field_size=4096,
            max_headers=64,
            auto_decompress=False,
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self._host, self._port, backlog=64).start()
        self._reaper = asyncio.create_task(self._reap())
        host, port = self._runner.addresses[0][:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def stop(self) -> None:
        if self._reaper is not None:
            self._reaper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reaper
        if self._runner is not None:
            await self._runner.cleanup()

    async def _reap(self) -> None:
        """Close connections that only sit there: aiohttp waits for a request's headers for ever."""
        since: dict[Any, float] = {}
        while True:
            await asyncio.sleep(1)
            site = None if self._runner is None else self._runner.server
            open_now = [] if site is None else site.connections
            now = monotonic()
            since = {
                connection: since.get(connection, now)
                for connection in open_now
                if connection._current_request is None
            }
            spare = len(open_now) - MOST_CONNECTIONS
            for connection, first in since.items():
                if now - first > HEADER_SECONDS or spare > 0:
                    spare -= 1
                    connection.force_close()
                    if connection.transport is not None:
                        connection.transport.abort()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every answer passes here: who may ask, and errors as JSON."""
        try:
            self._admit(request)
            response = await handler(request)
        except Failure as failure:
            response = failure.response()
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            response = Failure(
                405,
                "method_not_allowed",
                f"{request.method} is not for {request.path[:200]}: use {allowed}",
                Allow=allowed,
            ).response()
        except web.HTTPNotFound:
            response = Failure(
                404, "not_found", f"there is nothing at {request.path[:200]}; see / and /v1/state"
            ).response()
        except web.HTTPException as error:
            response = Failure(error.status, "invalid_request", error.reason).response()
        response.headers.update(_SECURITY)
        return response

    def _admit(self, request: web.Request) -> None:
        hosts = request.headers.getall("Host", [])
        if not self._hosts.allows(hosts):
            shown = (hosts or ["none"])[0][:100]
            raise Failure(
                403,
                "forbidden_host",
                f"Host {shown!r} is not a name of this server: use localhost, or start memd with "
                "--allowed-hosts and that name",
            )
        if not same_origin(request.headers.get("Origin"), hosts[0]):
            raise Failure(403, "forbidden_origin", "requests from other sites' pages are refused")
        if self._token is None or request.rel_url.raw_path in OPEN_PATHS:
            return
        if not self._token.accepts(request.headers.get("Authorization", "")):
            raise Failure(
                401,
                "unauthorized",
                "send the admin token as 'Authorization: Bearer TOKEN'",
                WWW_Authenticate=CHALLENGE,
            )

    def _pool(self, name: str) -> Pool:
        pools = self._server.memory.pools
        if name in pools:
            return pools[name]
        known = ", ".join(sorted(pools)) or "none"
        if name:
            raise Failure(
                404, "unknown_pool", f"no pool is named {name[:64]!r}; there are: {known}"
            )
        if len(pools) == 1:
            return next(iter(pools.values()))
        if not pools:
            raise Failure(404, "unknown_pool", "no pool is registered: start an executor")
        raise Failure(400, "invalid_request", f"say which pool with ?pool=; there are: {known}")

    # ------------------------------------------------------------ routes

    async def page(self, request: web.Request) -> web.Response:
        return web.Response(body=self._page, content_type="text/html", charset="utf-8")

    async def health(self, request: web.Request) -> web.Response:
        """200 is the proof: the loop that answers executors has turned to answer this."""
        return _json({"status": "ok"})

    async def ready(self, request: web.Request) -> web.Response:
        """memd can register executors as soon as its socket is bound, which is before this answers."""
        return _json({"status": "ready", "pools": len(self._server.memory.pools)})

    async def metrics(self, request: web.Request) -> web.Response:
        encode, kind = choose_encoder(request.headers.get("Accept", ""))
        return web.Response(body=encode(self._registry), headers={"Content-Type": kind})

    async def state(self, request: web.Request) -> web.Response:
        _query(request, NoQuery)
        memory, now = self._server.memory, self._server.clock()
        return _json(
            {
                "boot_id": memory.boot_id,
                "epoch": memory.epoch,
                "lease_ms": memory.lease_ms,
                "pools": [
                    views.pool_view(pool, memory.leases, now) for pool in memory.pools.values()
                ],
            }
        )

    async def map(self, request: web.Request) -> web.Response:
        pool = self._pool(_query(request, PoolQuery).pool)
        cells: list[tuple[int, int, int, int]] = []
        for cell in views.map_cells(pool):
            cells.append(cell)
            if len(cells) % CELLS_AT_ONCE == 0:
                await asyncio.sleep(
                    0
                )  # a picture may be a few steps wide; steps may not wait for it
        return _json(views.map_view(pool, cells))

    async def blocks(self, request: web.Request) -> web.Response:
        query = _query(request, BlocksQuery)
        pool = self._pool(query.pool)
        return _json(views.block_page(pool, query.state, query.after, query.limit))

    async def block(self, request: web.Request) -> web.Response:
        pool, block = self._pool(_query(request, PoolQuery).pool), _number(request, "block")
        if block > pool.total:
            raise Failure(
                404,
                "unknown_block",
                f"pool {pool.name} has blocks 0 to {pool.total}; {block} is not one",
            )
        return _json(views.block_view(pool, block))

    async def sequences(self, request: web.Request) -> web.Response:
        query = _query(request, SequencesQuery)
        return _json(views.sequence_page(self._pool(query.pool), query.after, query.limit))

    async def sequence(self, request: web.Request) -> web.Response:
        pool, seq = self._pool(_query(request, PoolQuery).pool), _number(request, "sequence")
        view = views.sequence_view(pool, seq)
        if view is None:
            raise Failure(
                404,
                "unknown_sequence",
                f"pool {pool.name} has no live sequence {seq}; it may be over",
            )
        return _json(view)

    async def audit(self, request: web.Request) -> web.Response:
        """Check every rule from scratch. Executors wait meanwhile: about 5 µs per granted block."""
        _query(request, NoQuery)
        memory = self._server.memory
        started = perf_counter()
        found: list[str] = []
        try:
            memory.check()
        except Broken as broken:
            found = broken.found
        body = {
            "ok": not found,
            "checked": {
                "pools": len(memory.pools),
                "blocks": sum(pool.total for pool in memory.pools.values()),
                "sequences": sum(len(pool.sequences) for pool in memory.pools.values()),
            },
            "micros": round((perf_counter() - started) * 1e6),
            "broken": found[:100],
        }
        return _json(body, 500 if found else 200)
