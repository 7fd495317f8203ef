"""This API as an OpenAPI 3.1 document, made from the router and the structs that decode requests.

What is served is what is listed: paths come from the router, schemas from the types, sentences from the
handlers' docstrings. The table here only says which types belong to which route.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import hdrs, web

from gateway import openai
from gateway.auth import KEYS, PUBLIC
from gateway.config import CONFIG
from gateway.errors import ErrorBody


class State(msgspec.Struct, frozen=True):
    """Answer of the probes: one word, or why not."""

    status: str


class Version(msgspec.Struct, frozen=True):
    """Answer of /version."""

    version: str


@dataclass(frozen=True, slots=True)
class Shape:
    """What goes in and out of one route. `answer` is a struct, or a media type without a schema."""

    answer: type | str
    body: type | None = None
    streams: bool = False  # with `stream: true` the answer is text/event-stream
    problems: tuple[int, ...] = ()  # error statuses beside those every route has


_GENERATION_PROBLEMS = (400, 404, 408, 413, 415, 429, 500, 503)
_BODY_PROBLEMS = (400, 404, 408, 413, 415, 503)

_SHAPES: dict[tuple[str, str], Shape] = {
    ("GET", "/"): Shape("text/html"),
    ("GET", "/docs"): Shape("text/html"),
    ("GET", "/metrics"): Shape("text/plain"),
    ("GET", "/openapi.json"): Shape("application/json"),
    ("GET", "/version"): Shape(Version),
    ("GET", "/health"): Shape(State, problems=(503,)),
    ("GET", "/v1/health"): Shape(State, problems=(503,)),
    ("GET", "/ready"): Shape(State, problems=(503,)),
    ("GET", "/v1/models"): Shape(openai.ModelList, problems=(503,)),
    ("GET", "/v1/models/{id}"): Shape(openai.ModelObject, problems=(404, 503)),
    ("GET", "/tokenizer_info"): Shape(openai.TokenizerInfo, problems=(503,)),
    ("POST", "/tokenize"): Shape(openai.Tokenized, openai.TokenizeRequest, problems=_BODY_PROBLEMS),
    ("POST", "/detokenize"): Shape(
        openai.Detokenized, openai.DetokenizeRequest, problems=_BODY_PROBLEMS
    ),
    ("POST", "/v1/chat/completions"): Shape(
        openai.ChatCompletion, openai.ChatRequest, streams=True, problems=_GENERATION_PROBLEMS
    ),
    ("POST", "/v1/completions"): Shape(
        openai.TextCompletion, openai.CompletionRequest, streams=True, problems=_GENERATION_PROBLEMS
    ),
}
_UNLISTED = frozenset({"/favicon.ico"})  # browsers ask for it; nobody else has a use for it
_PROBES = frozenset({"/health", "/v1/health", "/ready"})  # a 503 of theirs is their own answer


def document(app: web.Application, version: str) -> dict[str, Any]:
    """The OpenAPI document of `app`, as JSON-ready values."""
    types = {shape.body for shape in _SHAPES.values() if shape.body is not None}
    types |= {shape.answer for shape in _SHAPES.values() if not isinstance(shape.answer, str)}
    ordered = [ErrorBody, *sorted(types, key=lambda kind: kind.__name__)]
    _, schemas = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    guarded = bool(len(app[KEYS]))
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "pagekeeper",
            "version": version,
            "description": "An LLM server that speaks OpenAI's API. Errors always have the form "
            '{"error": {"message", "type", "param", "code"}}.',
        },
        "paths": _paths(app, guarded),
        "components": {"schemas": schemas},
    }
    if guarded:
        document["components"]["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer", "description": "An API key."}
        }
        document["security"] = [{"bearer": []}]
    return document


def _paths(app: web.Application, guarded: bool) -> dict[str, dict[str, Any]]:
    paths: dict[str, dict[str, Any]] = {}
    for route in app.router.routes():
        if route.resource is None or route.method in (hdrs.METH_HEAD, hdrs.METH_OPTIONS):
            continue
        path = route.resource.canonical
        if path in _UNLISTED:
            continue
        operation = _operation(route, path)
        public = path in PUBLIC or (path == "/metrics" and app[CONFIG].public_metrics)
        if guarded and public:
            operation["security"] = []
        elif guarded:
            operation["responses"]["401"] = _problem(401)
        paths.setdefault(path, {})[route.method.lower()] = operation
    return paths


def _operation(route: web.AbstractRoute, path: str) -> dict[str, Any]:
    shape = _SHAPES.get((route.method, path), Shape("application/json"))
    said = inspect.getdoc(route.handler) or f"{route.method} {path}"
    summary, _, description = said.partition("\n\n")
    responses = {"200": {"description": "Done.", "content": _answer(shape)}}
    for status in shape.problems:
        responses[str(status)] = _problem(status)
    if path in _PROBES:
        responses["503"] = {"description": "Not well; says why.", "content": _answer(shape)}
    operation: dict[str, Any] = {
        "operationId": re.sub(r"[^a-z0-9]+", "_", f"{route.method} {path}".lower()).strip("_"),
        "summary": " ".join(summary.split()),
        "responses": responses,
    }
    # Paragraphs for people who call; "Raises:" is for those who read the source.
    if description := " ".join(description.partition("Raises:")[0].split()):
        operation["description"] = description
    if shape.body is not None:
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _reference(shape.body)}},
        }
    if names := _parameters(path):
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return operation


def _parameters(path: str) -> list[str]:
    return [part.partition("}")[0] for part in path.split("{")[1:]]


def _answer(shape: Shape) -> dict[str, Any]:
    if isinstance(shape.answer, str):
        return {shape.answer: {}}
    content: dict[str, Any] = {"application/json": {"schema": _reference(shape.answer)}}
    if shape.streams:
        content["text/event-stream"] = {
            "schema": {
                "type": "string",
                "description": "With stream: true. Events `data: {chunk}`, the last `data: [DONE]`.",
            }
        }
    return content


def _problem(status: int) -> dict[str, Any]:
    return {
        "description": _MEANINGS[status],
        "content": {"application/json": {"schema": _reference(ErrorBody)}},
    }


_MEANINGS = {
    400: "The request is at fault; `param` names the field.",
    401: "No API key, or one that is not known.",
    404: "No such model.",
    408: "The body arrived too slowly.",
    413: "The body is too large.",
    415: "The body is not JSON, or it is compressed.",
    429: "This key's limit is reached; retry after `Retry-After` seconds.",
    500: "A fault of the server.",
    503: "Overloaded, loading or shutting down; retry after `Retry-After` seconds.",
}


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
