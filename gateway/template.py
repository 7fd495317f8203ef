"""Chat templates: a model's own Jinja program that turns messages into one prompt.

The program comes with the model, so it runs in Jinja's immutable sandbox; one from a client is never run.
The environment offers what published templates rely on, which is what transformers' `apply_chat_template`
gives them: trimmed blocks, loop controls, `tojson` without HTML escapes, `raise_exception`,
`strftime_now`, and `{% generation %}` blocks, which only mark text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class BadTemplate(ValueError):
    """The model's template is not valid Jinja, and where."""


class RenderError(ValueError):
    """The template refused these messages, or failed on them."""


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; here its text just stands."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja.
        special: names such as `bos_token` the template may use, and their text.

    Raises:
        BadTemplate: `source` does not compile.
    """

    def __init__(self, source: str, special: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise BadTemplate(f"the model's chat template does not compile: {error}") from error
        self.source = source
        self._special = dict(special)

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """The prompt for `messages`, which hold plain JSON values only.

        Raises:
            RenderError: the template raised; its message says what it wants.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special,
            )
        except Exception as error:  # a template can raise anything: bad key, wrong type, overflow
            raise RenderError(str(error) or type(error).__name__) from error
