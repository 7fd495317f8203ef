"""The application: every route, every shared part, what happens at start and end. A table of contents."""

from __future__ import annotations

from collections.abc import AsyncIterator

from aiohttp import web

from gateway import chat, completions, models, ops, tokens
from gateway.config import GatewayConfig
from gateway.engine import ENGINE, Engine
from gateway.guard import protect
from gateway.limits import ADMISSION, Admission, Limits
from gateway.metrics import METRICS, Metrics

ROUTES = (
    web.post("/v1/chat/completions", chat.chat_completions),
    web.post("/v1/completions", completions.completions),
    web.get("/v1/models", models.list_models),
    web.get("/v1/models/{id:.+}", models.get_model),
    web.post("/tokenize", tokens.tokenize),
    web.post("/detokenize", tokens.detokenize),
    web.get("/tokenizer_info", tokens.tokenizer_info),
    *ops.routes,
)


def build_app(config: GatewayConfig) -> web.Application:
    """The gateway as an application. Serve it with `handler_cancellation`, or a client that leaves a
    request without a stream is not noticed.

    Raises:
        ValueError: the settings do not go together.
    """
    app = web.Application(client_max_size=config.max_body)
    protect(app, config)
    metrics = Metrics()
    app[METRICS] = metrics
    app[ADMISSION] = Admission(
        Limits(config.max_requests, config.max_queued_tokens, config.per_key_requests)
    )
    app[ENGINE] = Engine(config.run_dir, config.executors, metrics)
    app.cleanup_ctx.append(_connected)
    app.router.add_routes(ROUTES)
    return app


async def _connected(app: web.Application) -> AsyncIterator[None]:
    """Sessions with the executors, from the application's start to its end."""
    app[ENGINE].start()
    yield
    app[ENGINE].stop()
