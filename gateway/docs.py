"""The OpenAPI document as one page for people: no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

from functools import cache
from html import escape
from pathlib import Path
from typing import Any

_EXAMPLE = """curl -N http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
  -d '{"messages": [{"role": "user", "content": "Hello!"}], "stream": true}'"""


def render(document: dict[str, Any]) -> str:
    """A whole HTML page for an OpenAPI document."""
    schemas = document["components"]["schemas"]
    sections = [
        _section(method, path, operation, schemas)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    info = document["info"]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(info['title'])} API</title><style>{_style()}</style></head><body><main>"
        f"<h1>{escape(info['title'])} API <small>{escape(info['version'])}</small></h1>"
        f'<p class="lead">{escape(info["description"])}</p><pre>{escape(_EXAMPLE)}</pre>'
        f"{''.join(sections)}</main></body></html>"
    )


@cache
def _style() -> str:
    return Path(__file__).with_name("docs.css").read_text("utf-8")


def _section(
    method: str, path: str, operation: dict[str, Any], schemas: dict[str, dict[str, Any]]
) -> str:
    about = operation.get("description", "")
    parts = [
        f'<section><h2><b class="{method}">{method.upper()}</b> {escape(path)}</h2>',
        f'<p class="about">{escape(operation["summary"])} {escape(about)}</p>',
    ]
    if body := operation.get("requestBody"):
        parts += ["<h3>Body</h3>", _fields(body["content"]["application/json"]["schema"], schemas)]
    answer = operation["responses"]["200"].get("content", {}).get("application/json")
    if answer:
        parts += ["<h3>Answer</h3>", _fields(answer["schema"], schemas)]
    return "".join((*parts, "</section>"))


def _fields(schema: dict[str, Any], schemas: dict[str, dict[str, Any]]) -> str:
    target = schemas[_name(schema)] if "$ref" in schema else schema
    required = set(target.get("required", ()))
    rows = [
        f"<tr><td>{escape(name)}{'' if name in required else ' <i>(optional)</i>'}</td>"
        f'<td class="type">{escape(_kind(field))}</td></tr>'
        for name, field in target.get("properties", {}).items()
    ]
    return f"<table>{''.join(rows)}</table>"


def _name(schema: dict[str, Any]) -> str:
    return str(schema["$ref"]).rsplit("/", 1)[1]


def _kind(schema: dict[str, Any]) -> str:
    """A short way to write a schema, bounds and default included."""
    if "$ref" in schema:
        return _name(schema)
    if "anyOf" in schema:
        return " | ".join(_kind(option) for option in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(repr(value) for value in schema["enum"])
    kind = str(schema.get("type", "any"))
    if kind == "array":
        kind = f"[{_kind(schema['items'])}]" if isinstance(schema.get("items"), dict) else "[any]"
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    most = schema.get("maximum", schema.get("exclusiveMaximum"))
    if least is not None or most is not None:
        kind += f" {'' if least is None else least}…{'' if most is None else most}"
    if schema.get("default") not in (None, [], {}):
        kind += f" = {schema['default']!r}"
    return kind
