"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
from aiohttp import web

from gateway.auth import KEY_ID, TENANT
from gateway.choice import Piece, TokenEntry
from gateway.engine import ENGINE
from gateway.errors import ApiError, decode_body
from gateway.generation import Generation, Job, collect, stream
from gateway.limits import ADMISSION
from gateway.metrics import METRICS
from gateway.openai import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    Message,
    TokenLogprob,
    TopLogprob,
    Usage,
    UsageChunk,
)
from gateway.parameters import (
    Asked,
    check_tokens,
    encode,
    estimate_tokens,
    fit,
    options,
    refuse_response_format,
    require_model,
    stop_strings,
    unsupported,
)
from gateway.served import Model
from gateway.sse import event, json_text
from gateway.template import RenderError
from gateway.vocabulary import Vocabulary

_DECODER = msgspec.json.Decoder(ChatRequest)
_CHUNK = "chat.completion.chunk"


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, streamed or whole."""
    arrived, created = time.monotonic(), int(time.time())
    body = await decode_body(request, _DECODER)
    engine, metrics = request.app[ENGINE], request.app[METRICS]
    model = require_model(engine, body.model)
    _refuse_unsupported(body)
    text = render_chat(model, body.messages)
    with request.app[ADMISSION].enter(request[KEY_ID], estimate_tokens(len(text))) as ticket:
        # The template writes special tokens itself, so none are added.
        prompt = await encode(model, text, False, "messages")
        job = _job(body, model, prompt, request[TENANT])
        metrics.on_request(model.card.name)
        id = f"chatcmpl-{uuid.uuid4().hex}"
        with Generation(engine, model, metrics, ticket, job, arrived) as generation:
            if body.stream:
                chunks = ChatChunks(id, created, model, job.choices)
                wanted = body.stream_options is not None and body.stream_options.include_usage
                last = chunks.usage if wanted else None
                return await stream(request, generation, chunks.render, last)
            pieces = await collect(generation)
            whole = ChatCompletion(
                id=id,
                created=created,
                model=model.card.name,
                choices=[_choice(model.vocabulary, own) for own in pieces],
                usage=generation.usage(),
            )
    return web.Response(body=msgspec.json.encode(whole), content_type="application/json")


def render_chat(
    model: Model, messages: Sequence[Message], add_generation_prompt: bool = True
) -> str:
    """The prompt the model's chat template makes of `messages`.

    Raises:
        ApiError: 400, also when the model has no template or it refuses the messages.
    """
    if not messages:
        raise ApiError(400, "messages is empty; send at least one message.", param="messages")
    if model.template is None:
        raise ApiError(
            400,
            f"The model {model.card.name!r} has no chat template; use /v1/completions.",
            code="no_chat_template",
        )
    plain = [_plain(message, index) for index, message in enumerate(messages)]
    try:
        return model.template.render(plain, add_generation_prompt)
    except RenderError as error:
        raise ApiError(
            400,
            f"The model's chat template does not take these messages: {error}",
            param="messages",
        ) from None


def _plain(message: Message, index: int) -> dict[str, Any]:
    """A message as templates expect it: a dict whose content is one text."""
    plain: dict[str, Any] = msgspec.to_builtins(message)
    if message.content is None and not message.tool_calls:
        raise ApiError(
            400,
            f"messages[{index}].content is missing; give a text.",
            param=f"messages[{index}].content",
        )
    if isinstance(message.content, list):
        plain["content"] = "\n".join(
            _part_text(part, f"messages[{index}].content[{place}]")
            for place, part in enumerate(message.content)
        )
    return plain


def _part_text(part: dict[str, Any], where: str) -> str:
    kind, text = part.get("type"), part.get("text")
    if kind != "text":
        raise unsupported(where, f"content of type {str(kind)[:50]!r}", "send text parts only")
    if not isinstance(text, str):
        raise ApiError(400, f"{where}.text must be a string.", param=f"{where}.text")
    return text


def _refuse_unsupported(body: ChatRequest) -> None:
    refuse_response_format(body)
    if body.tools and body.tool_choice != "none":
        raise unsupported("tools", "Calling tools", 'leave tools out or set tool_choice to "none"')
    if body.tool_choice not in (None, "none", "auto"):
        raise unsupported("tool_choice", "tool_choice", 'leave it out or set it to "none"')
    if body.functions or body.function_call not in (None, "none", "auto"):
        raise unsupported("functions", "Calling functions", "leave functions out")
    if body.chat_template is not None:
        raise unsupported("chat_template", "A chat template of the client's", "leave it out")
    if body.chat_template_kwargs:
        raise unsupported("chat_template_kwargs", "chat_template_kwargs", "leave it out")


def _job(body: ChatRequest, model: Model, prompt: list[int], tenant: str) -> Job:
    check_tokens(prompt, model, "messages")
    asked = (
        Asked(body.max_tokens)
        if body.max_completion_tokens is None
        else Asked(body.max_completion_tokens, "max_completion_tokens")
    )
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true.", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else -1
    max_tokens = fit([len(prompt)], body.n or 1, asked, model, "messages")
    return Job(
        prompts=[prompt],
        echoes=[""],
        options=options(body, model, max_tokens, logprobs, tenant),
        stops=stop_strings(body),
        include_stop=bool(body.include_stop_str_in_output),
    )


def _choice(vocabulary: Vocabulary, pieces: Sequence[Piece]) -> ChatChoice:
    entries = [entry for piece in pieces for entry in piece.entries]
    return ChatChoice(
        index=pieces[-1].choice,
        message=AssistantMessage("".join(piece.text for piece in pieces)),
        logprobs=chat_logprobs(vocabulary, entries) if entries else None,
        finish_reason=pieces[-1].finish or "stop",
    )


def chat_logprobs(vocabulary: Vocabulary, entries: Sequence[TokenEntry]) -> ChatLogprobs:
    """`choices[].logprobs` of chat."""
    content = []
    for entry in entries:
        data = vocabulary.token_bytes(entry.token)
        top = []
        for other in entry.logprobs.top:
            other_data = vocabulary.token_bytes(other.token)
            top.append(TopLogprob(_shown(other_data), other.logprob, list(other_data)))
        content.append(TokenLogprob(_shown(data), entry.logprobs.logprob, list(data), top))
    return ChatLogprobs(content)


def _shown(data: bytes) -> str:
    return data.decode(errors="replace")


class ChatChunks:
    """Writes the chunks of one stream.

    The first chunk of each choice names the role, and no chunk does nothing else: clients take the first
    chunk for the first token.
    """

    def __init__(self, id: str, created: int, model: Model, choices: int) -> None:
        self._id, self._created, self._model = id, created, model
        head = msgspec.json.encode(
            {"id": id, "object": _CHUNK, "created": created, "model": model.card.name}
        )
        opening = b"data: " + head[:-1] + b',"choices":[{"index":'
        self._first = [
            opening + b'%d,"delta":{"role":"assistant","content":' % index
            for index in range(choices)
        ]
        self._later = [opening + b'%d,"delta":{"content":' % index for index in range(choices)]
        self._begun = [False] * choices

    def render(self, piece: Piece) -> bytes:
        """One event."""
        heads = self._later if self._begun[piece.choice] else self._first
        self._begun[piece.choice] = True
        head = heads[piece.choice] + json_text(piece.text)
        if piece.finish is None and not piece.entries:
            return head + b'},"logprobs":null,"finish_reason":null}]}\n\n'
        logprobs = (
            msgspec.json.encode(chat_logprobs(self._model.vocabulary, piece.entries))
            if piece.entries
            else b"null"
        )
        finish = msgspec.json.encode(piece.finish)
        return b'%b},"logprobs":%b,"finish_reason":%b}]}\n\n' % (head, logprobs, finish)

    def usage(self, usage: Usage) -> bytes:
        """The event that comes last when usage was asked for."""
        chunk = UsageChunk(self._id, _CHUNK, self._created, self._model.card.name, usage)
        return event(msgspec.json.encode(chunk))
