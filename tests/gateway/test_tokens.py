"""The model list, and tokenizing for clients."""

from __future__ import annotations

from tests.fake_executor import byte_level_tokenizer, make_card
from tests.gateway.serving import run, serve

TOKENIZER = byte_level_tokenizer()
MODEL = {
    "id": "org/fake-model",
    "object": "model",
    "created": 1_700_000_000,
    "owned_by": "pagekeeper",
    "root": "fake-model.gguf",
    "max_model_len": 2048,
}


def test_the_model_is_listed_and_found_by_an_id_with_a_slash() -> None:
    async def test() -> None:
        async with serve() as served:
            async with served.http.get(f"{served.url}/v1/models") as response:
                assert await response.json() == {"object": "list", "data": [MODEL]}
            async with served.http.get(f"{served.url}/v1/models/org/fake-model") as response:
                assert await response.json() == MODEL
            async with served.http.get(f"{served.url}/v1/models/org/other") as response:
                assert response.status == 404
                assert (await response.json())["error"]["code"] == "model_not_found"
            models = await served.client.models.list()
            assert [model.id for model in models.data] == ["org/fake-model"]
            assert (await served.client.models.retrieve("org/fake-model")).id == "org/fake-model"

    run(test())


def test_a_text_is_tokenized_and_back() -> None:
    text = "Hello 世界 🙂"

    async def test() -> None:
        async with serve(card=make_card(add_bos=True)) as served:
            ids = TOKENIZER.encode(text, add_special_tokens=False).ids
            bos = TOKENIZER.token_to_id("<|bos|>")
            body = {"prompt": text, "add_special_tokens": False}
            _, answer = await served.post("/tokenize", body)
            assert answer == {"count": len(ids), "max_model_len": 2048, "tokens": ids}
            _, answer = await served.post("/tokenize", {"prompt": text})
            assert answer["tokens"] == [bos, *ids]
            _, answer = await served.post("/detokenize", {"tokens": [bos, *ids]})
            assert answer == {"prompt": f"<|bos|>{text}"}

    run(test())


def test_a_text_too_long_for_the_loop_is_tokenized_all_the_same() -> None:
    text = "the quick brown fox " * 3000

    async def test() -> None:
        async with serve() as served:
            _, answer = await served.post("/tokenize", {"prompt": text})
            assert answer["tokens"] == TOKENIZER.encode(text, add_special_tokens=False).ids

    run(test())


def test_messages_are_tokenized_as_chat_sees_them() -> None:
    async def test() -> None:
        async with serve() as served:
            messages = [{"role": "user", "content": "Hi"}]
            _, answer = await served.post("/tokenize", {"messages": messages})
            await served.post("/v1/chat/completions", {"messages": messages})
            packed = b"".join(id.to_bytes(4, "little") for id in answer["tokens"])
            assert served.executor.submits[0].tokens == packed

    run(test())


def test_ids_outside_the_vocabulary_and_unclear_requests_are_refused() -> None:
    async def test() -> None:
        async with serve() as served:
            for path, body in (
                ("/detokenize", {"tokens": [400]}),
                ("/detokenize", {"tokens": [-1]}),
                ("/detokenize", {"tokens": "abc"}),
                ("/tokenize", {}),
                ("/tokenize", {"prompt": "a", "messages": []}),
                ("/tokenize", {"messages": []}),
            ):
                status, answer = await served.post(path, body)
                assert status == 400, (body, answer)
            status, answer = await served.post("/tokenize", {"prompt": ""})
            assert (status, answer["tokens"]) == (200, [])

    run(test())


def test_the_tokenizer_tells_its_special_tokens_and_template() -> None:
    async def test() -> None:
        async with serve() as served, served.http.get(f"{served.url}/tokenizer_info") as response:
            info = await response.json()
            assert (info["bos_token"], info["eos_token"]) == ("<|bos|>", "<|im_end|>")
            assert "pad_token" not in info
            assert "add_generation_prompt" in info["chat_template"]

    run(test())
