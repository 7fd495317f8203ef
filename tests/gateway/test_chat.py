"""Chat completions as clients see them, over a real socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import openai
import pytest
from openai import AsyncStream
from openai.types.chat import ChatCompletionChunk

from executor.accept import Bounds, accept
from gateway.chat import ChatChunks
from gateway.choice import Piece
from gateway.engine import ENGINE
from tests.fake_executor import Script, byte_level_tokenizer, make_card
from tests.gateway.serving import Served, run, serve, until
from wire.errors import Code, Refused
from wire.generate import Failed, Submit

TOKENIZER = byte_level_tokenizer()
HI: Any = [{"role": "user", "content": "Hi"}]
URL = "/v1/chat/completions"


def _ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def _saying(*texts: str, finish: str = "stop", delay: float = 0.002, **more: Any) -> Any:
    """Answers with one text per choice, a token per event."""

    def respond(submit: Submit) -> Script:
        choices = [_ids(texts[index % len(texts)]) for index in range(submit.n)]
        return Script(choices, finish, delay=delay, **more)

    return respond


def _events(raw: bytes) -> list[dict[str, Any]]:
    """The events of a stream, whose framing is checked byte for byte."""
    assert raw.endswith(b"data: [DONE]\n\n")
    parts = raw.split(b"\n\n")
    assert parts.pop() == b""
    assert parts.pop() == b"data: [DONE]"
    assert all(part.startswith(b"data: {") and b"\n" not in part for part in parts)
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


def _texts(events: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in events:
        for choice in chunk["choices"]:
            text = choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


async def _stream(served: Served, **body: Any) -> list[dict[str, Any]]:
    raw = await served.raw(URL, {"messages": HI, "stream": True, **body})
    return _events(raw)


def test_a_chat_is_answered_through_the_openai_client() -> None:
    async def test() -> None:
        async with serve(_saying("Hello world", cached=7)) as served:
            answer = await served.client.chat.completions.create(
                model="org/fake-model", messages=HI, temperature=0, seed=1
            )
            assert answer.object == "chat.completion"
            assert answer.choices[0].message.content == "Hello world"
            assert answer.choices[0].message.role == "assistant"
            assert answer.choices[0].finish_reason == "stop"
            prompt = _ids("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
            assert answer.usage is not None
            assert answer.usage.prompt_tokens == len(prompt)
            assert answer.usage.completion_tokens == len(_ids("Hello world")) + 1
            assert answer.usage.total_tokens == len(prompt) + len(_ids("Hello world")) + 1
            assert answer.usage.prompt_tokens_details is not None
            assert answer.usage.prompt_tokens_details.cached_tokens == 7
            assert answer._request_id
            assert served.executor.submits[0].tokens == b"".join(
                id.to_bytes(4, "little") for id in prompt
            )

    run(test())


def test_a_chat_streams_through_the_openai_client() -> None:
    async def test() -> None:
        async with serve(_saying("Hello world, again")) as served:
            stream: AsyncStream[ChatCompletionChunk] = await served.client.chat.completions.create(
                model="org/fake-model", messages=HI, stream=True
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Hello world, again"
            assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
            assert len({chunk.id for chunk in chunks}) == 1
            assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == [
                "stop"
            ]

    run(test())


def test_the_bytes_of_a_stream_are_exact() -> None:
    async def test() -> None:
        async with serve(_saying("t", finish="length")) as served:
            url = served.url + URL
            async with served.http.post(url, json={"messages": HI, "stream": True}) as response:
                assert response.headers["Content-Type"] == "text/event-stream"
                assert response.headers["X-Accel-Buffering"] == "no"
                assert response.headers["Cache-Control"] == "no-cache"
                assert response.headers["x-request-id"]
                raw = await response.read()
            (chunk,) = _events(raw)
            assert raw == (
                b'data: {"id":"%b","object":"chat.completion.chunk","created":%d,'
                b'"model":"org/fake-model","choices":[{"index":0,"delta":{"role":"assistant",'
                b'"content":"t"},"logprobs":null,"finish_reason":"length"}]}\n\n'
                b"data: [DONE]\n\n" % (chunk["id"].encode(), chunk["created"])
            )

    run(test())


def test_the_role_comes_with_the_first_text_and_only_there() -> None:
    async def test() -> None:
        async with serve(_saying("Hello world", "The fox")) as served:
            events = await _stream(served, n=2)
            for index in (0, 1):
                deltas = [
                    choice["delta"]
                    for chunk in events
                    for choice in chunk["choices"]
                    if choice["index"] == index
                ]
                assert deltas[0]["role"] == "assistant"
                assert deltas[0]["content"]
                assert all("role" not in delta for delta in deltas[1:])

    run(test())


def test_emoji_and_cjk_stream_without_broken_characters() -> None:
    text = "日本語と 🙂👩‍👩‍👧 é한국어\u2028\u0085 done"

    async def test() -> None:
        async with serve(_saying(text)) as served:
            whole = await served.client.chat.completions.create(model="", messages=HI)
            raw = await served.raw(URL, {"messages": HI, "stream": True})
            events = _events(raw)
            assert _texts(events)[0] == whole.choices[0].message.content == text
            assert "\ufffd" not in raw.decode()
            assert len(raw.decode().splitlines()) == raw.count(b"\n")

    run(test())


@pytest.mark.parametrize(
    ("options", "wanted"),
    [({}, False), ({"stream_options": {}}, False), ({"stream_options": None}, False),
     ({"stream_options": {"include_usage": True, "continuous_usage_stats": True}}, True)],
)  # fmt: skip
def test_usage_comes_last_and_only_when_asked_for(options: dict[str, Any], wanted: bool) -> None:
    async def test() -> None:
        async with serve(_saying("Hello world")) as served:
            events = await _stream(served, n=2, **options)
            with_usage = [chunk for chunk in events if chunk.get("usage") is not None]
            assert with_usage == (events[-1:] if wanted else [])
            if wanted:
                assert events[-1]["choices"] == []
                assert events[-1]["object"] == "chat.completion.chunk"
                usage = events[-1]["usage"]
                assert usage["completion_tokens"] == 2 * (len(_ids("Hello world")) + 1)
                assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]

    run(test())


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("n", [1, 4, 16])
def test_every_choice_has_exactly_one_finish_reason(n: int, finish: str) -> None:
    texts = [f"The fox {index}" + "!" * index for index in range(16)]

    async def test() -> None:
        async with serve(_saying(*texts, finish=finish)) as served:
            events = await _stream(served, n=n)
            reasons = [
                (choice["index"], choice["finish_reason"])
                for chunk in events
                for choice in chunk["choices"]
                if choice["finish_reason"] is not None
            ]
            assert sorted(reasons) == [(index, finish) for index in range(n)]
            assert _texts(events) == dict(enumerate(texts[:n]))
            whole = await served.client.chat.completions.create(model="", messages=HI, n=n)
            assert [choice.message.content for choice in whole.choices] == texts[:n]
            assert [choice.index for choice in whole.choices] == list(range(n))
            assert {choice.finish_reason for choice in whole.choices} == {finish}

    run(test())


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_string_across_tokens_cuts_the_text_and_aborts(stream: bool) -> None:
    async def test() -> None:
        async with serve(_saying("ABC DEFGHIJ and more " * 20)) as served:
            if stream:
                events = await _stream(served, stop="DEFGHIJ")
                text: str | None = _texts(events)[0]
                reason = events[-1]["choices"][0]["finish_reason"]
            else:
                whole = await served.client.chat.completions.create(
                    model="", messages=HI, stop=["never", "DEFGHIJ"]
                )
                text, reason = whole.choices[0].message.content, whole.choices[0].finish_reason
            assert (text, reason) == ("ABC ", "stop")
            await until(lambda: not served.executor.running)
            assert served.executor.aborts == [served.executor.submits[0].id]

    run(test())


def test_text_that_only_begins_like_a_stop_string_is_not_lost() -> None:
    async def test() -> None:
        async with serve(_saying("ABC DEFGHI", finish="length")) as served:
            assert _texts(await _stream(served, stop="DEFGHIJ")) == {0: "ABC DEFGHI"}
            assert served.executor.aborts == []

    run(test())


def test_a_stop_string_in_one_choice_leaves_the_others_running() -> None:
    async def test() -> None:
        async with serve(_saying("one END two", "no stop here at all, none")) as served:
            events = await _stream(served, n=2, stop="END")
            assert _texts(events) == {0: "one ", 1: "no stop here at all, none"}
            assert served.executor.aborts == []

    run(test())


def test_logprobs_name_each_token_with_its_bytes_and_rivals() -> None:
    async def test() -> None:
        async with serve(_saying("the 🙂", finish="length")) as served:
            body = {"logprobs": True, "top_logprobs": 2}
            whole = await served.client.chat.completions.create(
                model="", messages=HI, logprobs=True, top_logprobs=2
            )
            assert served.executor.submits[0].sampling.logprobs == 2
            logprobs = whole.choices[0].logprobs
            assert logprobs is not None
            assert logprobs.content is not None
            ids = _ids("the 🙂")
            assert [token.logprob for token in logprobs.content] == [-id / 1000 for id in ids]
            data = b"".join(bytes(token.bytes or []) for token in logprobs.content)
            assert data.decode() == "the 🙂"
            assert [len(token.top_logprobs) for token in logprobs.content] == [2] * len(ids)
            assert logprobs.content[0].top_logprobs[0].token == logprobs.content[0].token
            streamed = [
                entry
                for chunk in await _stream(served, **body)
                for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
            ]
            assert streamed == [token.model_dump() for token in logprobs.content]

    run(test())


def test_content_may_be_text_parts() -> None:
    async def test() -> None:
        async with serve() as served:
            parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
            await served.post(URL, {"messages": [{"role": "user", "content": parts}]})
            await served.post(URL, {"messages": [{"role": "user", "content": "Hel\nlo"}]})
            first, second = served.executor.submits
            assert first.tokens == second.tokens

    run(test())


def test_every_parameter_reaches_the_executor() -> None:
    async def test() -> None:
        async with serve() as served:
            status, _ = await served.post(
                URL,
                {
                    "messages": HI, "n": 3, "max_tokens": 5, "max_completion_tokens": 9,
                    "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1,
                    "repetition_penalty": 1.2, "presence_penalty": -1, "frequency_penalty": 2,
                    "seed": -1, "stop_token_ids": [5, 6], "ignore_eos": True, "priority": -7,
                    "logit_bias": {"17": -100, "3": 2.5}, "user": "someone", "unknown": {"a": 1},
                    "logprobs": None, "stop": None, "tools": None, "response_format": None,
                },
            )  # fmt: skip
            assert status == 200
            submit = served.executor.submits[0]
            assert (submit.n, submit.priority) == (3, -7)
            sampling = submit.sampling
            assert sampling.seed == 2**63 - 1
            assert (sampling.max_tokens, sampling.min_tokens) == (9, 2)
            assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 40)
            assert (sampling.min_p, sampling.repetition_penalty) == (0.1, 1.2)
            assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1, 2)
            assert (sampling.stop_ids, sampling.ignore_eos) == ((5, 6), True)
            assert [(bias.token, bias.value) for bias in sampling.logit_bias] == [
                (17, -100.0), (3, 2.5),
            ]  # fmt: skip

    run(test())


def test_without_a_seed_each_request_draws_its_own() -> None:
    async def test() -> None:
        async with serve() as served:
            for _ in range(3):
                await served.post(URL, {"messages": HI})
            assert len({submit.sampling.seed for submit in served.executor.submits}) == 3
            assert {submit.sampling.temperature for submit in served.executor.submits} == {1.0}

    run(test())


def test_without_max_tokens_the_rest_of_the_context_is_allowed() -> None:
    async def test() -> None:
        async with serve() as served:
            await served.post(URL, {"messages": HI})
            submit = served.executor.submits[0]
            assert submit.sampling.max_tokens == 2048 - len(submit.tokens) // 4

    run(test())


@pytest.mark.parametrize("n", [1, 2, 3, 16])
@pytest.mark.parametrize("blocks", [8, 20, 31])
def test_without_max_tokens_a_pool_smaller_than_the_context_gives_what_it_holds(
    n: int, blocks: int
) -> None:
    """As much as the executor admits, and not one token more; it refuses a prompt that leaves nothing."""
    bounds = Bounds(block_size=16, blocks=blocks, context=2048, vocab=2**31)

    def admitted(submit: Submit, limit: int) -> bool:
        sampling = msgspec.structs.replace(submit.sampling, max_tokens=limit)
        changed = msgspec.structs.replace(submit, sampling=sampling)
        try:
            accept(bounds, changed, peer=b"", order=(0, 0), deadline=None)
        except Refused as refused:
            return refused.code is not Code.NEVER_FITS
        return True

    async def test() -> None:
        async with serve(card=make_card(pool_tokens=blocks * 16)) as served:
            for words in range(0, 60, 7):
                messages = [{"role": "user", "content": "Hi " * words}]
                status, _ = await served.post(URL, {"messages": messages, "n": n})
                assert status == 200
                submit = served.executor.submits[-1]
                most = submit.sampling.max_tokens
                assert not admitted(submit, most + 1)
                assert admitted(submit, most) or most == 1

    run(test())


def test_a_limit_beyond_the_pool_goes_to_the_executor_as_asked_for() -> None:
    async def test() -> None:
        async with serve(card=make_card(pool_tokens=160)) as served:
            await served.post(URL, {"messages": HI, "max_tokens": 900})
            assert served.executor.submits[0].sampling.max_tokens == 900
            _, answer = await served.post(URL, {"messages": HI, "max_tokens": 9000})
            prompt = len(served.executor.submits[0].tokens) // 4
            assert (
                f"at most {160 - prompt}." in answer["error"]["message"]
            )  # not the context's rest
            longer = [{"role": "user", "content": "Hi " * 200}]
            _, answer = await served.post(URL, {"messages": longer, "max_tokens": 9000})
            assert answer["error"]["message"].endswith("shorten the prompt.")  # no limit would help

    run(test())


def test_two_requests_with_the_same_id_of_the_clients_get_their_own_text() -> None:
    texts = {1: "the first of two", 2: "another text"}

    def respond(submit: Submit) -> Script:
        return Script([_ids(texts[submit.sampling.seed])], "stop", delay=0.002)

    async def test() -> None:
        async with serve(respond) as served:
            answers = await asyncio.gather(
                *(
                    served.client.chat.completions.create(
                        model="",
                        messages=HI,
                        seed=seed,
                        extra_headers={"X-Request-Id": "same"},
                        extra_body={"request_id": "same", "id": "same"},
                    )
                    for seed in texts
                )
            )
            assert [answer.choices[0].message.content for answer in answers] == [*texts.values()]
            assert len({answer.id for answer in answers}) == 2
            assert len({submit.id for submit in served.executor.submits}) == 2

    run(test())


def test_a_refusal_before_the_first_token_has_an_http_status() -> None:
    def respond(submit: Submit) -> Script:
        raise Refused(Code.NEVER_FITS, "It needs 99 blocks, the pool has 10.")

    async def test() -> None:
        async with serve(respond) as served:
            for stream in (True, False):
                status, answer = await served.post(URL, {"messages": HI, "stream": stream})
                assert status == 400
                assert answer["error"]["code"] == "kv_pool_too_small"
                assert "99 blocks" in answer["error"]["message"]

    run(test())


def test_a_failure_after_the_first_token_is_an_error_event_and_the_end() -> None:
    failure = Failed(1, Code.NOT_NUMBERS, "The model produced NaN.")

    async def test() -> None:
        respond = _saying("Hello world, again and again", fail_after=3, failure=failure)
        async with serve(respond) as served:
            raw = await served.raw(URL, {"messages": HI, "stream": True})
            *_, last, end = raw.split(b"\n\n")
            assert end == b""
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "non_finite_logits"
            assert b"[DONE]" not in raw
            stream = await served.client.chat.completions.create(model="", messages=HI, stream=True)
            with pytest.raises(openai.APIError, match="produced NaN"):
                async for _ in stream:
                    pass
            status, answer = await served.post(URL, {"messages": HI})
            assert (status, answer["error"]["code"]) == (500, "non_finite_logits")

    run(test())


def test_a_bug_after_the_first_token_is_an_error_event_too(monkeypatch: pytest.MonkeyPatch) -> None:
    render = ChatChunks.render

    def broken(self: ChatChunks, piece: Piece) -> bytes:
        if piece.finish:
            raise KeyError("a bug")
        return render(self, piece)

    monkeypatch.setattr(ChatChunks, "render", broken)

    async def test() -> None:
        async with serve(_saying("Hello world")) as served:
            raw = await served.raw(URL, {"messages": HI, "stream": True})
            *_, last, _end = raw.split(b"\n\n")
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "internal_error"
            assert b"a bug" not in raw

    run(test())


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0]",
    ),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 2048}, "max_tokens"),
    ({"max_completion_tokens": 2048, "max_tokens": 1}, "max_completion_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 1025}, "stop"),
    ({"stop_token_ids": [400]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"400": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"99999999999999999999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    ({"priority": 101}, "priority"),
    ({"stream": "yes"}, "stream"),
]


def test_a_request_at_fault_is_refused_with_the_field_at_fault() -> None:
    async def test() -> None:
        async with serve() as served:
            for body, param in FAULTS:
                for stream in (True, False):
                    whole = {"messages": HI, "stream": stream, **body}
                    status, answer = await served.post(URL, whole)
                    assert (status, answer["error"]["param"]) == (400, param), (body, answer)
                    assert answer["error"]["type"] == "invalid_request_error"
                    assert answer["error"]["code"], (body, answer)
            status, _ = await served.post(URL, {})
            assert status == 400
            assert served.executor.submits == []
            status, _ = await served.post(URL, {"messages": HI})
            assert status == 200

    run(test())


ACCEPTED: list[dict[str, Any]] = [
    {"tools": [{"type": "function"}], "tool_choice": "none"},
    {"tools": []},
    {"response_format": {"type": "text"}},
    {"top_p": 0},
    {"top_k": -1},
    {"stream_options": {"include_usage": True}},
    {"stop": []},
    {"stop": ["a"] * 16},
    {"modalities": ["text"], "store": False, "metadata": {"a": "b"}},
]


def test_a_request_that_asks_for_nothing_unsupported_is_answered() -> None:
    async def test() -> None:
        async with serve() as served:
            for body in ACCEPTED:
                status, answer = await served.post(URL, {"messages": HI, **body})
                assert status == 200, (body, answer)

    run(test())


def test_the_clients_own_retries_outlast_a_short_outage() -> None:
    async def test() -> None:
        async with serve() as served:
            served.executor.ready = False
            await until(lambda: served.app[ENGINE].not_ready())
            asyncio.get_running_loop().call_later(0.5, setattr, served.executor, "ready", True)

            def ask() -> str | None:
                with openai.OpenAI(base_url=f"{served.url}/v1", api_key="-") as client:
                    answer = client.chat.completions.create(model="", messages=HI)
                    return answer.choices[0].message.content

            assert await asyncio.to_thread(ask) == "Hello world"

    run(test())


def test_another_models_name_is_not_found() -> None:
    async def test() -> None:
        async with serve() as served:
            with pytest.raises(openai.NotFoundError) as refused:
                await served.client.chat.completions.create(model="gpt-4", messages=HI)
            assert refused.value.code == "model_not_found"
            assert refused.value.param == "model"

    run(test())


@pytest.mark.parametrize(
    ("words", "asked", "numbers"),
    [(3000, None, ("3", "2048")), (100, 2048, ("2048",)), (100000, None, ("2048",))],
)
def test_what_exceeds_the_context_is_refused_at_once_with_both_numbers(
    words: int, asked: int | None, numbers: tuple[str, ...]
) -> None:
    async def test() -> None:
        async with serve() as served:
            messages = [{"role": "user", "content": "the " * words}]
            body: dict[str, Any] = {"messages": messages, "max_tokens": asked, "stream": True}
            status, answer = await served.post(URL, body)
            assert status == 400
            assert answer["error"]["code"] == "context_length_exceeded"
            assert all(number in answer["error"]["message"] for number in numbers)
            assert served.executor.submits == []

    run(test())


def test_a_model_without_a_template_says_so() -> None:
    async def test() -> None:
        async with serve(card=make_card(chat_template="")) as served:
            status, answer = await served.post(URL, {"messages": HI})
            assert (status, answer["error"]["code"]) == (400, "no_chat_template")

    run(test())
