from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from pathlib import Path

import jsonschema
import pytest

from gateway import openapi
from gateway.app import build_app
from gateway.config import load_config
from gateway.limits import ADMISSION
from tests.gateway.front import Answer, FakeEngine, FakeLink, build, call, listening, status

CONFIG = load_config([], {})


def get(path: str, engine: FakeEngine | None = None, drain: bool = False) -> Answer:
    async def run() -> Answer:
        app = build(CONFIG, engine)
        if drain:
            app[ADMISSION].drain()
        async with listening(app, CONFIG) as port:
            return await call(port, "GET", path)

    return asyncio.run(run())


def test_a_browser_that_asks_for_an_icon_is_told_that_there_is_none() -> None:
    answer = get("/favicon.ico")
    assert (answer.status, answer.body) == (204, b"")


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
@pytest.mark.parametrize(
    ("ages", "well"),
    [
        ([0], True),  # idle
        ([59_000], True),
        ([61_000], False),
        ([61_000, 0], True),  # another executor goes on
        ([61_000, 99_000], False),
        ([None], True),  # absent: restarting the gateway would not help
        ([None, 61_000], False),
    ],
)
def test_health_fails_exactly_when_no_step_finishes_though_work_is_pending(
    path: str, ages: list[int | None], well: bool
) -> None:
    links = [
        FakeLink(f"executor-{index}", None if age is None else status(step_age_ms=age))
        for index, age in enumerate(ages)
    ]
    answer = get(path, FakeEngine(links))
    assert answer.status == (200 if well else 503)
    if well:
        assert answer.json == {"status": "ok"}
    else:
        assert "61.0 s" in answer.json["status"]
        assert "executor-" in answer.json["status"]


def test_ready_tells_why_not() -> None:
    assert (get("/ready").status, get("/ready").json) == (200, {"status": "ready"})
    loading = get("/ready", FakeEngine(problem="executor executor-0: loading model"))
    assert (loading.status, loading.json["status"]) == (503, "executor executor-0: loading model")


def test_a_draining_server_is_well_but_not_ready() -> None:
    answer = get("/ready", drain=True)
    assert answer.status == 503
    assert answer.json["status"].startswith("draining")
    assert get("/health", drain=True).status == 200


def test_metrics_are_prometheus_text() -> None:
    answer = get("/metrics")
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert b"vllm:num_requests_running" in answer.body


def test_version_is_the_installed_one() -> None:
    assert re.fullmatch(r"\d+\.\d+.*|unknown", get("/version").json["version"])


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_load_nothing_from_elsewhere_and_may_run_only_their_own_script(path: str) -> None:
    answer = get(path)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/html")
    html = answer.body.decode()
    assert not re.findall(r"""(?:src|href|action)=["']?(?!data:)[^"' >]+""", html)
    assert not re.findall(r"@import|url\(", html)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    for script in re.findall(r"<script>(.*?)</script>", html, re.DOTALL):
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "<script" not in re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)


def test_the_api_document_lists_every_route_and_its_schemas_are_sound(tmp_path: Path) -> None:
    config = load_config(["--run-dir", str(tmp_path), "--api-keys", "k"], {})
    app = build_app(config)
    document = openapi.document(app, "1.2.3")
    served = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method not in ("HEAD", "OPTIONS")
    }
    listed = {(method, path) for path, item in document["paths"].items() for method in item}
    assert listed == served - {("get", "/favicon.ico")}

    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    for name in re.findall(r"#/components/schemas/(\w+)", repr(document)):
        assert name in schemas
    ids = [item[m]["operationId"] for item in document["paths"].values() for m in item]
    assert len(ids) == len(set(ids))
    for path, item in document["paths"].items():
        for operation in item.values():
            assert operation["summary"]
            names = {parameter["name"] for parameter in operation.get("parameters", ())}
            assert names == set(re.findall(r"\{(\w+)\}", path))


def test_the_api_document_says_which_calls_need_a_key(tmp_path: Path) -> None:
    keyed = build_app(load_config(["--run-dir", str(tmp_path), "--api-keys", "k"], {}))
    document = openapi.document(keyed, "1")
    assert document["security"] == [{"bearer": []}]
    assert document["paths"]["/health"]["get"]["security"] == []
    assert "security" not in document["paths"]["/metrics"]["get"]
    assert "401" in document["paths"]["/v1/chat/completions"]["post"]["responses"]
    free = openapi.document(build_app(load_config(["--run-dir", str(tmp_path)], {})), "1")
    assert "security" not in free


def test_requests_that_decode_fit_the_published_schema() -> None:
    document = openapi.document(build(CONFIG), "1")
    chat = {"$ref": "#/components/schemas/ChatRequest", "components": document["components"]}
    validator = jsonschema.Draft202012Validator(chat)
    good = {"messages": [{"role": "user", "content": "hi"}], "n": 2, "stop": ["a"], "seed": 1}
    assert validator.is_valid(good)
    assert not validator.is_valid({**good, "n": 0})
    assert not validator.is_valid({**good, "temperature": 3})
    assert not validator.is_valid({"n": 1})


def test_the_docs_page_shows_every_path_and_field(tmp_path: Path) -> None:
    config = load_config(["--run-dir", str(tmp_path)], {})

    async def run() -> Answer:
        app = build_app(config)
        async with listening(app, config) as port:
            return await call(port, "GET", "/docs")

    html = asyncio.run(run()).body.decode()
    for text in ("/v1/chat/completions", "/v1/models/{id}", "max_completion_tokens", "temperature"):
        assert text in html
