"""Text completions as clients see them, over a real socket."""

from __future__ import annotations

import json
import struct
from typing import Any

from tests.fake_executor import Script, byte_level_tokenizer, make_card
from tests.gateway.serving import Served, run, serve
from wire.generate import Submit

TOKENIZER = byte_level_tokenizer()
URL = "/v1/completions"


def _ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False).ids)


def _prompt(submit: Submit) -> list[int]:
    return list(struct.unpack(f"<{len(submit.tokens) // 4}I", submit.tokens))


def _saying(*texts: str, finish: str = "length", **more: Any) -> Any:
    def respond(submit: Submit) -> Script:
        choices = [_ids(texts[index % len(texts)]) for index in range(submit.n)]
        return Script(choices, finish, delay=0.002, **more)

    return respond


def _echo_back(submit: Submit) -> Script:
    """Each prompt's own tokens, reversed: tells prompts apart."""
    return Script([_prompt(submit)[::-1]] * submit.n, "stop", delay=0.002)


async def _events(served: Served, body: dict[str, Any]) -> list[dict[str, Any]]:
    raw = await served.raw(URL, {**body, "stream": True})
    *parts, done, end = raw.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


def _texts(events: list[dict[str, Any]]) -> dict[int, str]:
    texts: dict[int, str] = {}
    for chunk in events:
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def test_a_prompt_is_continued_through_the_openai_client() -> None:
    async def test() -> None:
        async with serve(_saying(" world")) as served:
            whole = await served.client.completions.create(model="org/fake-model", prompt="Hello")
            assert whole.object == "text_completion"
            assert whole.choices[0].text == " world"
            assert whole.choices[0].finish_reason == "length"
            assert whole.usage is not None
            assert whole.usage.prompt_tokens == len(_ids("Hello"))
            stream = await served.client.completions.create(
                model="org/fake-model", prompt="Hello", stream=True
            )
            chunks = [chunk async for chunk in stream]
            assert "".join(chunk.choices[0].text for chunk in chunks) == " world"
            assert {chunk.object for chunk in chunks} == {"text_completion"}
            assert {submit.sampling.max_tokens for submit in served.executor.submits} == {16}

    run(test())


def test_several_prompts_are_several_submissions_with_indexes_in_order() -> None:
    prompts = ["Hello", "the quick", "brown fox"]

    async def test() -> None:
        async with serve(_echo_back) as served:
            body = {"prompt": prompts, "n": 2, "stream_options": {"include_usage": True}}
            want = {index: TOKENIZER.decode(_ids(prompts[index // 2])[::-1]) for index in range(6)}
            events = await _events(served, body)
            assert _texts(events) == want
            assert sorted(map(_prompt, served.executor.submits)) == sorted(map(_ids, prompts))
            _, whole = await served.post(URL, body)
            assert {choice["index"]: choice["text"] for choice in whole["choices"]} == want
            assert whole["usage"] == events[-1]["usage"]
            tokens = sum(len(_ids(prompt)) for prompt in prompts)
            assert whole["usage"]["prompt_tokens"] == tokens
            assert whole["usage"]["completion_tokens"] == 2 * (tokens + 3)

    run(test())


def test_prompts_may_be_token_ids() -> None:
    async def test() -> None:
        async with serve(_echo_back) as served:
            for prompt, sent in (
                ([5, 6, 7], [[5, 6, 7]]),
                ([[5, 6, 7]], [[5, 6, 7]]),
                ([[5, 6], [7]], [[5, 6], [7]]),
            ):
                served.executor.submits.clear()
                status, _ = await served.post(URL, {"prompt": prompt})
                assert status == 200
                assert [_prompt(submit) for submit in served.executor.submits] == sent

    run(test())


def test_a_model_that_wants_a_first_token_gets_it_unless_told_otherwise() -> None:
    async def test() -> None:
        async with serve(card=make_card(add_bos=True)) as served:
            await served.post(URL, {"prompt": "Hello"})
            await served.post(URL, {"prompt": "Hello", "add_special_tokens": False})
            await served.post(URL, {"prompt": _ids("Hello")})
            bos = [TOKENIZER.token_to_id("<|bos|>")]
            assert [_prompt(submit) for submit in served.executor.submits] == [
                bos + _ids("Hello"), _ids("Hello"), _ids("Hello"),
            ]  # fmt: skip

    run(test())


def test_echo_puts_the_prompt_in_front_once() -> None:
    async def test() -> None:
        async with serve(_saying(" world")) as served:
            body = {"prompt": ["Hello", "é🙂"], "n": 2, "echo": True}
            want = {0: "Hello world", 1: "Hello world", 2: "é🙂 world", 3: "é🙂 world"}
            assert _texts(await _events(served, body)) == want
            _, whole = await served.post(URL, body)
            assert {choice["index"]: choice["text"] for choice in whole["choices"]} == want
            _, whole = await served.post(URL, {"prompt": _ids("Hello"), "echo": True})
            assert whole["choices"][0]["text"] == "Hello world"

    run(test())


def test_echo_of_zero_tokens_gives_the_prompt_back_and_computes_nothing() -> None:
    async def test() -> None:
        async with serve() as served:
            body = {"prompt": ["Hello", "fox"], "echo": True, "max_tokens": 0}
            _, whole = await served.post(URL, body)
            assert [choice["text"] for choice in whole["choices"]] == ["Hello", "fox"]
            assert whole["usage"]["completion_tokens"] == 0
            events = await _events(served, {**body, "stream_options": {"include_usage": True}})
            assert _texts(events) == {0: "Hello", 1: "fox"}
            assert events[-1]["usage"] == whole["usage"]
            assert served.executor.submits == []

    run(test())


def test_logprobs_have_offsets_into_the_text_streamed_or_not() -> None:
    text = "the 🙂 fox"

    async def test() -> None:
        async with serve(_saying(text)) as served:
            _, whole = await served.post(URL, {"prompt": "Hello", "logprobs": 2})
            logprobs = whole["choices"][0]["logprobs"]
            ids = _ids(text)
            assert logprobs["token_logprobs"] == [-id / 1000 for id in ids]
            lengths = [len(TOKENIZER.decode(ids[:k]).rstrip("\ufffd")) for k in range(len(ids))]
            assert logprobs["text_offset"] == lengths
            for token, top, own in zip(
                logprobs["tokens"],
                logprobs["top_logprobs"],
                logprobs["token_logprobs"],
                strict=True,
            ):
                assert top[token] == own
                assert len(top) == 2
            assert logprobs["tokens"][0] == TOKENIZER.decode(ids[:1])
            assert "bytes:\\xf0" in "".join(logprobs["tokens"])
            streamed: dict[str, list[Any]] = {key: [] for key in logprobs}
            for chunk in await _events(served, {"prompt": "Hello", "logprobs": 2}):
                for key, values in (chunk["choices"][0]["logprobs"] or {}).items():
                    streamed[key] += values
            assert streamed == logprobs

    run(test())


def test_logprobs_0_gives_the_chosen_token_alone() -> None:
    async def test() -> None:
        async with serve(_saying("fox")) as served:
            _, whole = await served.post(URL, {"prompt": "Hello", "logprobs": 0})
            logprobs = whole["choices"][0]["logprobs"]
            assert [len(top) for top in logprobs["top_logprobs"]] == [1] * len(_ids("fox"))
            assert served.executor.submits[0].sampling.logprobs == 0

    run(test())


def test_one_prompt_stopped_by_a_string_leaves_the_others_running() -> None:
    def respond(submit: Submit) -> Script:
        text = "yes END no" if _prompt(submit) == _ids("a") else "long text without it"
        return Script([_ids(text)], "stop", delay=0.002)

    async def test() -> None:
        async with serve(respond) as served:
            events = await _events(served, {"prompt": ["a", "b"], "stop": ["END"]})
            assert _texts(events) == {0: "yes ", 1: "long text without it"}
            assert served.executor.aborts == [served.executor.submits[0].id]

    run(test())


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [[5], []]}, "prompt"),
    ({"prompt": [999999]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [5, 10**30]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": ["a", [5]]}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 128, "n": 16}, "n"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
    ({"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0}, "echo"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
    ({"prompt": "the " * 4000}, "prompt"),
    ({"prompt": [5] * 2048}, "prompt"),
    ({"prompt": [5] * 2040, "max_tokens": 9}, "max_tokens"),
]


def test_without_max_tokens_the_prompt_with_the_least_room_says_how_much_fits() -> None:
    async def test() -> None:
        # Of 6 blocks, 2 choices of 16 tokens share 1 and get 2 more each; of 15 tokens they get 3 each.
        async with serve(card=make_card(pool_tokens=6 * 16)) as served:
            for lengths, most in [([80], 16), ([90], 6), ([88, 20], 8), ([20], 16)]:
                prompts = [[5] * length for length in lengths]
                status, _ = await served.post(URL, {"prompt": prompts})
                assert status == 200
                assert served.executor.submits[-1].sampling.max_tokens == most

    run(test())


def test_a_request_at_fault_is_refused_and_the_next_one_works() -> None:
    async def test() -> None:
        async with serve() as served:
            for body, param in FAULTS:
                for stream in (True, False):
                    status, answer = await served.post(URL, {**body, "stream": stream})
                    assert status == 400, (body, answer)
                    assert str(answer["error"]["param"]).startswith(param), (body, answer)
            assert served.executor.submits == []
            status, _ = await served.post(URL, {"prompt": [5] * 2040, "max_tokens": 8})
            assert status == 200
            status, _ = await served.post(URL, {"prompt": [5] * 2040})
            assert status == 200
            assert served.executor.submits[-1].sampling.max_tokens == 8

    run(test())
