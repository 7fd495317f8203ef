"""Framing, byte for byte."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from gateway.sse import DONE, PING, event, json_text


def test_an_event_is_one_data_line_and_an_empty_one() -> None:
    assert event(b'{"a":1}') == b'data: {"a":1}\n\n'
    assert DONE == b"data: [DONE]\n\n"


def test_a_ping_alone_in_a_chunk_costs_a_client_that_strips_chunks_nothing() -> None:
    # As `vllm bench serve` reads: each chunk stripped, events told apart by empty lines or by whole JSON.
    buffer, events = "", []
    for chunk in (PING, event(b'{"a":1}'), PING, PING, event(b'{"a":2}') + event(b'{"a":3}'), DONE):
        buffer += chunk.strip().decode()
        *whole, buffer = buffer.split("\n\n")
        if buffer.startswith("data: "):
            whole.append(buffer)
            buffer = ""
        events += whole
    assert events == ['data: {"a":1}', 'data: {"a":2}', 'data: {"a":3}', "data: [DONE]"]


def test_a_ping_is_nothing_but_empty_lines_to_a_reader_of_lines() -> None:
    assert set(PING.decode().split("\n")) == {""}


@given(st.text())
def test_any_text_is_one_line_to_every_reader_and_reads_back_the_same(text: str) -> None:
    encoded = json_text(text)
    assert json.loads(encoded) == text
    assert len(encoded.decode().splitlines()) == 1
    assert len(encoded.splitlines()) == 1
