"""The prefix index on its own: hashes, chains, and hits inside a block."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memd.prefix import MOST_SIBLINGS, Node, PrefixIndex, common_tokens
from tests.memd.driver import pack

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=20)


def index(secret: bytes = b"secret", salt: bytes = b"model", hash_bits: int = 256) -> PrefixIndex:
    return PrefixIndex(secret, salt, 4, hash_bits)


def chain(prefixes: PrefixIndex, tenant: str, *blocks: list[int]) -> Node:
    """Index blocks one after the other, with physical ids from 1."""
    node: Node = prefixes.root(tenant, OrderedDict())
    for block in blocks:
        packed = pack(block)
        number = len(prefixes.by_key) + 1
        node = prefixes.add(node, packed, prefixes.key_of(node, packed), number)
    return node


@given(tokens, tokens, tokens)
def test_common_tokens_are_those_before_the_first_difference(
    shared: list[int], a: list[int], b: list[int]
) -> None:
    left, right = shared + a, shared + b
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_tokens(pack(left), pack(right)) == expected


def test_a_key_depends_on_secret_model_tenant_parent_and_tokens_and_has_256_bits() -> None:
    keys = set()
    for prefixes in (index(), index(secret=b"other"), index(salt=b"other")):
        for tenant in ("", "red"):
            root = prefixes.root(tenant, OrderedDict())
            child = chain(prefixes, tenant, [1, 2, 3, 4])
            keys |= {
                prefixes.key_of(root, pack([1, 2, 3, 4])),
                prefixes.key_of(root, pack([1, 2, 3, 5])),
                prefixes.key_of(child, pack([1, 2, 3, 4])),
            }
    assert len(keys) == 18
    assert {len(key) for key in keys} == {32}


@pytest.mark.parametrize("bits", [1, 4, 8, 9])
def test_a_cut_hash_has_as_many_values_as_its_bits_allow(bits: int) -> None:
    prefixes = index(hash_bits=bits)
    root = prefixes.root("", OrderedDict())
    keys = {prefixes.key_of(root, pack([i, 0, 0, 0])) for i in range(40 << bits)}
    assert len(keys) == 1 << bits


def test_the_longest_prefix_goes_through_whole_blocks_and_into_one() -> None:
    prefixes = index()
    chain(prefixes, "", [1, 2, 3, 4], [5, 6, 7, 8])
    found = {
        length: prefixes.longest("", pack(range(1, length + 1))).computed for length in range(1, 11)
    }
    assert found == {1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7: 6, 8: 7, 9: 8, 10: 8}


def test_looking_up_an_unknown_tenant_leaves_no_trace() -> None:
    prefixes = index()
    assert prefixes.longest("nobody", pack([1, 2, 3])).computed == 0
    assert not prefixes.roots


def test_only_the_most_recent_children_are_compared() -> None:
    prefixes = index()
    for last in range(MOST_SIBLINGS + 1):
        chain(prefixes, "", [1, 2, last, 0])
    assert prefixes.longest("", pack([1, 2, MOST_SIBLINGS, 0, 9])).computed == 4
    assert prefixes.longest("", pack([1, 2, 0, 7, 9])).computed == 2
    assert prefixes.longest("", pack([1, 2, 1, 7, 9])).computed == 3


def test_a_root_goes_with_its_last_child_when_no_sequence_needs_it() -> None:
    prefixes = index()
    first, second = chain(prefixes, "", [1, 1, 1, 1]), chain(prefixes, "", [2, 2, 2, 2])
    prefixes.remove(first)
    assert list(prefixes.roots) == [""]
    prefixes.remove(second)
    assert not prefixes.roots
    assert not prefixes.by_key
