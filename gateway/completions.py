"""POST /v1/completions: one prompt or several, as text or token ids."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web

from gateway.auth import KEY_ID, TENANT
from gateway.choice import Piece, TokenEntry
from gateway.config import CONFIG
from gateway.engine import ENGINE
from gateway.errors import ApiError, decode_body
from gateway.generation import Generation, Job, collect, stream
from gateway.limits import ADMISSION
from gateway.metrics import METRICS
from gateway.openai import (
    CompletionLogprobs,
    CompletionRequest,
    PromptTokensDetails,
    TextChoice,
    TextCompletion,
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
from gateway.sse import DONE, EventStream, event, json_text
from gateway.vocabulary import Vocabulary

_DECODER = msgspec.json.Decoder(CompletionRequest)
_OBJECT = "text_completion"
_DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 128
MAX_CHOICES_IN_ALL = 512


@dataclass(slots=True, frozen=True)
class _Prompt:
    tokens: list[int]
    text: str


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue prompts, streamed or whole."""
    arrived, created = time.monotonic(), int(time.time())
    body = await decode_body(request, _DECODER)
    engine, metrics = request.app[ENGINE], request.app[METRICS]
    model = require_model(engine, body.model)
    _refuse_unsupported(body)
    given = split_prompts(body.prompt)
    if len(given) * (body.n or 1) > MAX_CHOICES_IN_ALL:
        raise ApiError(
            400,
            f"{len(given)} prompts of {body.n} choices are {len(given) * (body.n or 1)} choices; "
            f"at most {MAX_CHOICES_IN_ALL} in one request.",
            param="n",
        )
    id = f"cmpl-{uuid.uuid4().hex}"
    estimate = sum(len(p) if isinstance(p, list) else estimate_tokens(len(p)) for p in given)
    with request.app[ADMISSION].enter(request[KEY_ID], estimate) as ticket:
        prompts = [await _prepare(body, model, prompt) for prompt in given]
        chunks = TextChunks(id, created, model, [prompt.text for prompt in prompts], body.n or 1)
        wanted = body.stream_options is not None and body.stream_options.include_usage
        last = chunks.usage if wanted else None
        metrics.on_request(model.card.name)
        if body.max_tokens == 0:
            return await _echo_only(request, body, chunks, prompts, bool(wanted))
        job = _job(body, model, prompts, request[TENANT])
        with Generation(engine, model, metrics, ticket, job, arrived) as generation:
            if body.stream:
                return await stream(request, generation, chunks.render, last)
            pieces = await collect(generation)
            whole = chunks.whole(pieces, generation.usage())
    return web.Response(body=msgspec.json.encode(whole), content_type="application/json")


def split_prompts(prompt: str | list[str | int | list[int]]) -> Sequence[str | list[int]]:
    """The prompts of a request, each a text or token ids.

    Raises:
        ApiError: 400 for none, too many, or a mixture of kinds.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "prompt is empty; give a text or token ids.", param="prompt")
    ids = [item for item in prompt if isinstance(item, int)]
    texts = [item for item in prompt if isinstance(item, str)]
    lists = [item for item in prompt if isinstance(item, list)]
    if len(ids) == len(prompt):
        return [ids]
    if len(prompt) > MAX_PROMPTS:
        raise ApiError(
            400, f"prompt: {len(prompt)} prompts given, at most {MAX_PROMPTS}.", param="prompt"
        )
    if len(texts) == len(prompt):
        return texts
    if len(lists) == len(prompt):
        return lists
    raise ApiError(
        400,
        "prompt mixes kinds; give a text, texts, token ids, or lists of token ids.",
        param="prompt",
    )


def _refuse_unsupported(body: CompletionRequest) -> None:
    refuse_response_format(body)
    if body.suffix:
        raise unsupported("suffix", "suffix", "leave it out")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of", f"best_of {body.best_of} with n {body.n or 1}", "leave it out")
    if body.echo and body.logprobs is not None:
        raise unsupported("echo", "echo together with logprobs", "leave one of them out")
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(
            400, "max_tokens is 0; ask for at least 1 token, or set echo.", param="max_tokens"
        )


async def _prepare(body: CompletionRequest, model: Model, prompt: str | list[int]) -> _Prompt:
    """Token ids of one prompt, and the text an echo would show."""
    if isinstance(prompt, list):
        check_tokens(prompt, model, "prompt")
        return _Prompt(prompt, model.vocabulary.decode(prompt, True) if body.echo else "")
    if not prompt:
        raise ApiError(400, "prompt is empty; give at least one character.", param="prompt")
    tokens = await encode(model, prompt, body.add_special_tokens is not False, "prompt")
    check_tokens(tokens, model, "prompt")
    return _Prompt(tokens, prompt if body.echo else "")


def _job(body: CompletionRequest, model: Model, prompts: Sequence[_Prompt], tenant: str) -> Job:
    # All prompts share one set of parameters, so the one with the least room says how much fits.
    lengths = [len(prompt.tokens) for prompt in prompts]
    asked = Asked(body.max_tokens)
    max_tokens = fit(lengths, body.n or 1, asked, model, "prompt", _DEFAULT_MAX_TOKENS)
    logprobs = -1 if body.logprobs is None else body.logprobs
    return Job(
        prompts=[prompt.tokens for prompt in prompts],
        echoes=[prompt.text for prompt in prompts],
        options=options(body, model, max_tokens, logprobs, tenant),
        stops=stop_strings(body),
        include_stop=bool(body.include_stop_str_in_output),
    )


async def _echo_only(
    request: web.Request,
    body: CompletionRequest,
    chunks: TextChunks,
    prompts: Sequence[_Prompt],
    wanted: bool,
) -> web.StreamResponse:
    """max_tokens 0 with echo: the prompts come back, nothing is computed."""
    pieces = [Piece(index, "", "length") for index in range(len(prompts) * (body.n or 1))]
    total = sum(len(prompt.tokens) for prompt in prompts)
    usage = Usage(total, 0, total, PromptTokensDetails(0))
    if body.stream:
        events = EventStream(request, request.app[CONFIG].write_timeout)
        response = await events.open()
        await events.send(b"".join(map(chunks.render, pieces)))
        await events.send((chunks.usage(usage) if wanted else b"") + DONE)
        await events.close()
        return response
    whole = chunks.whole([[piece] for piece in pieces], usage)
    return web.Response(body=msgspec.json.encode(whole), content_type="application/json")


def completion_logprobs(
    vocabulary: Vocabulary, entries: Sequence[TokenEntry]
) -> CompletionLogprobs:
    """`choices[].logprobs` of text completions. The chosen token is always among the top ones."""
    tokens, chosen, tops, offsets = [], [], [], []
    for entry in entries:
        text = _shown(vocabulary, entry.token)
        top = {_shown(vocabulary, other.token): other.logprob for other in entry.logprobs.top}
        tokens.append(text)
        chosen.append(entry.logprobs.logprob)
        tops.append(top | {text: entry.logprobs.logprob})
        offsets.append(entry.offset)
    return CompletionLogprobs(tokens, chosen, tops, offsets)


def _shown(vocabulary: Vocabulary, token: int) -> str:
    """A token's text; one that is not whole characters as OpenAI writes it, so that keys stay distinct."""
    data = vocabulary.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class TextChunks:
    """Writes the objects of one answer.

    Args:
        echoes: what the choices of each prompt begin with.
        n: choices per prompt.
    """

    def __init__(self, id: str, created: int, model: Model, echoes: Sequence[str], n: int) -> None:
        self._id, self._created, self._model = id, created, model
        head = msgspec.json.encode(
            {"id": id, "object": _OBJECT, "created": created, "model": model.card.name}
        )
        opening = b"data: " + head[:-1] + b',"choices":[{"index":'
        self._heads = [opening + b'%d,"text":' % index for index in range(len(echoes) * n)]
        self._echoes = [echo for echo in echoes for _ in range(n)]

    def render(self, piece: Piece) -> bytes:
        """One event."""
        echo, self._echoes[piece.choice] = self._echoes[piece.choice], ""
        head = self._heads[piece.choice] + json_text(echo + piece.text)
        if piece.finish is None and not piece.entries:
            return head + b',"logprobs":null,"finish_reason":null}]}\n\n'
        logprobs = (
            msgspec.json.encode(completion_logprobs(self._model.vocabulary, piece.entries))
            if piece.entries
            else b"null"
        )
        finish = msgspec.json.encode(piece.finish)
        return b'%b,"logprobs":%b,"finish_reason":%b}]}\n\n' % (head, logprobs, finish)

    def usage(self, usage: Usage) -> bytes:
        """The event that comes last when usage was asked for."""
        chunk = UsageChunk(self._id, _OBJECT, self._created, self._model.card.name, usage)
        return event(msgspec.json.encode(chunk))

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: Usage) -> TextCompletion:
        """The answer that is not streamed; `pieces` by choice."""
        choices = [self._choice(own) for own in pieces]
        return TextCompletion(self._id, self._created, self._model.card.name, choices, usage)

    def _choice(self, pieces: Sequence[Piece]) -> TextChoice:
        entries = [entry for piece in pieces for entry in piece.entries]
        last = pieces[-1]
        return TextChoice(
            index=last.choice,
            text=self._echoes[last.choice] + "".join(piece.text for piece in pieces),
            logprobs=completion_logprobs(self._model.vocabulary, entries) if entries else None,
            finish_reason=last.finish or "stop",
        )
