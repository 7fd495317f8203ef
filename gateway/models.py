"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

import msgspec
from aiohttp import web

from gateway.engine import ENGINE
from gateway.openai import ModelList, ModelObject
from gateway.parameters import require_model
from gateway.served import Model


def _describe(model: Model) -> ModelObject:
    card = model.card
    return ModelObject(
        id=card.name, created=card.created, root=card.root, max_model_len=card.context_length
    )


async def list_models(request: web.Request) -> web.Response:
    """All models: the one that is served."""
    models = ModelList([_describe(require_model(request.app[ENGINE], None))])
    return web.Response(body=msgspec.json.encode(models), content_type="application/json")


async def get_model(request: web.Request) -> web.Response:
    """One model; its id may hold slashes."""
    model = _describe(require_model(request.app[ENGINE], request.match_info["id"]))
    return web.Response(body=msgspec.json.encode(model), content_type="application/json")
