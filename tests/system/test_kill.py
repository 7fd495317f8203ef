"""Processes that die or stop: nothing leaks, nobody hangs, service returns."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.system.machine import Text, differences
from tests.system.stack import Stack, eventually, get_json, http_status

pytestmark = pytest.mark.system

LEASE = 3.0


@pytest.fixture
def mortal(tiny_model: Path) -> Iterator[Stack]:
    """A stack of its own for each test: something in it will die."""
    running = Stack(tiny_model, executor={"dtype": "float32", "num-blocks": "1025"})
    try:
        yield running.up()
    finally:
        running.down()


async def stream(
    stack: Stack, prompt: list[int], tokens: int
) -> tuple[str, float, BaseException | None]:
    """The text that came, when it ended, and the error that ended it."""
    text, failure = "", None
    async with openai.AsyncOpenAI(
        base_url=stack.url + "/v1", api_key="-", max_retries=0, timeout=60
    ) as client:
        try:
            pieces = await client.completions.create(
                model="tiny",
                prompt=prompt,
                max_tokens=tokens,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for piece in pieces:
                text += piece.choices[0].text if piece.choices else ""
        except openai.OpenAIError as error:
            failure = error
    return text, time.monotonic(), failure


def prompts(count: int) -> list[list[int]]:
    return [
        [40 + (7 * who + 3 * place) % 200 for place in range(30 + 5 * who)] for who in range(count)
    ]


def test_killed_executor_ends_streams_with_an_error_and_comes_back(mortal: Stack) -> None:
    """CASES 20."""

    async def run() -> tuple[float, list[tuple[str, float, BaseException | None]]]:
        running = [asyncio.create_task(stream(mortal, prompt, 3500)) for prompt in prompts(8)]
        await asyncio.to_thread(eventually, lambda: mortal.used() > 20, 20, "streams hold blocks")
        assert mortal.kill("executor") != 0
        died = time.monotonic()
        return died, await asyncio.wait_for(asyncio.gather(*running), 10)

    died, ended = asyncio.run(run())
    for _, when, failure in ended:
        assert isinstance(failure, openai.APIError)
        assert when - died < 5

    def reclaimed() -> bool:
        return all(pool["used"] == 0 for pool in get_json(mortal.admin + "/v1/state")["pools"])

    eventually(reclaimed, LEASE + 1, "the dead lease's blocks are free")
    assert http_status(mortal.url + "/ready") == 503
    begin = time.monotonic()
    _, _, failure = asyncio.run(stream(mortal, [50, 51], 4))
    assert isinstance(failure, openai.InternalServerError)
    assert failure.status_code == 503
    assert time.monotonic() - begin < 2

    mortal.start("executor")
    mortal.wait_ready(30)
    text, _, failure = asyncio.run(stream(mortal, [50, 51], 4))
    assert failure is None
    assert text


async def greedy(stack: Stack, prompt: list[int], tokens: int) -> Text:
    """Tokens as their ids, with the gap between the two likeliest at each."""
    text = Text()
    async with openai.AsyncOpenAI(
        base_url=stack.url + "/v1", api_key="-", max_retries=0, timeout=60
    ) as client:
        pieces = await client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            stream=True,
            logprobs=2,
            extra_body={"ignore_eos": True},
        )
        async for piece in pieces:
            logprobs = piece.choices[0].logprobs if piece.choices else None
            if logprobs is not None and logprobs.token_logprobs and logprobs.top_logprobs:
                # A byte alone is no text, so its likelihood tells tokens apart.
                text.tokens += [round(value * 1e3) for value in logprobs.token_logprobs]
                for top in logprobs.top_logprobs:
                    text.gaps.append(max(top.values()) - min(top.values()))
    return text


def test_killed_memd_loses_no_request_and_no_token(mortal: Stack) -> None:
    """CASES 21: executors register again, running requests are recomputed and finish right."""

    async def together() -> list[Text]:
        return await asyncio.gather(*(greedy(mortal, prompt, 300) for prompt in prompts(4)))

    expected = asyncio.run(together())
    epoch = get_json(mortal.admin + "/v1/state")["epoch"]

    async def run() -> list[Text]:
        running = asyncio.create_task(together())
        await asyncio.to_thread(eventually, lambda: mortal.used() > 15, 20, "streams hold blocks")
        mortal.kill("memd")
        await asyncio.sleep(0.3)
        mortal.start("memd")
        return await asyncio.wait_for(running, 90)

    got = asyncio.run(run())
    assert [len(text.tokens) for text in got] == [300] * 4
    _, wrong = differences(expected, got, slack=1)
    assert not wrong
    assert get_json(mortal.admin + "/v1/state")["epoch"] > epoch
    eventually(lambda: mortal.used() == 0, 2, "no block is used")
    mortal.audit()


def test_killed_gateway_takes_its_requests_along(mortal: Stack) -> None:
    async def run() -> None:
        running = [asyncio.create_task(stream(mortal, prompt, 3500)) for prompt in prompts(4)]
        await asyncio.to_thread(eventually, lambda: mortal.used() > 10, 20, "streams hold blocks")
        mortal.kill("gateway")
        await asyncio.gather(*running, return_exceptions=True)

    asyncio.run(run())
    eventually(lambda: mortal.used() == 0, 4, "blocks of the dead gateway's requests are free")
    mortal.start("gateway")
    mortal.wait_ready()


def test_paused_executor_is_fenced_and_starts_over(mortal: Stack) -> None:
    """A pause longer than the lease: nothing computed before it is published."""

    async def run() -> list[Any]:
        running = [asyncio.create_task(stream(mortal, prompt, 3500)) for prompt in prompts(3)]
        await asyncio.to_thread(eventually, lambda: mortal.used() > 10, 20, "streams hold blocks")
        mortal.children["executor"].send_signal(signal.SIGSTOP)
        ended = await asyncio.wait_for(asyncio.gather(*running), 10)
        await asyncio.to_thread(
            eventually,
            lambda: all(p["used"] == 0 for p in get_json(mortal.admin + "/v1/state")["pools"]),
            LEASE + 2,
            "the paused executor's lease ends",
        )
        mortal.children["executor"].send_signal(signal.SIGCONT)
        return ended

    for _, _, failure in asyncio.run(run()):
        assert isinstance(failure, openai.APIError)
    mortal.wait_ready(20)
    text, _, failure = asyncio.run(stream(mortal, [50, 51], 4))
    assert failure is None
    assert text
    mortal.audit()


def test_a_pause_of_the_whole_machine_costs_no_stream(mortal: Stack) -> None:
    """As when a laptop sleeps: everyone was silent, and nobody is to blame."""

    async def run() -> list[Any]:
        running = [asyncio.create_task(stream(mortal, prompt, 3500)) for prompt in prompts(3)]
        await asyncio.to_thread(eventually, lambda: mortal.used() > 10, 20, "streams hold blocks")
        for sign in (signal.SIGSTOP, signal.SIGCONT):
            for child in mortal.children.values():
                child.send_signal(sign)
            if sign == signal.SIGSTOP:
                await asyncio.sleep(2 * LEASE)
        return await asyncio.wait_for(asyncio.gather(*running), 60)

    assert [failure for _, _, failure in asyncio.run(run())] == [None] * 3
    eventually(lambda: mortal.used() == 0, 2, "no block is used")
    mortal.audit()


def test_sigterm_finishes_the_running_stream_and_refuses_new_ones(mortal: Stack) -> None:
    """CASES 24."""

    async def run() -> tuple[str, float, BaseException | None]:
        running = asyncio.create_task(stream(mortal, [60, 61, 62], 1500))
        await asyncio.to_thread(eventually, lambda: mortal.used() > 1, 20, "the stream runs")
        mortal.children["gateway"].terminate()
        await asyncio.to_thread(
            eventually,
            lambda: http_status(mortal.url + "/ready") in (0, 503),
            5,
            "the gateway is not ready",
        )
        if mortal.children["gateway"].poll() is None:
            _, _, refused = await stream(mortal, [60], 2)
            assert refused is not None
        return await asyncio.wait_for(running, 60)

    _, _, failure = asyncio.run(run())
    assert failure is None
    assert mortal.children["gateway"].wait(35) == 0
    mortal.children["executor"].terminate()
    assert mortal.children["executor"].wait(35) == 0
    mortal.children["memd"].terminate()
    assert mortal.children["memd"].wait(10) == 0
