from __future__ import annotations

import contextlib
import struct
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.messages import FROM_MEMD, MESSAGES, TO_EXECUTOR, TO_GATEWAY, TO_MEMD, encoded
from tests.wire.strategies import depth, generic, values
from wire.generate import Delta, Events, GenerateCodec, Submit, ToExecutor, ToGateway
from wire.memory import MAX_TOKEN_BYTES, MemoryCodec, Register, Reply, Request, Step

MEMORY, GENERATE = MemoryCodec(), GenerateCodec()
DIRECTIONS: list[tuple[Any, Callable[[Any], bytes], Callable[[bytes], Any], tuple[Any, ...]]] = [
    (Request, MEMORY.encode, MEMORY.decode_request, TO_MEMD),
    (Reply, MEMORY.encode, MEMORY.decode_reply, FROM_MEMD),
    (ToExecutor, GENERATE.encode, GENERATE.decode_to_executor, TO_EXECUTOR),
    (ToGateway, GENERATE.encode, GENERATE.decode_to_gateway, TO_GATEWAY),
]
DECODERS = [decode for _, _, decode, _ in DIRECTIONS]
GOLDEN = dict(
    line.split() for line in Path(__file__).with_name("golden.txt").read_text().splitlines()
)


def test_every_message_of_both_protocols_has_golden_bytes() -> None:
    members = {kind.__name__ for union, *_ in DIRECTIONS for kind in typing.get_args(union)}
    assert members == set(GOLDEN) == set(MESSAGES)


@pytest.mark.parametrize("name", GOLDEN)
def test_a_message_is_encoded_as_the_golden_bytes(name: str) -> None:
    assert encoded()[name].hex() == GOLDEN[name]


@pytest.mark.parametrize(
    ("decode", "message"),
    [(decode, message) for _, _, decode, messages in DIRECTIONS for message in messages],
    ids=lambda value: type(value).__name__,
)
def test_golden_bytes_decode_to_the_message(decode: Callable[[bytes], Any], message: Any) -> None:
    assert decode(bytes.fromhex(GOLDEN[type(message).__name__])) == message


@pytest.mark.parametrize(("union", "encode", "decode", "_"), DIRECTIONS)
def test_any_message_within_bounds_comes_back_equal(
    union: Any, encode: Callable[[Any], bytes], decode: Callable[[bytes], Any], _: object
) -> None:
    @given(values(union))
    @settings(max_examples=60, deadline=None)
    def comes_back(message: Any) -> None:
        assert decode(encode(message)) == message

    comes_back()


@given(st.sampled_from(DECODERS), st.binary(max_size=200))
@settings(deadline=None)
def test_arbitrary_bytes_decode_or_raise_a_decode_error(
    decode: Callable[[bytes], Any], payload: bytes
) -> None:
    with contextlib.suppress(msgspec.DecodeError):
        decode(payload)


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_frame_with_flipped_bytes_decodes_within_bounds_or_raises(data: st.DataObject) -> None:
    _, encode, decode, messages = data.draw(st.sampled_from(DIRECTIONS))
    frame = bytearray(encode(data.draw(st.sampled_from(messages))))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = decode(bytes(frame))
    except msgspec.DecodeError:
        return
    # What still decodes keeps every declared bound, so it passes a second, strict check.
    assert decode(encode(message)) == message


@pytest.mark.parametrize("decode", DECODERS)
def test_deep_nesting_raises_and_does_not_end_the_process(
    decode: Callable[[bytes], Any],
) -> None:
    with pytest.raises((msgspec.DecodeError, RecursionError)):
        decode(depth(100_000))


@pytest.mark.parametrize("decode", DECODERS)
def test_an_unknown_tag_is_refused_by_name(decode: Callable[[bytes], Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match="nonsense"):
        decode(msgspec.msgpack.encode(["nonsense", 1]))


@pytest.mark.parametrize("name", GOLDEN)
def test_fields_added_by_a_later_minor_version_are_ignored(name: str) -> None:
    decode = next(
        decode
        for _, _, decode, messages in DIRECTIONS
        if name in {type(message).__name__ for message in messages}
    )
    longer = [*generic(bytes.fromhex(GOLDEN[name])), "a field of version 1.9", {"x": 1}]
    assert decode(msgspec.msgpack.encode(longer)) == MESSAGES[name]


def _changed(name: str, place: tuple[int, ...], value: Any) -> bytes:
    """The golden frame of `name` with the field at `place` (indices, the tag is 0) replaced."""
    whole = generic(bytes.fromhex(GOLDEN[name]))
    inner = whole
    for index in place[:-1]:
        inner = inner[index]
    inner[place[-1]] = value
    return msgspec.msgpack.encode(whole)


OUT_OF_BOUNDS = [
    ("Register", (2,), "0" * 31),  # an instance is 32 hex digits
    ("Register", (2,), "G" * 32),
    ("Register", (3, 0), ""),
    ("Register", (3, 0), "../x"),
    ("Register", (3, 0), "n" * 65),
    ("Register", (3, 3), 0),  # block size
    ("Register", (3, 3), 1025),
    ("Register", (3, 4), 1),  # a pool of the null block alone
    ("Register", (3, 4), (1 << 24) + 1),
    ("Register", (3, 5), 0),
    ("Step", (2,), -1),
    ("Step", (4,), 2**53),
    ("Step", (4,), 2**63),
    ("Step", (4,), 1.5),
    ("Step", (4,), True),
    ("Step", (4,), None),
    ("Step", (5, 0, 0), 0),  # sequence ids start at 1
    ("Step", (5, 0, 1), -1),
    ("Step", (5, 0, 1), 2**31),
    ("Step", (5, 0, 2), "text"),
    ("Step", (6,), [0]),
    ("Step", (6,), [2**53]),
    ("Step", (6,), list(range(1, 65_538))),
    ("Step", (7, 0, 2), -1),
    ("Step", (8, 0, 1), 2**31),
    ("Step", (9, 0, 2), 0),  # a chunk of no tokens
    ("Step", (9, 0, 3), "t" * 65),
    ("Step", (9,), [[1, b"", 1]] * 4097),
    ("Step", (10,), b"\0" * (MAX_TOKEN_BYTES + 1)),
    ("Goodbye", (1,), 7),
]


@pytest.mark.parametrize(("name", "place", "value"), OUT_OF_BOUNDS)
def test_memd_never_sees_a_value_out_of_bounds(
    name: str, place: tuple[int, ...], value: Any
) -> None:
    with pytest.raises(msgspec.ValidationError):
        MEMORY.decode_request(_changed(name, place, value))


SAMPLING_OUT_OF_BOUNDS = [
    (0, -1),
    (0, 2**63),
    (1, -0.1),
    (1, 2.1),
    (1, float("nan")),
    (1, float("inf")),
    (2, -1),
    (3, 0.0),
    (3, 1.01),
    (3, float("nan")),
    (4, -0.01),
    (4, 1.01),
    (5, 0.0),
    (5, 10.1),
    (6, -2.1),
    (6, 2.1),
    (7, float("nan")),
    (8, -1),
    (9, 2**31),
    (11, 21),
    (11, -2),
    (12, [-1]),
    (12, [2**31]),
    (12, list(range(257))),
    (13, [[-1, 0.0]]),
    (13, [[1, 100.1]]),
    (13, [[1, float("nan")]]),
    (13, [[1, 0.0]] * 1025),
]


@pytest.mark.parametrize(("field", "value"), SAMPLING_OUT_OF_BOUNDS)
def test_no_sampling_value_out_of_bounds_reaches_an_executor(field: int, value: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        GENERATE.decode_to_executor(_changed("Submit", (3, field), value))


@pytest.mark.parametrize(
    ("place", "value"),
    [((1,), 0), ((1,), 2**53), ((4,), 0), ((4,), 17), ((5,), 101), ((6,), "t" * 65), ((7,), -1)],
)
def test_no_request_value_out_of_bounds_reaches_an_executor(
    place: tuple[int, ...], value: Any
) -> None:
    with pytest.raises(msgspec.ValidationError):
        GENERATE.decode_to_executor(_changed("Submit", place, value))


@pytest.mark.parametrize(("column", "value"), [(0, b"\0" * 15), (1, b"\0"), (2, b"\0" * 12)])
def test_columns_of_unequal_length_are_no_message(column: int, value: bytes) -> None:
    with pytest.raises(msgspec.ValidationError, match="unequal"):
        GENERATE.decode_to_gateway(_changed("Events", (3, column), value))


def test_tokens_in_columns_are_deltas_of_one_token() -> None:
    events = MESSAGES["Events"]
    assert isinstance(events, Events)
    assert list(events.tokens.deltas()) == [Delta(9, 0, [7]), Delta(2**53 - 1, 15, [49151])]


def test_token_ids_travel_as_packed_little_endian_words() -> None:
    submit = MESSAGES["Submit"]
    assert isinstance(submit, Submit)
    assert struct.unpack("<3I", submit.tokens) == (1, 65_536, 4_000_000)
    assert submit.tokens in GENERATE.encode(submit)


def test_a_step_without_work_is_small() -> None:
    idle = Step(instance="0" * 32, generation=1, epoch=1, number=1)
    assert len(MEMORY.encode(idle)) < 64


def test_a_list_default_is_never_shared_between_messages() -> None:
    first = Step(instance="0" * 32, generation=1, epoch=1, number=1)
    first.frees.append(9)
    assert Step(instance="0" * 32, generation=1, epoch=1, number=2).frees == []


def test_messages_cannot_be_changed_after_the_fact() -> None:
    register = MESSAGES["Register"]
    assert isinstance(register, Register)
    with pytest.raises(AttributeError):
        register.instance = "f" * 32  # type: ignore[misc]
