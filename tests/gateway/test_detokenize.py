"""Pieces of text joined are the whole text, whatever the tokens."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from gateway.detokenize import LONGEST_WAIT, Detokenizer
from tests.fake_executor import byte_level_tokenizer

BROKEN = "\ufffd"


@functools.cache
def byte_level() -> Tokenizer:
    return byte_level_tokenizer()


@functools.cache
def sentencepiece() -> Tokenizer:
    """Llama's kind: "▁" for spaces, bytes as <0xNN>, the first token's leading space dropped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁Hello", "▁world", "Hello", "world", "▁a", "b", ",", "é", "你"]
    tokenizer = Tokenizer(
        models.BPE(
            {piece: index for index, piece in enumerate(pieces)},
            [],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[1:3]])
    return tokenizer


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=True)
    return text


def _stream(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [])
    return [*(detokenizer.feed_one(id) for id in ids), detokenizer.flush()]


def _id(tokenizer: Tokenizer, piece: str) -> int:
    id = tokenizer.token_to_id(piece)
    assert id is not None
    return id


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@given(st.lists(st.integers(0, 399), max_size=60))
def test_any_byte_level_tokens_join_to_their_full_decode(ids: list[int]) -> None:
    assert "".join(_stream(byte_level(), ids)) == _decode(byte_level(), ids)


@given(st.lists(st.integers(100, 270), max_size=120))  # mostly bytes that are no ASCII
@settings(max_examples=50)
def test_long_runs_of_broken_bytes_join_to_their_full_decode(ids: list[int]) -> None:
    assert "".join(_stream(byte_level(), ids)) == _decode(byte_level(), ids)


@pytest.mark.parametrize("tokenizer", [byte_level, sentencepiece])
@given(text=st.text(max_size=40))
def test_text_in_any_script_comes_through_whole(tokenizer: object, text: str) -> None:
    made: Tokenizer = tokenizer()  # type: ignore[operator]
    ids = _ids(made, text)
    pieces = _stream(made, ids)
    assert "".join(pieces) == _decode(made, ids)
    if BROKEN not in text:
        assert not any(BROKEN in piece for piece in pieces)


@pytest.mark.parametrize("tokenizer", [byte_level, sentencepiece])
@given(
    prompt=st.text(min_size=1, max_size=30),
    text=st.text(st.sampled_from("Hello world,ab é你🙂"), max_size=30),
)
def test_the_output_reads_on_from_the_prompt(tokenizer: object, prompt: str, text: str) -> None:
    made: Tokenizer = tokenizer()  # type: ignore[operator]
    before, after = _ids(made, prompt), _ids(made, text)
    whole, start = _decode(made, before + after), _decode(made, before)
    assert start + "".join(_stream(made, after, before)) == whole


def test_the_first_word_after_a_prompt_keeps_its_space() -> None:
    tokenizer = sentencepiece()
    hello, world = _id(tokenizer, "▁Hello"), _id(tokenizer, "▁world")
    assert _stream(tokenizer, [world], [hello]) == [" world", ""]
    assert _stream(tokenizer, [hello, world]) == ["Hello", " world", ""]


def test_a_character_appears_when_its_last_byte_is_there() -> None:
    tokenizer = byte_level()
    ids = _ids(tokenizer, "🙂!")
    assert _stream(tokenizer, ids) == ["", "", "", "🙂", "!", ""]


def test_a_character_cut_off_by_the_end_is_shown_as_broken() -> None:
    tokenizer = byte_level()
    ids = _ids(tokenizer, "a🙂")[:-1]
    assert _stream(tokenizer, ids) == ["a", "", "", "", BROKEN]


def test_special_tokens_have_no_text() -> None:
    tokenizer = byte_level()
    end = _id(tokenizer, "<|im_end|>")
    ids = [*_ids(tokenizer, "a"), end, *_ids(tokenizer, "b"), end]
    assert "".join(_stream(tokenizer, ids)) == "ab"


def test_a_prompt_that_ends_in_a_replacement_character_adds_none_to_the_output() -> None:
    tokenizer = byte_level()
    assert (
        "".join(_stream(tokenizer, _ids(tokenizer, "abc"), _ids(tokenizer, "x" + BROKEN))) == "abc"
    )


def test_after_a_broken_run_of_byte_tokens_decoding_goes_on() -> None:
    tokenizer = sentencepiece()
    byte = {value: _id(tokenizer, f"<0x{value:02X}>") for value in (0xE4, 0xBD, 0xA0, 0xE5)}
    ids = [byte[0xE4], byte[0xBD], byte[0xA0], byte[0xE5], _id(tokenizer, "b")]
    # Read together these bytes are all broken, but the first three were shown as a character already.
    assert "".join(_stream(tokenizer, ids)) == "你" + BROKEN + "b"


def test_endless_special_tokens_do_not_lose_the_space_that_follows() -> None:
    tokenizer = sentencepiece()
    end, world = _id(tokenizer, "</s>"), _id(tokenizer, "▁world")
    ids = [_id(tokenizer, "▁Hello"), *[end] * (3 * LONGEST_WAIT), world]
    assert "".join(_stream(tokenizer, ids)) == "Hello world"


def test_undecodable_tokens_do_not_make_later_ones_dearer() -> None:
    detokenizer = Detokenizer(byte_level())
    broken = _id(byte_level(), "Ģ")  # how byte-level vocabularies write 0x80
    for _ in range(1000):
        detokenizer.feed_one(broken)
        assert len(detokenizer._pending) < LONGEST_WAIT
