from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import GatewayConfig, load_config
from gateway.errors import (
    ApiError,
    decode_json,
    error_body,
    error_middleware,
    error_response,
    from_refusal,
)
from gateway.openai import ChatRequest, CompletionRequest
from tests.gateway.front import CHAT, Answer, build, call, exchange, listening
from wire.errors import Code


def ask(*requests: tuple[Any, ...], config: GatewayConfig | None = None) -> list[Answer]:
    """Answers to (method, path, body, headers) requests, in order, from one server."""
    settings = config or load_config([], {})

    async def run() -> list[Answer]:
        async with listening(build(settings), settings) as port:
            return [await call(port, *request) for request in requests]

    return asyncio.run(run())


@pytest.mark.parametrize("code", Code)
def test_every_refusal_has_a_status_and_says_whether_to_retry(code: Code) -> None:
    error = from_refusal(code, "why")
    response = error_response(error)
    assert json.loads(error_body(error))["error"]["message"] == "why"
    if response.status == 503:
        assert int(response.headers["Retry-After"]) >= 1
        assert int(response.headers["retry-after-ms"]) >= 1000
        assert "x-should-retry" not in response.headers
    else:
        assert "Retry-After" not in response.headers
        assert response.status in (400, 500)


@pytest.mark.parametrize(
    ("code", "status", "shown"),
    [
        (Code.INVALID, 400, "invalid_request"),
        (Code.CONTEXT_LENGTH, 400, "context_length_exceeded"),
        (Code.NEVER_FITS, 400, "kv_pool_too_small"),
        (Code.POISON, 500, "poison_request"),
        (Code.INTERNAL, 500, "internal_error"),
        (Code.NOT_NUMBERS, 500, "non_finite_logits"),
        (Code.OVERLOADED, 503, "overloaded"),
        (Code.DRAINING, 503, "draining"),
        (Code.UNAVAILABLE, 503, "unavailable"),
        (Code.LOST, 503, "executor_lost"),
    ],
)
def test_refusals_of_the_executor_become_these_statuses(
    code: Code, status: int, shown: str
) -> None:
    error = from_refusal(code, "why")
    assert (error.status, error.code) == (status, shown)


def test_a_client_that_retries_by_itself_is_told_when_that_is_pointless() -> None:
    hopeless = error_response(from_refusal(Code.POISON, "why"))
    assert hopeless.headers["x-should-retry"] == "false"
    assert "x-should-retry" not in error_response(from_refusal(Code.LOST, "why")).headers


def test_an_unexpected_exception_is_a_500_without_details_found_by_its_request_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        (answer,) = ask(("POST", "/crash", b"", {"X-Request-Id": "mine-1"}))
    assert answer.status == 500
    assert b"secret detail" not in answer.body
    assert answer.headers["x-request-id"] == "mine-1"
    assert "mine-1" in answer.error["message"]
    assert any("mine-1" in record.getMessage() for record in caplog.records)


def test_the_log_tells_of_the_servers_faults_and_not_of_its_clients(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO):
        ask(("GET", "/nothing"), ("POST", "/v1/chat/completions", b"{"), ("GET", "/favicon.ico"))
        assert not [record for record in caplog.records if record.name.startswith("gateway")]
        ask(("POST", "/crash"))
    assert any("status=500" in record.getMessage() for record in caplog.records)


def test_after_the_first_byte_a_failure_cuts_the_connection_and_adds_no_second_response() -> None:
    config = load_config([], {})

    async def run() -> bytes:
        async with listening(build(config), config) as port:
            return await exchange(port, b"GET /half HTTP/1.1\r\nHost: a\r\n\r\n")

    raw = asyncio.run(run())
    assert raw.count(b"HTTP/1.1") == 1
    assert b"first" in raw
    assert not raw.endswith(b"0\r\n\r\n")  # the body is visibly incomplete
    assert b"secret" not in raw
    assert b"x-request-id: req-" in raw.lower()


def test_a_broken_connection_inside_the_server_is_not_taken_for_the_clients() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        raise ConnectionResetError("an inner one")

    async def run() -> Answer:
        config = load_config([], {})
        app = build(config)
        app.router.add_get("/inner", handler)
        async with listening(app, config) as port:
            return await call(port, "GET", "/inner")

    answer = asyncio.run(run())
    assert (answer.status, answer.error["code"]) == (500, "internal_error")


def test_cancelling_a_handler_is_never_turned_into_a_response() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        raise asyncio.CancelledError

    async def run() -> None:
        with pytest.raises(asyncio.CancelledError):
            await error_middleware(make_mocked_request("GET", "/"), handler)

    asyncio.run(run())


def test_what_aiohttp_refuses_by_itself_has_the_same_body() -> None:
    config = load_config(["--max-body", "1KiB"], {})
    missing, method, large, expect = ask(
        ("GET", "/nothing"),
        ("GET", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions", b'{"a": "' + b"x" * 2000 + b'"}'),
        ("POST", "/v1/chat/completions", b"{}", {"Expect": "a-pony"}),
        config=config,
    )
    assert (missing.status, missing.error["code"]) == (404, "unknown_url")
    assert (method.status, method.error["code"]) == (405, "method_not_allowed")
    assert method.headers["allow"] == "POST"
    assert (large.status, large.error["code"]) == (413, "body_too_large")
    assert "1KiB" in large.error["message"]
    assert "--max-body (GATEWAY_MAX_BODY)" in large.error["message"]
    assert expect.status == 417
    assert expect.error["type"] == "invalid_request_error"


def test_a_chunked_body_cannot_pass_the_size_limit_either() -> None:
    config = load_config(["--max-body", "1KiB"], {})
    chunks = b"200\r\n" + b"x" * 512 + b"\r\n"
    (answer,) = ask(
        (
            "POST",
            "/v1/chat/completions",
            chunks * 8 + b"0\r\n\r\n",
            {"Transfer-Encoding": "chunked", "Content-Length": None},
        ),
        config=config,
    )
    assert answer.status == 413


@pytest.mark.parametrize("given", ["a" * 129, "with space", "semi;colon", "ünïcode", ""])
def test_a_request_id_that_is_long_or_not_plain_is_replaced(given: str) -> None:
    (answer,) = ask(("GET", "/health", None, {"X-Request-Id": given}))
    assert answer.headers["x-request-id"].startswith("req-")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({}, "messages"),
        ({"messages": "x"}, "messages"),
        ({**CHAT, "n": 0}, "n"),
        ({**CHAT, "n": 10**30}, "n"),
        ({**CHAT, "temperature": 3}, "temperature"),
        ({**CHAT, "stop": [""]}, "stop[0]"),
        ({**CHAT, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(body: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode_json(json.dumps(body).encode(), msgspec.json.Decoder(ChatRequest))
    assert (caught.value.status, caught.value.param) == (400, param)
    assert param in caught.value.message


CHAT_BYTES = json.dumps(CHAT).encode()


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (CHAT_BYTES, {}, 200),
        (CHAT_BYTES, {"Content-Type": "application/json; charset=utf-8"}, 200),
        (CHAT_BYTES, {"Content-Type": "APPLICATION/JSON"}, 200),
        (CHAT_BYTES, {"Content-Type": "application/vnd.api+json"}, 200),
        (CHAT_BYTES, {"Content-Encoding": "identity"}, 200),
        (CHAT_BYTES, {"Content-Type": "text/plain"}, 415),
        (CHAT_BYTES, {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        (CHAT_BYTES, {"Content-Type": "application/json; charset=utf-16"}, 415),
        (CHAT_BYTES, {"Content-Type": ""}, 415),
        (CHAT_BYTES, {"Content-Encoding": "gzip"}, 415),
        (CHAT_BYTES, {"Content-Encoding": "br"}, 415),
        (b"", {}, 400),
        (b"{", {}, 400),
        (b"null", {}, 400),
        (b"[]", {}, 400),
        (b"NaN", {}, 400),
        (b'{"temperature": NaN}', {}, 400),
        (b'{"temperature": Infinity}', {}, 400),
        (b'{"user": "\xff\xfe"}', {}, 400),
        (b'{"user": "\\ud800"}', {}, 400),
        (b"\xef\xbb\xbf" + CHAT_BYTES, {}, 400),
        (b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", {}, 400),
        (b'{"metadata": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, {}, 400),
        (CHAT_BYTES + b" trailing", {}, 400),
        (b'{"n": 1e400}', {}, 400),
        (b'{"n": ' + b"9" * 5000 + b"}", {}, 400),
    ],
)
def test_a_body_that_is_not_plain_json_is_refused(
    body: bytes, headers: dict[str, str], status: int
) -> None:
    (answer,) = ask(("POST", "/v1/chat/completions", body, headers))
    assert answer.status == status
    if status == 415:
        assert answer.error["code"] == "unsupported_media_type"
    elif status == 400:
        assert answer.error["type"] == "invalid_request_error"


def test_a_missing_content_type_is_told_what_to_add() -> None:
    (answer,) = ask(("POST", "/v1/chat/completions", CHAT_BYTES, {"Content-Type": None}))
    assert answer.status == 415
    assert "Content-Type: application/json" in answer.error["message"]


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["messages", "role", "content", "n", "stop", "prompt", "temperature", "logit_bias"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


def _refusal(body: bytes, kind: type) -> ApiError | None:
    try:
        decode_json(body, msgspec.json.Decoder(kind))
    except ApiError as error:
        return error
    return None


def _only_refused(body: bytes) -> None:
    for kind in (ChatRequest, CompletionRequest):
        error = _refusal(body, kind)
        assert error is None or error.status == 400
        assert error is None or msgspec.json.decode(error_body(error))


@given(_json)
def test_any_json_value_is_decoded_or_refused(value: Any) -> None:
    _only_refused(json.dumps(value).encode("utf-8", "replace"))


@given(st.binary(max_size=64))
def test_any_bytes_are_decoded_or_refused(body: bytes) -> None:
    _only_refused(body)


@given(st.data())
def test_a_valid_body_with_some_bytes_changed_is_decoded_or_refused(data: st.DataObject) -> None:
    body = bytearray(json.dumps({**CHAT, "n": 2, "stop": ["é", "\u2028"]}).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    _only_refused(bytes(body))
