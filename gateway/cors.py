"""Cross-origin calls: which web pages may use this server from a browser.

Off by default. A preflight is answered here, before authentication, because browsers send none with it;
it reveals nothing and runs nothing.
"""

from __future__ import annotations

from aiohttp import hdrs, web

from gateway.config import CONFIG
from gateway.errors import ApiError, Handler

_METHODS = "GET, POST, OPTIONS"
_EXPOSED = "x-request-id, retry-after, retry-after-ms"
_MAX_AGE = "600"  # seconds a browser remembers a preflight


def _allowed(request: web.Request) -> str | None:
    """The value of Access-Control-Allow-Origin for this request; None: not allowed."""
    origins = request.app[CONFIG].cors_origins
    if not origins:
        return None
    if "*" in origins:
        return "*"
    origin = request.headers.get(hdrs.ORIGIN)
    return origin if origin in origins else None


@web.middleware
async def cors_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers preflights: 204 for allowed origins, 405 for others; everything else goes on."""
    if (
        request.method == hdrs.METH_OPTIONS
        and hdrs.ORIGIN in request.headers
        and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
    ):
        if not _allowed(request):
            raise _refused(request)
        # Clients' libraries send headers of their own (x-stainless-…): echo what was asked for.
        asked = request.headers.get(
            hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "authorization, content-type"
        )
        return web.Response(
            status=204,
            headers={
                hdrs.ACCESS_CONTROL_ALLOW_METHODS: _METHODS,
                hdrs.ACCESS_CONTROL_ALLOW_HEADERS: asked,
                hdrs.ACCESS_CONTROL_MAX_AGE: _MAX_AGE,
            },
        )
    return await handler(request)


def _refused(request: web.Request) -> ApiError:
    origin = request.headers[hdrs.ORIGIN][:100]
    return ApiError(
        405,
        f"Web pages of {origin} may not use this server: start it with GATEWAY_CORS_ORIGINS={origin} "
        "in its environment (--cors-origins of the gateway).",
        code="origin_not_allowed",
        headers={hdrs.ALLOW: "GET, HEAD, POST"},
    )


async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
    """Signal `on_response_prepare`: lets pages of allowed origins read the response, streams too."""
    if not request.app[CONFIG].cors_origins:
        return
    response.headers.add(hdrs.VARY, hdrs.ORIGIN)
    if hdrs.ORIGIN in request.headers and (allowed := _allowed(request)):
        response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = allowed
        response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED
