"""OpenAI's request and response objects, with exactly their names.

Requests: unknown fields are ignored, null means default, every number has bounds. Fields that would change
the answer but are not supported yet are declared, so that using one is refused and not ignored.
Responses: what a stream sends token by token is not built from these but pre-encoded (`gateway/sse.py`).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from wire.sampling import MAX_CHOICES, MAX_LOGPROBS

Bounded = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
StopText = Annotated[str, Meta(min_length=1, max_length=1024)]

# ---------------------------------------------------------------- requests


class StreamOptions(Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # accepted; usage comes once, at the end


class GenerationRequest(Struct, kw_only=True):
    """What chat and text completions share. Fields OpenAI does not have are vLLM's."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Positive | None = None
    min_tokens: Bounded | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[StopText] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    priority: Annotated[int, Meta(ge=-100, le=100)] | None = None
    user: str | None = None
    response_format: dict[str, Any] | None = None


class Message(Struct, kw_only=True, omit_defaults=True):
    """One message of a conversation. `content` may be null where tool calls stand for it."""

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[Message]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """`POST /v1/completions`."""

    # One prompt or several, each as text or token ids; mixtures are refused by the handler.
    prompt: str | list[str | int | list[int]]
    max_tokens: Bounded | None = None  # 0 with echo: the prompts alone
    suffix: str | None = None
    echo: bool | None = None
    best_of: Bounded | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: bool | None = None


class TokenizeRequest(Struct, kw_only=True):
    """`POST /tokenize`: of a prompt, or of messages after the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


# ---------------------------------------------------------------- responses


class PromptTokensDetails(Struct):
    cached_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[TokenLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]  # in characters of the choice's text


FinishReason = Literal["stop", "length"]


class AssistantMessage(Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Struct):
    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"


class TextChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class TextCompletion(Struct):
    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage
    object: str = "text_completion"


class UsageChunk(Struct):
    """The last chunk of a stream whose client asked for usage."""

    id: str
    object: str
    created: int
    model: str
    usage: Usage
    choices: list[Any] = []


class ModelObject(Struct):
    id: str
    created: int
    root: str
    max_model_len: int
    object: str = "model"
    owned_by: str = "pagekeeper"


class ModelList(Struct):
    data: list[ModelObject]
    object: str = "list"


class Tokenized(Struct):
    count: int
    max_model_len: int
    tokens: list[int]


class Detokenized(Struct):
    prompt: str


class TokenizerInfo(Struct, omit_defaults=True):
    """`GET /tokenizer_info`. Tokens the model does not have are left out."""

    tokenizer_class: str
    model_max_length: int
    vocab_size: int
    bos_token: str | UnsetType = UNSET
    eos_token: str | UnsetType = UNSET
    pad_token: str | UnsetType = UNSET
    chat_template: str | UnsetType = UNSET
