"""Framing, byte for byte."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from gateway.sse import DONE, PING, event, json_text


def test_an_event_is_one_data_line_and_an_empty_one() -> None:
    assert event(b'{"a":1}') == b'data: {"a":1}\n\n'
    assert DONE == b"data: [DONE]\n\n"
    assert PING.startswith(b":")
    assert PING.endswith(b"\n\n")


@given(st.text())
def test_any_text_is_one_line_to_every_reader_and_reads_back_the_same(text: str) -> None:
    encoded = json_text(text)
    assert json.loads(encoded) == text
    assert len(encoded.decode().splitlines()) == 1
    assert len(encoded.splitlines()) == 1
