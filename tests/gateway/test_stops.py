"""Stop strings: cut exactly, never shown in part, whatever the split."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.stops import StopScanner

# Two letters: overlaps and near misses are the rule, not the exception.
TEXTS = st.text("ab", max_size=40)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def _expected(text: str, stops: list[str]) -> tuple[str, bool]:
    """By definition: at the first position where a stop string is complete, cut the longest such."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@st.composite
def _split(draw: st.DrawFn) -> tuple[str, list[str]]:
    text = draw(TEXTS)
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(_split(), STOPS)
def test_any_split_gives_the_text_up_to_the_first_complete_stop(
    split: tuple[str, list[str]], stops: list[str]
) -> None:
    text, parts = split
    scanner, shown, stopped = StopScanner(stops), "", False
    want, stops_there = _expected(text, stops)
    for part in parts:
        scanned = scanner.feed(part)
        shown += scanned.text
        assert want.startswith(shown)  # nothing of a stop string was shown, even for a moment
        if scanned.stop is not None:
            stopped = True
            break
    if not stopped:
        shown += scanner.release()
    assert (shown, stopped) == (want, stops_there)


@given(_split(), STOPS)
def test_no_more_is_held_back_than_could_become_a_stop(
    split: tuple[str, list[str]], stops: list[str]
) -> None:
    _, parts = split
    scanner, fed, shown = StopScanner(stops), "", ""
    for part in parts:
        scanned = scanner.feed(part)
        if scanned.stop is not None:
            return
        fed, shown = fed + part, shown + scanned.text
        held = fed[len(shown) :]
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_spanning_pieces_is_never_shown_in_part() -> None:
    scanner = StopScanner(["DEFGHIJ"])
    assert [scanner.feed(part).text for part in ("ABC", "DE", "FGH")] == ["ABC", "", ""]
    last = scanner.feed("IJK")
    assert (last.text, last.stop) == ("", "DEFGHIJ")


def test_held_text_is_released_when_the_text_diverges() -> None:
    scanner = StopScanner(["DEFGHIJ"])
    assert scanner.feed("ABC DEFG").text == "ABC "
    assert scanner.feed("X").text == "DEFGX"


def test_held_text_is_released_at_the_end() -> None:
    scanner = StopScanner(["DEFGHIJ"])
    assert scanner.feed("ABC DEFG").text == "ABC "
    assert scanner.release() == "DEFG"


def test_an_included_stop_is_shown_whole_and_nothing_after_it() -> None:
    scanned = StopScanner(["END"], include=True).feed("text END more")
    assert (scanned.text, scanned.stop) == ("text END", "END")


def test_text_that_may_not_stop_passes_and_is_forgotten() -> None:
    scanner = StopScanner(["END"])
    assert scanner.feed("x E").text == "x "
    assert scanner.skip("ND") == "END"  # together a stop string, but before min_tokens
    assert scanner.feed("D").stop is None
