"""POST /tokenize, POST /detokenize and GET /tokenizer_info, as vLLM has them."""

from __future__ import annotations

import msgspec
from aiohttp import web
from msgspec import UNSET

from gateway.chat import render_chat
from gateway.engine import ENGINE
from gateway.errors import ApiError, decode_body
from gateway.openai import (
    Detokenized,
    DetokenizeRequest,
    Tokenized,
    TokenizeRequest,
    TokenizerInfo,
)
from gateway.parameters import check_tokens, require_model

_TOKENIZE = msgspec.json.Decoder(TokenizeRequest)
_DETOKENIZE = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(request: web.Request) -> web.Response:
    """Token ids of a prompt, or of messages as chat would see them."""
    body = await decode_body(request, _TOKENIZE)
    model = require_model(request.app[ENGINE], body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "Give either prompt or messages.", param="prompt")
    if body.messages is not None:
        generate = body.add_generation_prompt is not False
        text, special = render_chat(model, body.messages, generate), bool(body.add_special_tokens)
    else:
        text, special = body.prompt or "", body.add_special_tokens is not False
    tokens = await model.vocabulary.encode(text, special)
    return _json(Tokenized(len(tokens), model.card.context_length, tokens))


async def detokenize(request: web.Request) -> web.Response:
    """Text of token ids, special tokens shown."""
    body = await decode_body(request, _DETOKENIZE)
    model = require_model(request.app[ENGINE], body.model)
    if body.tokens:
        check_tokens(body.tokens, model, "tokens")
    return _json(Detokenized(model.vocabulary.decode(body.tokens)))


async def tokenizer_info(request: web.Request) -> web.Response:
    """What a client needs to render chats itself."""
    card = require_model(request.app[ENGINE], None).card
    return _json(
        TokenizerInfo(
            tokenizer_class="PreTrainedTokenizerFast",
            model_max_length=card.context_length,
            vocab_size=card.vocab_size,
            bos_token=card.bos_token or UNSET,
            eos_token=card.eos_token or UNSET,
            pad_token=card.pad_token or UNSET,
            chat_template=card.chat_template or UNSET,
        )
    )


def _json(answer: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")
