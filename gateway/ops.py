"""What operators, probes and people with a browser ask: is it well, what has it done, how is it called."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import re
from functools import cache
from pathlib import Path

import msgspec
from aiohttp import hdrs, web
from prometheus_client import CONTENT_TYPE_LATEST

from gateway import docs, openapi
from gateway.config import CONFIG
from gateway.engine import ENGINE
from gateway.limits import ADMISSION
from gateway.metrics import METRICS
from gateway.openapi import State, Version


def version() -> str:
    """Of the installed package; "unknown" when run from a source tree that is not installed."""
    try:
        return importlib.metadata.version("pagekeeper")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.json.encode(value),
        content_type="application/json",
        headers={hdrs.CACHE_CONTROL: "no-store"},
    )


def stuck(app: web.Application) -> str:
    """Why nothing can make progress, for people; empty when something can.

    An executor that is merely absent is not stuck: restarting the gateway would not bring it back, so it
    is `/ready` that tells.
    """
    limit = app[CONFIG].stuck_seconds
    connected = [link for link in app[ENGINE].links if link.status is not None]
    ages = [link.status.step_age_ms / 1000 for link in connected if link.status is not None]
    if not ages or min(ages) <= limit:
        return ""
    names = ", ".join(link.name for link in connected)
    return (
        f"{names}: no engine step finished for {min(ages):.1f} s although work is pending "
        f"(limit {limit:g} s, --stuck-seconds, GATEWAY_STUCK_SECONDS)"
    )


def not_ready(app: web.Application) -> str:
    """Why new requests would be refused now, for people; empty when they would not."""
    if app[ADMISSION].draining:
        return "draining: this server is shutting down"
    return app[ENGINE].not_ready()


async def health(request: web.Request) -> web.Response:
    """Whether the server makes progress.

    200 as long as the loop turns and, while work is pending, engine steps finish; else 503.
    """
    reason = stuck(request.app)
    return _json(State(reason or "ok"), 503 if reason else 200)


async def ready(request: web.Request) -> web.Response:
    """Whether a request sent now would run.

    503 with the reason while the model loads, an executor or memd is missing, or the server drains.
    """
    reason = not_ready(request.app)
    return _json(State(reason or "ready"), 503 if reason else 200)


async def metrics(request: web.Request) -> web.Response:
    """Prometheus metrics, under vLLM's names."""
    return web.Response(
        body=request.app[METRICS].render(), headers={hdrs.CONTENT_TYPE: CONTENT_TYPE_LATEST}
    )


async def show_version(request: web.Request) -> web.Response:
    """The server's version."""
    return _json(Version(version()))


async def show_openapi(request: web.Request) -> web.Response:
    """This API as an OpenAPI document."""
    return _json(openapi.document(request.app, version()))


async def show_docs(request: web.Request) -> web.Response:
    """This API as a page for people."""
    return _page(docs.render(openapi.document(request.app, version())))


async def no_icon(request: web.Request) -> web.Response:
    """Browsers ask for one beside any page; those of ours that have one hold it themselves."""
    return web.Response(status=204, headers={hdrs.CACHE_CONTROL: "max-age=86400"})


async def show_chat(request: web.Request) -> web.Response:
    """A chat page."""
    return _page(_chat_page())


@cache
def _chat_page() -> str:
    return Path(__file__).with_name("page.html").read_text("utf-8")


def _page(html: str) -> web.Response:
    # The page may run exactly the script it was written with, and talk to this server alone.
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    allowed = [
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
        for text in scripts
    ]
    allowed = allowed or ["'none'"]
    policy = (
        f"default-src 'none'; script-src {' '.join(allowed)}; "
        "style-src 'unsafe-inline'; img-src data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return web.Response(
        text=html,
        content_type="text/html",
        headers={
            "Content-Security-Policy": policy,
            "Referrer-Policy": "no-referrer",
            hdrs.CACHE_CONTROL: "no-cache",
        },
    )


routes = (
    web.get("/", show_chat),
    web.get("/health", health),
    web.get("/v1/health", health),
    web.get("/ready", ready),
    web.get("/metrics", metrics),
    web.get("/version", show_version),
    web.get("/openapi.json", show_openapi),
    web.get("/docs", show_docs),
    web.get("/favicon.ico", no_icon),
)
