"""One choice: text, finish reason, counts and logprobs that belong together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.choice import Choice, Piece
from gateway.detokenize import Detokenizer
from tests.fake_executor import byte_level_tokenizer
from wire.generate import Delta, TokenLogprobs

TOKENIZER = byte_level_tokenizer()
END = TOKENIZER.token_to_id("<|im_end|>") or 0


def _ids(text: str) -> list[int]:
    """One token per byte, so that every position of a text is a token boundary."""
    alphabet = {char: TOKENIZER.encode(char, add_special_tokens=False).ids for char in set(text)}
    return [id for char in text for id in alphabet[char]]


def _choice(stops: tuple[str, ...] = (), min_tokens: int = 0, offset: int = 0) -> Choice:
    return Choice(0, Detokenizer(TOKENIZER), stops, False, min_tokens, offset)


def _feed(
    choice: Choice, tokens: list[int], finish: str = "", logprobs: bool = False
) -> list[Piece]:
    """One delta per token; the last one carries `finish`."""
    pieces = []
    for at, token in enumerate(tokens):
        last = at == len(tokens) - 1
        own = [TokenLogprobs(-float(at))] if logprobs else []
        pieces.append(choice.feed(Delta(1, 0, [token], finish if last else "", 0, own)))
        if choice.finished:
            break
    return pieces


def _text(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_the_end_token_ends_the_text_and_counts_but_is_not_shown() -> None:
    choice = _choice()
    pieces = _feed(choice, [*_ids("abc"), END], "stop")
    assert (_text(pieces), pieces[-1].finish, choice.generated) == ("abc", "stop", 4)


def test_a_stop_token_that_is_a_plain_word_is_not_shown_either() -> None:
    pieces = _feed(_choice(), _ids("abc"), "stop")
    assert (_text(pieces), pieces[-1].finish) == ("ab", "stop")


def test_at_length_the_last_token_is_shown() -> None:
    choice = _choice()
    pieces = _feed(choice, _ids("abc"), "length")
    assert (_text(pieces), pieces[-1].finish, choice.generated) == ("abc", "length", 3)


def test_a_stop_string_ends_the_choice_before_the_executor_does() -> None:
    choice = _choice(("cde",))
    pieces = _feed(choice, _ids("abcdefgh"))
    assert (_text(pieces), pieces[-1].finish, choice.generated) == ("ab", "stop", 5)
    assert [piece.finish for piece in pieces[:-1]] == [None] * 4


def test_text_held_for_a_stop_string_is_released_at_length() -> None:
    pieces = _feed(_choice(("cdX",)), _ids("abcd"), "length")
    assert [piece.text for piece in pieces] == ["a", "b", "", "cd"]


def test_a_stop_string_completed_by_the_last_token_counts_as_stop() -> None:
    pieces = _feed(_choice(("cd",)), _ids("abcd"), "length")
    assert (_text(pieces), pieces[-1].finish) == ("ab", "stop")


def test_a_stop_string_split_over_one_delta_of_many_tokens_is_found() -> None:
    choice = _choice(("cd",))
    piece = choice.feed(Delta(1, 0, _ids("abcdef"), "length"))
    assert (piece.text, piece.finish, choice.generated) == ("ab", "stop", 4)


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    pieces = _feed(_choice(("ab",), min_tokens=4), _ids("ababab"))
    assert (_text(pieces), pieces[-1].finish) == ("abab", "stop")


def test_an_unfinished_character_at_the_end_is_flushed() -> None:
    pieces = _feed(_choice(), _ids("a🙂")[:-1], "length")
    assert (_text(pieces), pieces[-1].finish) == ("a\ufffd", "length")


def test_each_shown_token_has_its_logprob_and_offset() -> None:
    pieces = _feed(_choice(offset=10), [*_ids("abc"), END], "stop", logprobs=True)
    entries = [entry for piece in pieces for entry in piece.entries]
    assert [(entry.token, entry.offset) for entry in entries] == [
        (token, 10 + at) for at, token in enumerate(_ids("abc"))
    ]
    assert [entry.logprobs.logprob for entry in entries] == [0.0, -1.0, -2.0]


def test_logprobs_wait_with_their_text_and_go_with_what_a_stop_string_cuts() -> None:
    pieces = _feed(_choice(("cdX", "efg")), _ids("abcdefg"), logprobs=True)
    assert [(piece.text, len(piece.entries)) for piece in pieces] == [
        ("a", 1), ("b", 1), ("", 0), ("", 0), ("cd", 2), ("", 0), ("", 0),
    ]  # fmt: skip


def test_tokens_of_one_character_share_its_offset() -> None:
    pieces = _feed(_choice(), _ids("🙂a"), "length", logprobs=True)
    assert [len(piece.entries) for piece in pieces] == [0, 0, 0, 4, 1]
    assert [entry.offset for piece in pieces for entry in piece.entries] == [0, 0, 0, 0, 1]


@given(
    text=st.text("ab🙂é", max_size=20),
    stops=st.lists(st.text("ab🙂", min_size=1, max_size=3), max_size=3),
    sizes=st.lists(st.integers(1, 5), min_size=60, max_size=60),
    end=st.sampled_from(["stop", "length"]),
)
def test_how_tokens_are_batched_changes_nothing(
    text: str, stops: list[str], sizes: list[int], end: str
) -> None:
    tokens = [*_ids(text), END] if end == "stop" else _ids(text + "c")

    def told(batches: list[int]) -> tuple[str, str | None, int, list[tuple[int, int]]]:
        choice, pieces, at = _choice(tuple(stops)), [], 0
        for size in batches:
            now = tokens[at : at + size]
            at += size
            finish = end if at >= len(tokens) else ""
            own = [TokenLogprobs(-1.0)] * len(now)
            pieces.append(choice.feed(Delta(1, 0, now, finish, 0, own)))
            if choice.finished:
                break
        entries = [(entry.token, entry.offset) for piece in pieces for entry in piece.entries]
        return _text(pieces), pieces[-1].finish, choice.generated, entries

    one_by_one = told([1] * len(tokens))
    assert told(sizes[: len(tokens)]) == one_by_one
    shown, reason, _, entries = one_by_one
    assert not any(stop in shown for stop in stops)
    if reason == end and len(shown) == len(text) + (end == "length"):
        assert [token for token, _ in entries] == tokens[: len(tokens) - (end == "stop")]
    assert all(offset < max(1, len(shown)) for _, offset in entries)
