"""The journal: bounded, and enough to build the same state again."""

from __future__ import annotations

import random

import pytest

from memd.core import Memory
from memd.journal import Journal, replay
from tests.memd import fuzz
from tests.memd.driver import KEY, Driver, memory
from tests.memd.naive import Naive
from wire.errors import Refused
from wire.memory import Goodbye, Reply, Request


class Hurried(Memory):
    """Finishes a step only when something else comes, as in a server that has no time between two steps."""

    def handle(self, now: float, request: Request, packed: bytes | None = None) -> Reply:
        return self.answer(now, request, packed)


def test_it_keeps_the_newest_entries_within_its_bounds() -> None:
    journal = Journal(3, most_bytes=10)
    for i in range(5):
        journal.add(float(i), "request", b"x")
    assert [entry.now for entry in journal] == [2.0, 3.0, 4.0]
    assert not journal.complete
    journal.add(9.0, "request", b"123456789")
    assert [len(entry.data) for entry in journal] == [1, 9]
    assert journal.total == 6


@pytest.mark.parametrize("seed", range(5))
def test_a_random_life_replays_to_the_same_digest(seed: int) -> None:
    rng = random.Random(seed)
    one = Driver(11, 4, hash_bits=rng.choice((256, 3)), reserves={"red": 0.1}, spare=seed % 3)
    naive = Naive(one, exact_hash=False)
    for _ in range(120):
        for _ in range(rng.randint(1, 5)):
            fuzz.queue_something(rng, naive, 2, 21)
        if rng.random() < 0.2:
            fuzz.be_hostile(rng, naive)
        naive.send()
        one.now += rng.random() * 0.1
        if rng.random() < 0.02:
            fuzz.end_registration(rng, naive)
    assert one.memory.journal.complete
    hash_bits = one.pool.index._cut or 256
    fresh = memory(hash_bits=hash_bits, reserves={"red": 0.1}, spare=seed % 3)
    assert replay(one.memory.journal, fresh).digest() == one.memory.digest()
    hurried = Hurried(
        boot_id="boot", epoch=7, key=KEY, hash_bits=hash_bits, reserves={"red": 0.1}, spare=seed % 3
    )
    assert replay(one.memory.journal, hurried).digest() == one.memory.digest()


def test_operators_actions_and_ended_leases_replay_too() -> None:
    one = Driver()
    (first, *_) = one.cached(range(8), 1)
    one.memory.pin("p", first)
    with pytest.raises(Refused):
        one.memory.reset_cache("p")
    one.memory.unpin("p", first)
    assert one.memory.reset_cache("p") == 2
    two = Driver(under=one.memory, name="q")
    one.memory.tick(1.0)
    two.now = 2.0
    two.step()
    one.memory.tick(3.5)
    assert list(one.memory.pools) == ["q"]
    assert replay(one.memory.journal, memory()).digest() == one.memory.digest()
    one.memory.handle(4.0, Goodbye(two.instance, two.generation))
    assert replay(one.memory.journal, memory()).digest() == one.memory.digest()
