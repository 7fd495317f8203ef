"""Every failure a client sees: one table from codes to statuses, one body, one middleware.

The body is OpenAI's: `{"error": {"message", "type", "param", "code"}}`. Its clients retry 408, 409, 429
and 5xx by themselves, so an error that a retry cannot help says `x-should-retry: false`, and one that
it can says when.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.metrics import METRICS
from wire.errors import Code
from wire.settings import Size

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")

REQUEST_ID = web.RequestKey("request_id", str)
BODY_TIMEOUT = web.AppKey("body_timeout", float)  # seconds for a body to arrive

_STARTED = web.RequestKey("response_started", bool)
_CLIENT_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_DEFAULT_BODY_TIMEOUT = 15.0


def counted(count: int, what: str) -> str:
    """`1 token`, `2 tokens`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


class ApiError(Exception):
    """A request that ends with an error body.

    Args:
        status: HTTP status, 400 or above.
        message: for people: what, which value, which limit, what to do.
        type: OpenAI's coarse kind of error.
        code: for programs; what metrics are labelled with. None: `invalid_request` with status 400.
        param: the field at fault, such as `messages[0].content`.
        retry_after: seconds after which a retry may succeed.
        should_retry: False tells clients that retry by themselves not to.
        headers: more response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        code: str | None = None,
        param: str | None = None,
        retry_after: int | None = None,
        should_retry: bool | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.code = "invalid_request" if code is None and status == 400 else code
        self.param = param
        self.retry_after = retry_after
        self.should_retry = should_retry
        self.headers = headers or {}


class _ErrorFields(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """What every error response, and an error event inside a stream, holds."""

    error: _ErrorFields


def error_body(error: ApiError) -> bytes:
    """The JSON body of `error`: one line, no trailing newline."""
    fields = _ErrorFields(error.message, error.type, error.param, error.code)
    return msgspec.json.encode(ErrorBody(fields))


def retry_headers(error: ApiError) -> dict[str, str]:
    """What tells a client whether and when to try again."""
    headers: dict[str, str] = {}
    if error.retry_after is not None:
        headers[hdrs.RETRY_AFTER] = str(error.retry_after)
        # Jitter, so that clients refused together do not come back together.
        headers["retry-after-ms"] = str(error.retry_after * 1000 + random.randrange(500))
    if error.should_retry is False:
        headers["x-should-retry"] = "false"
    return headers


def error_response(error: ApiError) -> web.Response:
    """The whole response for `error`, retry headers included."""
    headers = {**error.headers, **retry_headers(error)}
    response = web.Response(
        status=error.status,
        body=error_body(error),
        content_type="application/json",
        headers=headers,
    )
    if hdrs.CONNECTION in headers:
        response.force_close()
    return response


# ---------------------------------------------------------------- refusals of other processes

_INVALID = "invalid_request_error"
_SERVER = "server_error"
_BUSY = "overloaded_error"

# Code -> status, type, code shown, seconds until a retry. Codes that only memd and an executor exchange are
# faults of ours when they surface here.
_REFUSALS: dict[Code, tuple[int, str, str, int | None]] = {
    Code.INVALID: (400, _INVALID, "invalid_request", None),
    Code.CONTEXT_LENGTH: (400, _INVALID, "context_length_exceeded", None),
    Code.NEVER_FITS: (400, _INVALID, "kv_pool_too_small", None),
    Code.POISON: (500, _SERVER, "poison_request", None),
    Code.NOT_NUMBERS: (500, _SERVER, "non_finite_logits", None),
    Code.INTERNAL: (500, _SERVER, "internal_error", None),
    Code.UNKNOWN_SEQUENCE: (500, _SERVER, "internal_error", None),
    Code.DUPLICATE: (500, _SERVER, "internal_error", None),
    Code.OVERLOADED: (503, _BUSY, "overloaded", 1),
    Code.NO_BLOCKS: (503, _BUSY, "overloaded", 1),
    Code.BEHIND: (503, _BUSY, "overloaded", 1),
    Code.DRAINING: (503, _BUSY, "draining", 5),
    Code.UNAVAILABLE: (503, _BUSY, "unavailable", 2),
    Code.POOL_BUSY: (503, _BUSY, "unavailable", 2),
    Code.LOST: (503, _BUSY, "executor_lost", 2),
    Code.PROTOCOL: (503, _BUSY, "protocol_mismatch", 5),
    Code.FENCED: (503, _BUSY, "executor_lost", 2),
    Code.STALE: (503, _BUSY, "executor_lost", 2),
    Code.GAP: (503, _BUSY, "executor_lost", 2),
}


def from_refusal(code: Code, message: str) -> ApiError:
    """The error a client gets when another process refused with `code`."""
    status, type_, shown, retry_after = _REFUSALS[code]
    should_retry = False if status >= 500 and not code.retryable and retry_after is None else None
    return ApiError(
        status,
        message,
        type=type_,
        code=shown,
        retry_after=retry_after,
        should_retry=should_retry,
    )


# ---------------------------------------------------------------- middleware


def new_request_id(request: web.BaseRequest) -> str:
    """The client's own X-Request-Id when it is short and plain, for its logs; else a random one.
    It is only ever echoed and logged, never used as a key."""
    given = request.headers.get("X-Request-Id", "")
    return given if _CLIENT_REQUEST_ID.fullmatch(given) else "req-" + uuid.uuid4().hex


@web.middleware
async def error_middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost: gives the request its id, and turns whatever is raised into an error body.

    Once a response has started nothing can be said in its place: the connection is closed, which the
    client sees as a body cut short.
    """
    request_id = request[REQUEST_ID] = new_request_id(request)
    try:
        return await handler(request)
    except asyncio.CancelledError:
        raise
    except ApiError as refusal:
        error = refusal
    except web.HTTPException as answer:
        if answer.status < 400:
            raise
        error = _from_aiohttp(request, answer)
    except Exception as unexpected:
        if isinstance(unexpected, ConnectionError) and _client_left(request):
            raise  # nobody reads an answer
        log.exception("unexpected error request=%s %s", request_id, _shown_path(request))
        if request.get(_STARTED):
            raise
        error = ApiError(
            500,
            "The server hit an unexpected error; its log has the details under request id "
            f"{request_id}.",
            type=_SERVER,
            code="internal_error",
        )
    if request.get(_STARTED):
        log.error("error after the first byte request=%s: %s", request_id, error.message)
        raise ConnectionResetError("the response has started")
    if (metrics := request.app.get(METRICS)) is not None:
        metrics.on_error(error.code or str(error.status))
    # The client was told, and metrics count it: a client's mistakes need not fill the server's log.
    level = logging.INFO if error.status >= 500 else logging.DEBUG
    log.log(level, "refused request=%s status=%d: %s", request_id, error.status, error.message)
    return error_response(error)


def _client_left(request: web.BaseRequest) -> bool:
    return request.transport is None or request.transport.is_closing()


async def on_prepare(request: web.Request, response: web.StreamResponse) -> None:
    """Signal `on_response_prepare`: every response names the request, streams too."""
    request[_STARTED] = True
    response.headers["x-request-id"] = request.get(REQUEST_ID) or new_request_id(request)
    response.headers.setdefault("X-Content-Type-Options", "nosniff")
    response.headers[hdrs.SERVER] = "pagekeeper"


def _shown_path(request: web.BaseRequest) -> str:
    return f"{request.method} {request.rel_url.raw_path[:200]}"


def _from_aiohttp(request: web.Request, answer: web.HTTPException) -> ApiError:
    """aiohttp's own refusals, in OpenAI's form."""
    match answer:
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(answer.allowed_methods))
            message = f"{_shown_path(request)} is not supported; this path takes {allowed}."
            return ApiError(405, message, code="method_not_allowed", headers={hdrs.ALLOW: allowed})
        case web.HTTPNotFound():
            message = f"There is nothing at {_shown_path(request)}; GET /openapi.json lists all."
            return ApiError(404, message, code="unknown_url")
        case web.HTTPRequestEntityTooLarge():
            return too_large(request)
        case _:
            message = answer.text or answer.reason or "The request was refused."
            return ApiError(answer.status, message)


# ---------------------------------------------------------------- bodies


def too_large(request: web.BaseRequest) -> ApiError:
    """413. The connection closes: the rest of the body will not be read."""
    limit = str(Size(request.client_max_size))
    limit += " bytes" if limit.isdigit() else ""
    return ApiError(
        413,
        f"The request body is larger than {limit}; send a shorter prompt or raise "
        "--max-body (GATEWAY_MAX_BODY).",
        code="body_too_large",
        headers={hdrs.CONNECTION: "close"},
    )


async def decode_body(request: web.Request, decoder: msgspec.json.Decoder[T]) -> T:
    """Read, bound and decode a JSON body.

    Raises:
        ApiError: 400 not valid JSON for this call (`param` names the field), 408 too slow,
            413 too large, 415 not JSON or compressed.
    """
    _require_plain_json(request)
    if (request.content_length or 0) > request.client_max_size:
        raise too_large(request)
    seconds = request.app.get(BODY_TIMEOUT, _DEFAULT_BODY_TIMEOUT)
    try:
        async with asyncio.timeout(seconds):
            body = await request.read()
    except TimeoutError:
        raise ApiError(
            408,
            f"The request body did not arrive within {seconds:g} s; send it without pauses.",
            code="body_timeout",
            headers={hdrs.CONNECTION: "close"},
        ) from None
    except (web.RequestPayloadError, HttpProcessingError):
        raise ApiError(
            400, "The request body is not well-formed HTTP.", headers={hdrs.CONNECTION: "close"}
        ) from None
    if not body:
        raise ApiError(400, "The request body is empty; send a JSON object.")
    return decode_json(body, decoder)


def _require_plain_json(request: web.BaseRequest) -> None:
    # Besides helping curl users, this keeps a web page's form from posting here without a preflight.
    kind = request.content_type
    if hdrs.CONTENT_TYPE not in request.headers or not (
        kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    ):
        given = request.headers.get(hdrs.CONTENT_TYPE, "none")[:100]
        raise ApiError(
            415,
            f"Content-Type is {given}, but this call takes JSON: "
            "add the header 'Content-Type: application/json'.",
            code="unsupported_media_type",
        )
    charset = (request.charset or "utf-8").lower()
    if charset not in ("utf-8", "utf8", "us-ascii", "ascii"):
        raise ApiError(
            415,
            f"The charset of the body is {charset[:40]}, but JSON is sent as UTF-8 here.",
            code="unsupported_media_type",
        )
    coding = request.headers.get(hdrs.CONTENT_ENCODING, "identity").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(
            415,
            f"Content-Encoding is {coding[:40]}, but request bodies are taken uncompressed only.",
            code="unsupported_media_type",
        )


# msgspec ends its messages with the path of the value at fault.
_PATH = re.compile(r" - at `(?:key in )?(\$[^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")


def decode_json(body: bytes, decoder: msgspec.json.Decoder[T]) -> T:
    """`body` as the decoder's type.

    Raises:
        ApiError: 400, with `param` where the fault is in a field.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise validation_error(str(error)) from None
    except (msgspec.DecodeError, UnicodeError) as error:
        message = f"The request body is not valid JSON: {error}."
        raise ApiError(400, message, code="invalid_json") from None
    except RecursionError:
        message = "The request body is nested too deeply; send flatter JSON."
        raise ApiError(400, message, code="invalid_json") from None


def validation_error(text: str) -> ApiError:
    """400 from msgspec's message, such as "Expected `str`, got `int` - at `$.messages[0].role`"."""
    path = _PATH.search(text)
    param = path[1].removeprefix("$").removeprefix(".") if path else ""
    said = text[: path.start()] if path else text
    if missing := _MISSING.search(said):
        param = f"{param}.{missing[1]}" if param else missing[1]
    where = f"{param}: " if param else ""
    return ApiError(400, f"{where}{said}.", code="invalid_request", param=param or None)
