"""Random executors: rounds of valid and hostile operations against the naive oracle, from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from memd.core import Memory
from tests.memd.driver import KEY, OTHER, Driver, pack
from tests.memd.naive import Naive, must
from wire.errors import Code
from wire.memory import Admit, Append, Commit, Fork, Goodbye, Granted, Register, Rejected, Step

TENANTS = ("", "red", "blue")
Build = Callable[..., Memory]


def tokens_like(rng: random.Random, naive: Naive, length: int, letters: int) -> list[int]:
    """A prompt that often repeats what another sequence has, for hits of every length."""
    if naive.seqs and rng.random() < 0.6:
        other = rng.choice(list(naive.seqs.values())).tokens
        start = other[: rng.randint(0, min(len(other), length))]
    else:
        start = []
    return start + [rng.randrange(letters) for _ in range(length - len(start))]


def queue_something(rng: random.Random, naive: Naive, letters: int, most_tokens: int) -> None:
    """One valid operation for the next step."""
    seq = naive.choose(rng.randrange(1 << 16))
    size = naive.block_size
    kind = rng.random()
    if seq is None or kind < 0.12:
        group = rng.choice((0, 0, 0, 1 + naive.ids))
        tenant = rng.choice(TENANTS) if rng.random() < 0.3 else ""
        for _ in range(rng.randint(2, 3) if group else 1):
            prompt = tokens_like(rng, naive, rng.randint(1, most_tokens), letters)
            chunk = rng.choice((1, size, size + 1, 1 << 20))
            naive.admit(prompt, chunk, tenant, group, rng.random() < 0.9)
    elif kind < 0.36:
        extra = rng.choice((0, 0, 0, 1, size))
        naive.commit(seq, seq.written - rng.choice((0, 0, 0, 0, 1, 2)), extra)
    elif kind < 0.46:
        naive.free(seq)
    elif kind < 0.56:
        at = seq.written if rng.random() < 0.6 else rng.randint(0, seq.written)
        child = naive.fork(seq, at)
        if rng.random() < 0.5:
            naive.append_to_child(child, naive.queue.forks[-1].at, rng.randrange(letters))
    elif kind < 0.76:
        count = rng.choice((1, 1, 1, 2, size, size + 1))
        new = [rng.randrange(letters) for _ in range(count)]
        naive.append(seq, new, count if rng.random() < 0.8 else rng.randint(0, count))
    elif kind < 0.98:
        naive.write(seq, [rng.randrange(letters) for _ in range(rng.randint(1, size))])
    else:
        naive.fill(seq)


def be_hostile(rng: random.Random, naive: Naive) -> None:
    """One message that must change nothing, or an operator's action."""
    driver = naive.driver
    seq = naive.choose(rng.randrange(1 << 16))
    unknown = naive.pool.highest + 1000
    match rng.randrange(12 if seq is not None else 7):
        case 0:
            must(naive.refused(frees=[unknown]).code == Code.UNKNOWN_SEQUENCE, "unknown free")
        case 1:
            must(
                naive.refused(appends=[Append(unknown, 1)]).code == Code.UNKNOWN_SEQUENCE, "append"
            )
        case 2:
            step = Step(driver.instance, driver.generation, 7, driver.number + 2)
            refuse(naive, step, Code.GAP)
        case 3:
            step = Step(driver.instance, driver.generation + rng.choice((-1, 1)), 7, 1)
            refuse(naive, step, Code.FENCED)
        case 4:
            if driver.number:
                number = driver.number
                again = driver.memory.handle(
                    driver.now, Step(driver.instance, driver.generation, 7, number)
                )
                must(again is naive.pool.reply, "a repeated step got another reply")
                refuse(naive, Step(driver.instance, driver.generation, 7, number - 1), Code.STALE)
        case 5:
            naive.pin(rng.randrange(1 << 16))
        case 6:
            naive.unpin(rng.randrange(1 << 16))
        case 7 if seq is not None:
            parts = {"frees": [seq.id, seq.id]}
            must(naive.refused(**parts).code == Code.DUPLICATE, "double free in one step")
        case 8 if seq is not None and seq.id not in naive.queue.commits:
            past = len(seq.blocks) * naive.block_size + 1
            item = rng.choice(
                (
                    Commit(seq.id, 1 << 20),
                    Commit(seq.id, seq.committed, b"odd"),
                    Commit(seq.id, past, pack([0] * max(0, past - seq.sent))),
                )
            )
            must(naive.refused(commits=[item]).code == Code.INVALID, "a bad commit")
        case 9 if seq is not None:
            item_fork = rng.choice((Fork(seq.id, seq.id, 0), Fork(seq.id, unknown, 1 << 20)))
            code = naive.refused(forks=[item_fork]).code
            must(code in (Code.INVALID, Code.DUPLICATE), "a bad fork")
        case 10 if seq is not None:
            admit = rng.choice((Admit(seq.id, pack([1]), 1), Admit(unknown, b"", 1)))
            code = naive.refused(admits=[admit]).code
            must(code in (Code.INVALID, Code.DUPLICATE), "a bad admission")
        case 11 if seq is not None:
            fills = pack([seq.id, 0, 1 << 20, 0])
            must(naive.refused(fills=fills).code == Code.INVALID, "a fill past the room")
        case _:
            pass


def refuse(naive: Naive, step: Step, code: Code) -> None:
    memory = naive.driver.memory
    before = memory.digest()
    reply = memory.handle(naive.driver.now, step)
    must(isinstance(reply, Rejected) and reply.code == code, "%s instead of %s", reply, code)
    must(memory.digest() == before, "a refused step changed the state")
    naive.operations += 1


def end_registration(rng: random.Random, naive: Naive) -> None:
    """Goodbye, lease end or a second registration; after each the pool is cold."""
    driver = naive.driver
    match rng.randrange(3):
        case 0:
            reply = driver.memory.handle(driver.now, Goodbye(driver.instance, driver.generation))
            must(isinstance(reply, Granted), "goodbye was refused")
        case 1:
            driver.now += driver.memory.lease_ms / 1000
            step = Step(driver.instance, driver.generation, 7, driver.number + 1)
            reply = driver.memory.handle(driver.now, step)
            must(isinstance(reply, Rejected) and reply.code == Code.FENCED, "a dead lease spoke")
        case _:
            other = driver.memory.handle(driver.now, Register((1, 0), OTHER, driver.spec))
            must(isinstance(other, Rejected) and other.code == Code.POOL_BUSY, "a pool was stolen")
    driver.memory.tick(driver.now)
    driver.register()
    naive.forget()
    driver.memory.check()
    counts = naive.pool.counts()
    must(counts.free == counts.total, "a new registration is not cold: %s", counts)


def drain(naive: Naive) -> None:
    """Free everything: nothing is used any more."""
    while naive.pins:
        naive.unpin(0)
    naive.queue.frees = dict.fromkeys(naive.seqs)
    naive.send()
    naive.send()  # ends the quarantine
    counts = naive.pool.counts()
    must(counts.used == counts.quarantined == 0, "blocks leaked: %s", counts)


def fuzz(seed: int, operations: int, build: Build = Memory, hash_bits: int = 256) -> int:
    """Run at least so many operations on pools of random shape; returns how many were done.

    Raises:
        Wrong: the oracle saw something it must not.
        Broken: an invariant does not hold.
    """
    rng = random.Random(seed)
    done = 0
    while done < operations:
        reserves = {"red": 0.2, "blue": 0.1} if rng.random() < 0.2 else None
        memory = build(
            boot_id="boot",
            epoch=7,
            key=KEY,
            hash_bits=hash_bits,
            reserves=reserves,
            spare=rng.choice((0, 0, 1, 3)),
            journal_size=1,
        )
        size = rng.choice((1, 2, 3, 4, 4, 4))
        blocks = rng.choice((2, 4, 8, 11, 11, 16, 24))
        naive = Naive(Driver(blocks, size, under=memory), exact_hash=hash_bits == 256)
        letters = rng.choice((1, 2, 2, 3))
        most_tokens = max(1, min(5 * size + 1, (blocks - 1) * size))
        busy = rng.randint(1, 8)
        goal = naive.operations + min(2000, operations - done)
        while naive.operations < goal:
            for _ in range(rng.randint(1, busy)):
                queue_something(rng, naive, letters, most_tokens)
            if rng.random() < 0.1:
                be_hostile(rng, naive)
            naive.send()
            if len(naive.seqs) > 8:
                for seq in list(naive.seqs.values())[: rng.randint(1, 8)]:
                    naive.free(seq)
            if rng.random() < 0.002:
                end_registration(rng, naive)
        drain(naive)
        done += naive.operations
    return done
