"""Hypothesis strategies made from the messages' own type declarations, bounds included."""

from __future__ import annotations

import enum
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from wire.generate import Tokens


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values that the declared type `kind` (a struct, or a union of them) allows."""
    return _values(inspect.type_info(kind))


def _values(info: inspect.Type) -> st.SearchStrategy[Any]:
    match info:
        case inspect.StructType() if info.cls is Tokens:
            return st.integers(0, 4).flatmap(_columns)
        case inspect.StructType():
            fields = {field.encode_name: _values(field.type) for field in info.fields}
            return st.builds(info.cls, **fields)
        case inspect.UnionType():
            return st.one_of(*map(_values, info.types))
        case inspect.IntType():
            return st.integers(
                info.ge if info.ge is not None else -(2**63),
                info.le if info.le is not None else (info.lt or 2**64) - 1,
            )
        case inspect.FloatType():
            return st.floats(
                info.ge if info.ge is not None else info.gt,
                info.le,
                exclude_min=info.gt is not None,
                allow_nan=False,
            )
        case inspect.StrType(pattern=str(pattern)):
            most = info.max_length or 64
            return st.from_regex(pattern, fullmatch=True).filter(lambda text: len(text) <= most)
        case inspect.StrType():
            # Lone surrogates are no text: they have no UTF-8.
            letters = st.characters(codec="utf-8")
            return st.text(letters, max_size=min(info.max_length or 64, 64))
        case inspect.BytesType():
            return st.binary(max_size=64)
        case inspect.BoolType():
            return st.booleans()
        case inspect.EnumType():
            members: type[enum.Enum] = info.cls
            return st.sampled_from(members)
        case inspect.ListType():
            return st.lists(_values(info.item_type), max_size=4)
        case inspect.VarTupleType():
            return st.lists(_values(info.item_type), max_size=4).map(tuple)
        case inspect.TupleType():
            return st.tuples(*map(_values, info.item_types))
    raise NotImplementedError(f"a message field of type {info}: teach this module how to draw one")


def _columns(count: int) -> st.SearchStrategy[Tokens]:
    return st.builds(
        Tokens, *(st.binary(min_size=size, max_size=size) for size in (8 * count, count, 4 * count))
    )


def depth(levels: int) -> bytes:
    """A msgpack array in an array in an array … `levels` deep."""
    return b"\x91" * levels + b"\xc0"


def generic(payload: bytes) -> Any:
    """The message as plain lists and numbers, as a peer without our types would read it."""
    return msgspec.msgpack.decode(payload)
