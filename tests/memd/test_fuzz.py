"""Seeded random operations against the naive oracle, with the full check after every message.

`PAGEKEEPER_FUZZ_OPS` sets how many operations; 2,000,000 is what continuous integration runs.
"""

from __future__ import annotations

import os

import pytest

from tests.memd.driver import Driver, memory, pack
from tests.memd.fuzz import fuzz
from tests.memd.naive import Naive
from wire.memory import Admit

OPERATIONS = int(os.environ.get("PAGEKEEPER_FUZZ_OPS", "40000"))
SEEDS = 8


@pytest.mark.timeout(30 + OPERATIONS // 4000)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_operations_never_make_a_sequence_read_what_is_not_its_own(seed: int) -> None:
    assert fuzz(seed, OPERATIONS // SEEDS) >= OPERATIONS // SEEDS


@pytest.mark.parametrize("hash_bits", [1, 4, 9])
def test_colliding_hashes_change_how_much_is_shared_but_never_what_is_read(hash_bits: int) -> None:
    fuzz(100 + hash_bits, 3_000, hash_bits=hash_bits)


def test_ten_thousand_requests_are_right_with_a_hash_cut_to_four_bits() -> None:
    """Prompts of two letters share and differ all the time; every one is verified slot by slot."""
    naive = Naive(Driver(12, 4, under=memory(hash_bits=4)), exact_hash=False)
    for request in range(10_000):
        length = 1 + request * 7 % 17
        prompt = [(request * 2654435761 >> 9 + i) & 1 for i in range(length)]
        naive.admit(prompt, 1 << 20)
        assert not naive.send().refused
        *older, newest = naive.seqs.values()
        naive.commit(newest, newest.written, 0)
        for seq in older:
            naive.free(seq)
        naive.send()
    counters = naive.pool.counters
    assert counters.hits > 10_000
    assert counters.evictions > 1_000
    assert counters.merges > 0
    assert len(naive.pool.index.by_key) <= 16


def test_the_oracle_notices_a_block_that_was_never_written() -> None:
    """The judge itself is judged: a hit on a block with other content must not pass."""
    naive = Naive(Driver())
    naive.driver.cached(range(8), 1)
    naive.ids = 1
    naive.queue.admits.append(Admit(2, pack(range(9)), 1 << 20))
    naive.prompts[2] = list(range(9))
    with pytest.raises(KeyError):
        naive.send()
