from __future__ import annotations

import asyncio
import hashlib
import hmac
from pathlib import Path

import pytest

from gateway.app import build_app
from gateway.auth import KeyRing, check_exposure, is_loopback, load_keys
from gateway.config import GatewayConfig, load_config
from tests.gateway.front import CHAT, Answer, build, call, exchange, listening, parse

KEYED = ["--api-keys", "alpha,beta"]
PUBLIC_PATHS = {"/", "/health", "/v1/health", "/ready", "/version", "/favicon.ico"}


def configured(*argv: str) -> GatewayConfig:
    return load_config(argv, {})


async def _each(config: GatewayConfig, requests: list[tuple[str, str, str | None]]) -> list[Answer]:
    async with listening(build(config), config) as port:
        return [
            await call(
                port,
                method,
                path,
                dict(CHAT) if method == "POST" else None,
                {"Authorization": header} if header is not None else {},
            )
            for method, path, header in requests
        ]


def test_every_route_and_method_needs_a_key_except_the_public_ones(tmp_path: Path) -> None:
    config = configured(*KEYED, "--run-dir", str(tmp_path / "run"))
    app = build_app(config)
    paths = sorted({route.resource.canonical for route in app.router.routes() if route.resource})
    assert {"/v1/chat/completions", "/tokenize", "/metrics", "/openapi.json"} <= set(paths)
    methods = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "QUERY")
    asked = [(method, path) for path in [*paths, "/unknown", "/v1"] for method in methods]

    async def run() -> list[Answer]:
        async with listening(app, config) as port:
            return [
                await call(port, method, path.replace("{id}", "any/model"), b"{}")
                for method, path in asked
            ]

    answers = asyncio.run(run())
    open_to_all = {
        route for route, answer in zip(asked, answers, strict=True) if answer.status != 401
    }
    assert open_to_all == {(m, p) for p in PUBLIC_PATHS for m in ("GET", "HEAD")}


def test_a_refusal_is_a_401_with_a_challenge_and_an_error_body() -> None:
    (answer,) = asyncio.run(_each(configured(*KEYED), [("GET", "/metrics", None)]))
    assert answer.status == 401
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.error["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("header", "allowed"),
    [
        ("Bearer alpha", True),
        ("bearer beta", True),
        ("Bearer  alpha", True),
        ("Bearer alph", False),
        ("Bearer alphaa", False),
        ("Bearer ALPHA", False),
        ("Bearer alpha,beta", False),
        ("Bearer", False),
        ("Bearer ", False),
        ("", False),
        ("alpha", False),
        ("Basic YWxwaGE6", False),
        ("Token alpha", False),
        ("Bearer älpha", False),
        ("Bearer \udcff\udcfe", False),
        ("Bearer " + hashlib.sha256(b"alpha").hexdigest(), False),
        ("Bearer " + "a" * 7000, False),
    ],
)
def test_only_a_whole_key_in_the_bearer_scheme_opens(header: str, allowed: bool) -> None:
    asked = [("POST", "/v1/chat/completions", header)]
    (answer,) = asyncio.run(_each(configured(*KEYED), list(asked)))
    assert answer.status == (200 if allowed else 401)


@pytest.mark.parametrize(
    "request_line",
    [
        "GET //metrics",
        "GET /./metrics",
        "GET /health/../metrics",
        "GET /health/..%2fmetrics",
        "GET /metrics/",
        "GET /metrics?/health",
        "GET /metrics;/health",
        "GET /metrics%00",
        "GET /%6detrics",
        "GET /metrics#/health",
        "GET http://localhost/metrics",
        "GET http://evil/health/../metrics",
        "GET *",
        "GET metrics",
        "POST /health",
        "get /metrics",
        "CONNECT /metrics",
    ],
)
@pytest.mark.parametrize("host", ["localhost", "a/health?", "localhost/health#", "[::1", ""])
def test_no_spelling_of_path_or_host_reaches_a_guarded_page(request_line: str, host: str) -> None:
    async def run() -> bytes:
        config = configured(*KEYED)
        async with listening(build(config), config) as port:
            sent = f"{request_line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            return await exchange(port, sent.encode())

    answer = parse(asyncio.run(run()))
    assert answer.status in (400, 401)
    assert b"vllm:" not in answer.body


def test_a_key_sent_twice_in_different_headers_is_not_guessed_at() -> None:
    async def run() -> bytes:
        config = configured(*KEYED)
        async with listening(build(config), config) as port:
            sent = (
                b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
                b"Authorization: Bearer wrong\r\nAuthorization: Bearer alpha\r\n\r\n"
            )
            return await exchange(port, sent)

    assert parse(asyncio.run(run())).status in (400, 401)


def test_metrics_are_public_only_when_that_was_asked_for() -> None:
    config = configured(*KEYED, "--public-metrics")
    answers = asyncio.run(_each(config, [("GET", "/metrics", None), ("POST", "/metrics", None)]))
    assert [answer.status for answer in answers] == [200, 401]


def test_without_keys_everybody_may_call_and_nobody_has_a_tenant() -> None:
    (answer,) = asyncio.run(_each(configured(), [("GET", "/whoami", None)]))
    assert answer.json == {"tenant": "", "key": ""}


def test_keys_of_one_tenant_share_it_and_other_keys_are_tenants_of_their_own(
    tmp_path: Path,
) -> None:
    path = tmp_path / "keys"
    digest = hashlib.sha256(b"delta").hexdigest()
    path.write_text(f"# our keys\n\none acme\ntwo  acme\nthree other\nfour\nsha256:{digest} acme\n")
    keys = load_keys(configured("--api-key-file", str(path), "--api-keys", "five"))
    tenants = {}
    for name in ("one", "two", "three", "four", "five", "delta"):
        key = keys.find(name)
        assert key is not None
        assert 0 < len(key.tenant) <= 64
        assert name not in key.tenant
        tenants[name] = key.tenant
    assert tenants["one"] == tenants["two"] == tenants["delta"]
    assert len({tenants[name] for name in ("one", "three", "four", "five")}) == 4
    assert keys.find(f"sha256:{digest}") is None
    assert keys.find("acme") is None


def test_a_wrong_key_is_compared_with_every_digest_in_constant_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[tuple[bytes, bytes]] = []

    compare = hmac.compare_digest

    def watched(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return compare(a, b)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    keys = load_keys(configured("--api-keys", "a,b,c"))
    for given in ("a", "nothing"):
        compared.clear()
        keys.find(given)
        assert len(compared) == 3
        assert all(len(a) == len(b) == 32 for a, b in compared)


def test_the_key_itself_is_not_kept() -> None:
    keys = load_keys(configured("--api-keys", "very-secret-key"))
    assert "very-secret-key" not in repr([getattr(keys, "_keys")])  # noqa: B009
    assert len(keys) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n# only a comment\n",
        "a b c\n",
        "sha256:12\n",
        "kéy\n",
        "same\nsame other\n",
        "k" * 1025,
    ],
)
def test_a_key_file_without_usable_keys_is_a_start_up_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(ValueError, match="key") as caught:
        load_keys(configured("--api-key-file", str(path)))
    assert "same" not in str(caught.value)


def test_a_missing_or_undecodable_key_file_is_a_start_up_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        load_keys(configured("--api-key-file", str(tmp_path / "none")))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="cannot be read"):
        load_keys(configured("--api-key-file", str(tmp_path / "bytes")))


@pytest.mark.parametrize("text", [",", "a,,b", "a,", "a, ", "a b"])
def test_an_empty_or_broken_key_in_the_list_is_a_start_up_error(text: str) -> None:
    with pytest.raises(ValueError, match="--api-keys"):
        load_keys(configured("--api-keys", text))


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.4", False),
        ("localhost.example.com", False),
        ("myhost", False),
    ],
)
def test_only_loopback_is_served_without_keys(host: str, loopback: bool) -> None:
    config = configured("--host", host)
    assert is_loopback(host) is loopback
    if loopback:
        check_exposure(config, KeyRing())
        return
    with pytest.raises(ValueError, match="--insecure-no-auth"):
        check_exposure(config, KeyRing())
    check_exposure(configured("--host", host, "--insecure-no-auth"), KeyRing())
    keyed = configured("--host", host, *KEYED)
    check_exposure(keyed, load_keys(keyed))
