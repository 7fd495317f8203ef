"""Conversations whose history grows: every turn sends all that was said before it.

After its last turn each conversation is asked once more with another beginning, at the same length: nothing
of that can be cached, so its time to the first token is what the last turn's would have been without a cache.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from bench.load.client import Client, Request
from bench.load.loops import Done
from bench.load.records import Record

COLD = "cold"  # label of the request with another beginning; turns are "turn 1", "turn 2" …
_WORDS = """
    time people water house school night story world family money music paper river light door
    city table road garden morning summer winter letter window picture kitchen island engine
    market doctor teacher farmer desert forest mountain ocean bridge village question answer
""".split()  # noqa: SIM905 - forty lines otherwise


@dataclass(frozen=True, slots=True)
class Dialogue:
    """What a user says, turn by turn, and another number for the cold request's beginning."""

    questions: Sequence[str]
    number: int
    other: int


def random_dialogues(lengths: Sequence[int], seed: int) -> Iterator[Dialogue]:
    """Questions of so many random words, each about one token in most vocabularies; without end."""
    rng = random.Random(seed)
    while True:
        questions = [" ".join(rng.choices(_WORDS, k=words)) for words in lengths]
        yield Dialogue(questions, *_two_numbers(rng))


def recorded_dialogues(
    talks: Sequence[Sequence[tuple[str, str]]],
    turns: int,
    seed: int,
    fits: Callable[[Sequence[str]], bool] = lambda questions: True,
) -> Iterator[Dialogue]:
    """What people asked in ShareGPT's conversations of at least `turns` turns, in random order.

    Those whose questions do not fit, as `fits` says, are left out.
    """
    rng = random.Random(seed)
    for talk in rng.sample(talks, len(talks)):
        questions = [text for who, text in talk if who == "human"][:turns]
        if len(questions) == turns and fits(questions):
            yield Dialogue(questions, *_two_numbers(rng))


def _two_numbers(rng: random.Random) -> tuple[int, int]:
    """Two of six digits that differ in the first one, so as many tokens and no common beginning."""
    first, second = rng.sample(range(1, 10), 2)
    return first * 100_000 + rng.randrange(100_000), second * 100_000 + rng.randrange(100_000)


def opening(number: int, question: str) -> str:
    """A first question that no other conversation begins with."""
    return f"{number}. {question}"


async def converse(
    client: Client,
    dialogues: Iterable[Dialogue],
    concurrency: int,
    outputs: int,
    think: float,
    rng: random.Random,
    *,
    seconds: float | None = None,
    done: Done = lambda record: None,
) -> list[Record]:
    """Hold conversations, `concurrency` at a time, until all are held or `seconds` are over.

    Args:
        outputs: tokens of every answer.
        think: mean seconds between an answer and the next question, exponentially distributed.
    """
    waiting = iter(dialogues)
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds if seconds is not None else None
    records: list[Record] = []

    async def say(messages: list[dict[str, str]], label: str) -> Record:
        record = await client.send(Request(outputs, messages=messages, label=label))
        records.append(record)
        done(record)
        return record

    async def hold(dialogue: Dialogue) -> None:
        messages: list[dict[str, str]] = []
        for turn, question in enumerate(dialogue.questions, 1):
            if turn == 1:
                question = opening(dialogue.number, question)
            else:
                await asyncio.sleep(rng.expovariate(1 / think) if think else 0)
            messages.append({"role": "user", "content": question})
            record = await say(list(messages), f"turn {turn}")
            if not record.ok:
                return
            messages.append({"role": "assistant", "content": record.text})
        first = {"role": "user", "content": opening(dialogue.other, dialogue.questions[0])}
        await say([first, *messages[1:-1]], COLD)

    async def work() -> None:
        for dialogue in waiting:
            await hold(dialogue)
            if until is not None and loop.time() >= until:
                return

    await asyncio.gather(*(work() for _ in range(concurrency)))
    return records
