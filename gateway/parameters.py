"""Checks and conversions of what chat and text completions have in common.

Bounds of single fields are in `gateway/openai.py`; here are the rules that need the model or two fields.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.engine import Engine
from gateway.errors import ApiError, counted, from_refusal
from gateway.link import SubmitOptions
from gateway.openai import GenerationRequest
from gateway.served import Model
from wire.errors import Refused
from wire.sampling import MAX_LOGIT_BIAS, MAX_STOP_IDS, Bias, Sampling

MAX_STOPS = 16
_MOST_CHARS_PER_TOKEN = 32  # on average over a prompt; prose has 4 or 5, indented code 8
_CHARS_PER_TOKEN = 4  # for admission only, before anything is tokenized


def require_model(engine: Engine, name: str | None) -> Model:
    """The served model, when `name` is its name or absent.

    Raises:
        ApiError: 404 another name; 503 no model yet.
    """
    try:
        model = engine.require_model()
    except Refused as refused:
        raise from_refusal(refused.code, refused.message) from None
    if name and name != model.card.name:
        raise ApiError(
            404,
            f"The model {name[:200]!r} does not exist here; this server serves {model.card.name!r}.",
            code="model_not_found",
            param="model",
        )
    return model


def estimate_tokens(characters: int) -> int:
    """Prompt tokens to admit a text by: admission comes before the cost of tokenizing."""
    return characters // _CHARS_PER_TOKEN + 1


async def encode(model: Model, text: str, add_special_tokens: bool, param: str) -> list[int]:
    """Token ids of a prompt.

    Raises:
        ApiError: 400 it is so much longer than the context that tokenizing it is not worth the time.
    """
    context = model.card.context_length
    if len(text) > context * _MOST_CHARS_PER_TOKEN:
        raise ApiError(
            400,
            f"The prompt has {len(text)} characters, more than {context * _MOST_CHARS_PER_TOKEN}, "
            f"which is the most this server tokenizes for a context of {context} tokens; "
            "shorten the prompt.",
            code="context_length_exceeded",
            param=param,
        )
    return await model.vocabulary.encode(text, add_special_tokens)


def check_tokens(tokens: Sequence[int], model: Model, param: str) -> None:
    """Raises ApiError 400 for an empty prompt or an id outside the vocabulary."""
    if not tokens:
        raise ApiError(400, f"{param} is empty; give at least one token.", param=param)
    wrong = next((id for id in tokens if not 0 <= id < model.card.vocab_size), None)
    if wrong is not None:
        raise _outside(wrong, model, param)


def _outside(token: int, model: Model, param: str) -> ApiError:
    return ApiError(
        400,
        f"{param}: token id {token} is not in the vocabulary; ids are 0 to "
        f"{model.card.vocab_size - 1}.",
        param=param,
    )


@dataclass(frozen=True, slots=True)
class Asked:
    """How many tokens the client wants, and the field it said so in."""

    tokens: int | None
    param: str = "max_tokens"


def fit(
    prompts: Sequence[int], choices: int, asked: Asked, model: Model, param: str, default: int = 0
) -> int:
    """Tokens that may be generated after each of `prompts`, which are lengths.

    Without a wish of the client: `default`, or as many as context and KV pool hold where that is fewer
    or 0. A wish beyond the pool is the executor's to refuse, as is a prompt that leaves no room there.

    Args:
        choices: after each prompt.
        param: where the prompts are.

    Raises:
        ApiError: 400 when prompt and output together exceed the context, naming both.
    """
    context = model.card.context_length
    prompt_tokens = max(prompts)
    room = context - prompt_tokens
    if room < 1:
        raise ApiError(
            400,
            f"The prompt has {counted(prompt_tokens, 'token')}, but the model's context is {context} tokens, "
            "prompt and output together; shorten the prompt.",
            code="context_length_exceeded",
            param=param,
        )
    most = min(model.room(prompt, choices) for prompt in prompts)
    if asked.tokens is None:
        return max(1, min(default or most, most))
    if asked.tokens > room:
        raise ApiError(
            400,
            f"The prompt has {counted(prompt_tokens, 'token')} and {asked.tokens} more are asked for, "
            f"{prompt_tokens + asked.tokens} in all, but the model's context is {context} tokens; shorten "
            + (f"the prompt or ask for at most {most}." if most > 0 else "the prompt."),
            code="context_length_exceeded",
            param=asked.param,
        )
    return asked.tokens


def stop_strings(request: GenerationRequest) -> list[str]:
    """Raises ApiError 400 for an empty stop string or too many."""
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    if len(stops) > MAX_STOPS:
        raise ApiError(
            400, f"stop: {len(stops)} strings given, at most {MAX_STOPS} allowed.", param="stop"
        )
    if any(not 0 < len(stop) <= 1024 for stop in stops):
        raise ApiError(400, "stop: each string must have 1 to 1024 characters.", param="stop")
    return stops


def options(
    request: GenerationRequest, model: Model, max_tokens: int, logprobs: int, tenant: str
) -> SubmitOptions:
    """How to generate.

    Args:
        max_tokens: at least 1, as `fit` gives it.
        logprobs: -1 none, else how many of the likeliest at each position.

    Raises:
        ApiError: 400 for values that do not go with the model or with each other.
    """
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise ApiError(
            400,
            f"min_tokens is {min_tokens}, more than the {counted(max_tokens, 'token')} that may be "
            "generated.",
            param="min_tokens",
        )
    sampling = Sampling(
        seed=secrets.randbits(63) if request.seed is None else request.seed & (2**63 - 1),
        temperature=_or(request.temperature, 1.0),
        top_k=max(0, request.top_k or 0),
        # OpenAI allows 0, which means the likeliest token alone.
        top_p=max(1e-9, _or(request.top_p, 1.0)),
        min_p=_or(request.min_p, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        ignore_eos=bool(request.ignore_eos),
        logprobs=logprobs,
        stop_ids=_stop_ids(request.stop_token_ids or [], model),
        logit_bias=_logit_bias(request.logit_bias or {}, model),
    )
    return SubmitOptions(sampling, request.n or 1, request.priority or 0, tenant)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _stop_ids(ids: list[int], model: Model) -> tuple[int, ...]:
    if len(ids) > MAX_STOP_IDS:
        raise ApiError(
            400,
            f"stop_token_ids: {len(ids)} ids given, at most {MAX_STOP_IDS} allowed.",
            param="stop_token_ids",
        )
    for id in ids:
        if not 0 <= id < model.card.vocab_size:
            raise _outside(id, model, "stop_token_ids")
    return tuple(ids)


def _logit_bias(biases: dict[str, float], model: Model) -> tuple[Bias, ...]:
    if len(biases) > MAX_LOGIT_BIAS:
        raise ApiError(
            400,
            f"logit_bias: {len(biases)} tokens given, at most {MAX_LOGIT_BIAS} allowed.",
            param="logit_bias",
        )
    checked = []
    for key, value in biases.items():
        # Digits alone: int() would also take " 1_0 ".
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise ApiError(
                400,
                f"logit_bias: the key {key[:50]!r} is not a token id; keys are ids in decimal digits.",
                param="logit_bias",
            )
        if int(key) >= model.card.vocab_size:
            raise _outside(int(key), model, "logit_bias")
        checked.append(Bias(int(key), value))
    return tuple(checked)


def refuse_response_format(request: GenerationRequest) -> None:
    """Raises ApiError 400 for structured output."""
    form = request.response_format
    if form is not None and form.get("type") != "text":
        raise unsupported(
            "response_format",
            f"response_format of type {str(form.get('type'))[:50]!r}",
            'leave it out or use {"type": "text"}',
        )


def unsupported(param: str, what: str, instead: str) -> ApiError:
    """400 for something OpenAI has and this server does not."""
    return ApiError(
        400, f"{what} is not supported yet; {instead}.", code="unsupported", param=param
    )
