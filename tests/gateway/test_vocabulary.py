"""Tokens as bytes, and tokenizers as they come."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.detokenize import Detokenizer
from gateway.vocabulary import OFF_LOOP_CHARS, BadTokenizer, Vocabulary
from tests.fake_executor import byte_level_tokenizer
from tests.gateway.test_detokenize import sentencepiece

TEXT = "Hello 世界 🙂\n\x00é"


def test_bytes_of_byte_level_tokens_join_to_the_text() -> None:
    tokenizer = byte_level_tokenizer()
    vocabulary = Vocabulary(tokenizer.to_str().encode())
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert b"".join(map(vocabulary.token_bytes, ids)).decode() == TEXT


BYTE_LEVEL = byte_level_tokenizer()
BYTE_LEVEL.add_tokens(["added", "éé"])
VOCABULARY = Vocabulary(BYTE_LEVEL.to_str().encode())
BYTES = [VOCABULARY.token_bytes(id) for id in range(BYTE_LEVEL.get_vocab_size())]
ONE = {data: id for id, data in enumerate(BYTES) if len(data) == 1}


@given(
    prompt=st.lists(st.integers(0, 410), max_size=8),
    parts=st.lists(
        st.one_of(
            st.lists(st.integers(0, 410), max_size=4),
            # Characters of several tokens, whole and broken, and U+FFFD itself.
            st.text("a🙂é\ufffd", max_size=3).map(
                lambda text: [ONE[bytes([b])] for b in text.encode()]
            ),
            st.binary(max_size=3).map(lambda data: [ONE[bytes([b])] for b in data]),
        ),
        max_size=12,
    ),
)
def test_texts_looked_up_are_the_ones_the_window_decodes(
    prompt: list[int], parts: list[list[int]]
) -> None:
    plain, quick = Detokenizer(BYTE_LEVEL, prompt), VOCABULARY.detokenizer(prompt)
    for token in [token for part in parts for token in part]:
        assert quick.feed_one(token) == plain.feed_one(token)
    assert quick.flush() == plain.flush()


def test_tokens_of_a_vocabulary_whose_decoder_looks_around_are_not_looked_up() -> None:
    vocabulary = Vocabulary(sentencepiece().to_str().encode())
    hello = sentencepiece().get_vocab()["▁Hello"]
    first = vocabulary.detokenizer([])
    assert [first.feed_one(hello), first.feed_one(hello)] == ["Hello", " Hello"]


def test_every_byte_is_some_token_of_a_byte_level_vocabulary() -> None:
    vocabulary = Vocabulary(byte_level_tokenizer().to_str().encode())
    singles = {vocabulary.token_bytes(id) for id in range(400)}
    assert {bytes([byte]) for byte in range(256)} <= singles


def test_bytes_of_sentencepiece_tokens_join_to_the_text_after_its_space() -> None:
    tokenizer = sentencepiece()
    vocabulary = Vocabulary(tokenizer.to_str().encode())
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert b"".join(map(vocabulary.token_bytes, ids)).decode() == " " + TEXT


def test_special_tokens_are_their_own_text_and_unknown_ids_have_none() -> None:
    vocabulary = Vocabulary(byte_level_tokenizer().to_str().encode())
    end = vocabulary.tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    assert vocabulary.token_bytes(end) == b"<|im_end|>"
    assert vocabulary.token_bytes(10**6) == b""


def test_a_tokenizers_own_truncation_and_padding_are_switched_off() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    vocabulary = Vocabulary(tokenizer.to_str().encode())
    for text in ("the quick brown fox", "fox " * OFF_LOOP_CHARS):
        ids = asyncio.run(vocabulary.encode(text, False))
        assert vocabulary.decode(ids) == text
    vocabulary.close()


@pytest.mark.parametrize("junk", [b"", b"{}", b"\xff\xfe", b'{"version":"1.0","model":5}'])
def test_bytes_that_are_no_tokenizer_are_refused(junk: bytes) -> None:
    with pytest.raises(BadTokenizer, match="cannot be read"):
        Vocabulary(junk)
