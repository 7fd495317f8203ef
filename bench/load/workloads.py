"""What is asked: requests made of random tokens, or of what people asked.

All are drawn from a seed, so the same seed gives the same requests. Another seed gives other tokens, which no
prefix cache has seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from bench.load.client import Request
from bench.load.datasets import Arrival

MOONCAKE_BLOCK = 512  # tokens of a prefix block in the trace
SHORTEST = 4  # tokens of a question or an answer worth asking


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Token ids to draw from: `first` to `size` - 1. The first ones are special in most vocabularies."""

    size: int
    first: int = 0

    @staticmethod
    def of(size: int) -> Vocabulary:
        return Vocabulary(size, min(1000, size // 10))

    def draw(self, rng: random.Random, count: int) -> list[int]:
        return rng.choices(range(self.first, self.size), k=count)


def fixed(vocabulary: Vocabulary, inputs: int, outputs: int, seed: int) -> Iterator[Request]:
    """Random prompts of one length, without end."""
    rng = random.Random(seed)
    while True:
        yield Request(outputs, vocabulary.draw(rng, inputs))


def shared_prefix(
    vocabulary: Vocabulary, prefix: int, inputs: int, outputs: int, seed: int, *, share: bool
) -> Iterator[Request]:
    """Prompts of `prefix` tokens that all have in common, or none if not `share`, and `inputs` more."""
    rng = random.Random(seed)
    common = vocabulary.draw(rng, prefix)
    while True:
        head = common if share else vocabulary.draw(rng, prefix)
        yield Request(outputs, head + vocabulary.draw(rng, inputs))


@dataclass(frozen=True, slots=True)
class Fit:
    """Makes lengths of a trace fit a small model.

    Attributes:
        scale: what lengths are multiplied with.
        max_input, max_output: what is longer is cut to it; tokens.
        context: of the model; the input is cut so that both together fit.
    """

    scale: float = 1.0
    max_input: int = 1 << 30
    max_output: int = 1 << 30
    context: int = 1 << 30

    def lengths(self, inputs: int, outputs: int) -> tuple[int, int]:
        """Tokens of prompt and output, at least one of each."""
        out = max(1, min(round(outputs * self.scale), self.max_output, self.context - 1))
        return max(1, min(round(inputs * self.scale), self.max_input, self.context - out)), out

    def holds(self, inputs: int, outputs: int) -> bool:
        """Whether lengths fit as they are."""
        longest = inputs <= self.max_input and outputs <= self.max_output
        return longest and inputs + outputs <= self.context


def traced(
    vocabulary: Vocabulary, trace: Sequence[Arrival], fit: Fit, seed: int
) -> Iterator[Request]:
    """A trace's requests in its order. Prompts share a prefix where they name the same blocks.

    A block's tokens follow from its id and the seed alone; its size is scaled as lengths are.
    """
    rng = random.Random(seed)
    size = max(1, round(MOONCAKE_BLOCK * fit.scale))
    for arrival in trace:
        length, outputs = fit.lengths(arrival.inputs, arrival.outputs)
        prompt: list[int] = []
        for block in arrival.blocks[: -(-length // size)]:
            own = random.Random(f"{seed}/{block}")
            prompt += vocabulary.draw(own, min(size, length - len(prompt)))
        prompt += vocabulary.draw(rng, length - len(prompt))
        yield Request(outputs, prompt, at=arrival.at)


def within(requests: Iterator[Request], seconds: float) -> Iterator[Request]:
    """The requests that a trace has arrive in the seconds after its first one."""
    first: float | None = None
    for request in requests:
        first = request.at if first is None else first
        if request.at - first > seconds:
            return
        yield request


def conversations(
    records: Sequence[Sequence[tuple[str, str]]],
    encode: Callable[[str], list[int]],
    fit: Fit,
    seed: int,
) -> Iterator[Request]:
    """First questions of ShareGPT in random order, with answers as long as those recorded.

    As in the paper's evaluation, very short and very long ones are left out and not cut.
    """
    order = list(range(len(records)))
    random.Random(seed).shuffle(order)
    for index in order:
        turns = records[index]
        if [who for who, _ in turns[:2]] != ["human", "gpt"]:
            continue
        prompt, outputs = encode(turns[0][1]), len(encode(turns[1][1]))
        if min(len(prompt), outputs) >= SHORTEST and fit.holds(len(prompt), outputs):
            yield Request(outputs, prompt)
