"""A prompt through gateway, executor and memd, seen from outside."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
import torch
import transformers

from tests.system.stack import Stack, eventually, get_json

pytestmark = pytest.mark.system

PROMPT = list(range(40, 96))  # 56 tokens: 3.5 blocks


def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.url + "/v1", api_key="-", max_retries=0, timeout=60)


def greedy(stack: Stack, prompt: list[int], tokens: int, **more: Any) -> Any:
    return client(stack).completions.create(
        model="tiny",
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        extra_body={"ignore_eos": True, **more},
    )


def oracle(model: Path, prompt: list[int], tokens: int) -> list[int]:
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        out = reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(prompt) :]]


def test_greedy_text_is_what_transformers_generates(stack: Stack, tiny_model: Path) -> None:
    expected = oracle(tiny_model, PROMPT, 40)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_model)
    answer = greedy(stack, PROMPT, 40)
    text = str(tokenizer.decode(PROMPT + expected, skip_special_tokens=True))
    assert answer.choices[0].text
    assert text.endswith(answer.choices[0].text)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 40
    assert answer.usage.prompt_tokens == len(PROMPT)


def test_streamed_text_equals_the_text_in_one_piece(stack: Stack) -> None:
    whole = greedy(stack, PROMPT, 60).choices[0].text
    pieces = client(stack).completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=60,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    assert "".join(piece.choices[0].text for piece in pieces if piece.choices) == whole


def test_second_time_the_prompt_comes_from_the_cache(stack: Stack) -> None:
    prompt = [random.Random(7).randrange(40, 200) for _ in range(64)]
    first = greedy(stack, prompt, 8)
    again = greedy(stack, prompt, 8)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert again.usage.prompt_tokens_details.cached_tokens == 63  # all but the last token
    assert again.choices[0].text == first.choices[0].text


def test_idle_server_uses_no_block_and_audits_clean(stack: Stack) -> None:
    greedy(stack, PROMPT, 8)
    eventually(lambda: stack.used() == 0, 2, "no block is used when nothing runs")
    stack.audit()
    pool = stack.pool()
    assert pool["free"] + pool["cached"] + pool["used"] + pool["quarantined"] == pool["total"]


def test_four_choices_share_the_prompts_blocks(stack: Stack) -> None:
    """CASES 5: 3 full blocks at refcount 4, the half block copied at most three times."""

    async def run() -> list[int]:
        before = stack.pool()["counters"]["copies"]
        request = asyncio.create_task(
            asyncio.to_thread(
                lambda: client(stack).completions.create(
                    model="tiny",
                    prompt=list(range(100, 156)),
                    n=4,
                    max_tokens=1500,
                    temperature=1.0,
                    seed=5,
                    extra_body={"ignore_eos": True},
                )
            )
        )
        most_shared = 0
        while not request.done():
            blocks = (
                await asyncio.to_thread(get_json, stack.admin + "/v1/blocks?state=used&limit=500")
            )["blocks"]
            shared = sum(block["refcount"] == 4 for block in blocks)
            assert all(block["refcount"] <= 4 for block in blocks)
            most_shared = max(most_shared, shared)
            await asyncio.sleep(0.01)
        answer = await request
        assert sorted(choice.index for choice in answer.choices) == [0, 1, 2, 3]
        assert all(choice.finish_reason == "length" for choice in answer.choices)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 56
        return [most_shared, stack.pool()["counters"]["copies"] - before]

    most_shared, copies = asyncio.run(run())
    assert most_shared == 3
    assert 1 <= copies <= 3
    eventually(lambda: stack.used() == 0, 2, "all blocks are back")


def test_rejected_overlong_requests_leave_the_pool_as_it_was(stack: Stack) -> None:
    """CASES 9 and 12."""
    for _ in range(50):
        with pytest.raises(openai.BadRequestError, match="4096") as caught:
            greedy(stack, [50] * 4000, 200)
        assert "4200" in str(caught.value) or "200" in str(caught.value)
    assert stack.used() == 0


def test_clients_that_leave_at_any_moment_leave_no_block_behind(stack: Stack) -> None:
    """CASES 11: queued, in prefill, in decode; streamed and not."""
    chance = random.Random(11)

    left = 0

    async def leave(session: aiohttp.ClientSession, stay: float, stream: bool) -> None:
        nonlocal left
        body = {
            "model": "tiny",
            "prompt": [chance.randrange(40, 250) for _ in range(chance.randrange(1, 900))],
            "max_tokens": 3000,
            "stream": stream,
            "ignore_eos": True,
            "n": chance.choice((1, 1, 3)),
        }

        async def request() -> None:
            async with session.post(stack.url + "/v1/completions", json=body) as answer:
                async for _ in answer.content:
                    pass

        try:
            await asyncio.wait_for(request(), stay)  # on a fast machine some are done by then
        except TimeoutError:
            left += 1

    async def run() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            for _ in range(40):
                await asyncio.gather(
                    *(
                        leave(
                            session, chance.choice((0.002, 0.02, 0.1, 0.3)), chance.random() < 0.5
                        )
                        for _ in range(5)
                    )
                )
                await asyncio.to_thread(
                    eventually, lambda: stack.used() == 0, 1.0, "blocks are back after clients left"
                )

    asyncio.run(run())
    assert left > 150
    stack.audit()


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The data of each server-sent event."""
    async for line in answer.content:
        if line.startswith(b"data: "):
            yield line[6:].decode().rstrip("\n")


def test_each_choice_of_a_stream_finishes_once_then_done(stack: Stack) -> None:
    """CASES 4, on the wire."""

    async def run() -> list[str]:
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "hi"}],
            "n": 3,
            "max_tokens": 9,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with (
            aiohttp.ClientSession() as session,
            session.post(stack.url + "/v1/chat/completions", json=body) as answer,
        ):
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            return [event async for event in events(answer)]

    seen = asyncio.run(run())
    assert seen[-1] == "[DONE]"
    chunks = [json.loads(event) for event in seen[:-1]]
    finishes = [
        choice["index"]
        for chunk in chunks
        for choice in chunk["choices"]
        if choice.get("finish_reason")
    ]
    assert sorted(finishes) == [0, 1, 2]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] <= 27


def test_a_request_larger_than_the_pool_is_refused_and_others_go_on(tiny_model: Path) -> None:
    """CASES 10."""
    small = Stack(tiny_model, executor={"dtype": "float32", "num-blocks": "33"})
    try:
        small.up()
        with pytest.raises(openai.BadRequestError, match="KV"):
            greedy(small, [50] * 300, 300)
        assert greedy(small, [50] * 300, 20).usage.completion_tokens == 20
        eventually(lambda: small.used() == 0, 2, "no block is used")
    finally:
        small.down()


def test_sixty_four_streams_in_a_third_of_the_memory_they_need_all_finish(tiny_model: Path) -> None:
    """Each needs 19 blocks at its end; there are 405 for all of them."""
    small = Stack(tiny_model, executor={"dtype": "float32", "num-blocks": "405"})

    async def one(session: aiohttp.ClientSession, which: int) -> int:
        body = {
            "model": "tiny",
            "prompt": [40 + (which * 31 + i * 7) % 200 for i in range(100)],
            "max_tokens": 200,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "ignore_eos": True,
        }
        async with session.post(small.url + "/v1/completions", json=body) as answer:
            chunks = [json.loads(event) async for event in events(answer) if event != "[DONE]"]
        return int(chunks[-1]["usage"]["completion_tokens"])

    async def run() -> list[int]:
        """All arrive while the executor stands still, lest the first have ended before the last come."""
        executor = small.children["executor"]
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            executor.send_signal(signal.SIGSTOP)
            streams = [asyncio.create_task(one(session, which)) for which in range(64)]
            await asyncio.sleep(1)
            executor.send_signal(signal.SIGCONT)
            return await asyncio.gather(*streams)

    def preemptions() -> float:
        metrics = urllib.request.urlopen(small.url + "/metrics", timeout=5).read().decode()
        found = re.search(r"^vllm:num_preemptions_total\{.*\} (.+)$", metrics, re.MULTILINE)
        return float(found[1]) if found else 0.0

    try:
        small.up()
        assert asyncio.run(run()) == [200] * 64
        eventually(lambda: preemptions() > 0, 2, "the gateway has heard of preemptions")
        eventually(lambda: small.used() == 0, 2, "all blocks are back")
        small.audit()
    finally:
        small.down()
