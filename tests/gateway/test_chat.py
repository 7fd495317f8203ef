"""Chat completions as clients see them, over a real socket."""

from __future__ import annotations

import json

from tests.gateway.serving import run, serve

HI = [{"role": "user", "content": "Hi"}]


def test_a_chat_is_answered_through_the_openai_client() -> None:
    async def test() -> None:
        async with serve() as served:
            answer = await served.client.chat.completions.create(
                model="org/fake-model", messages=HI, temperature=0
            )
            print(answer)
            assert answer.choices[0].message.content == "Hello world"
            raw = await served.raw("/v1/chat/completions", {"messages": HI, "stream": True})
            print(raw.decode())

    run(test())
