"""Requests: how long they are and when they come.

ShareGPT lengths are token counts of real conversations (`data/`, counts only): the first question and
answer of each, by OPT's own tokenizer, at most 2,048 tokens together, 4,000 of them. This snapshot of
ShareGPT has other means than the paper's (152.3 and 302.1 tokens against 161.31 and 337.99), so both
lengths are multiplied to meet the paper's. Alpaca and WMT16 lengths are drawn from distributions with
stated means.
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

Pair = tuple[int, int]  # tokens of a prompt and of its output

LONGEST = 2048  # tokens of prompt and output of the paper's models
SHAREGPT = (161.31, 337.99)  # the paper's mean prompt and output (its Fig. 11)
ALPACA = (19.31, 58.45)
CHAT_PROMPT = 1024  # most tokens of a prompt in the paper's chat experiment, and of an output
TRANSLATION = (27.0, 38.0)  # an English sentence of news and its German translation
DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True)
class Request:
    """One request to come. `number` counts from 1 and stands in its prompt, so that a memory policy knows
    whose admission it looks at."""

    number: int
    arrival: float  # seconds
    prompt: int  # tokens, the shared prefix included
    output: int  # tokens that will be generated, of each choice
    choices: int = 1
    prefix: int = 0  # first tokens that are the same in all requests

    @property
    def length(self) -> int:
        """Tokens of the prompt and one choice's output."""
        return self.prompt + self.output


def sharegpt(data: Path | None = None, *, tokenizer: Path | None = None) -> list[Pair]:
    """Lengths of ShareGPT's first turns, scaled to the paper's means.

    Args:
        data: the dataset's JSON, to count anew; default: the counts that are shipped.
        tokenizer: the tokenizer.json to count with; needed with `data`.
    """
    if data is None:
        pairs = read_pairs(DATA / "sharegpt.csv")
    elif tokenizer is None:
        raise ValueError("counting tokens of a data set takes a tokenizer.json (--tokenizer)")
    else:
        pairs = count_first_turns(data, tokenizer)
    return scaled(pairs, SHAREGPT)


def chat() -> list[Pair]:
    """Lengths of the paper's chat experiment: the history and the question, cut to their last 1,024 tokens,
    and the answer, at most 1,024. Counted as `sharegpt`, any turn of a conversation, not scaled."""
    return read_pairs(DATA / "chat.csv")


def alpaca(count: int = 4000, seed: int = 1) -> list[Pair]:
    """Lengths like Alpaca's: outputs spread as an exponential distribution, prompts narrower (half their
    mean), which is what a sample of its records shows, with the paper's means."""
    rng = random.Random(seed)
    pairs = [
        (1 + int(rng.gammavariate(4, ALPACA[0] / 4)), 1 + int(rng.expovariate(1 / ALPACA[1])))
        for _ in range(count)
    ]
    return scaled(pairs, ALPACA)


def translation(count: int = 4000, seed: int = 1) -> list[Pair]:
    """Lengths like WMT16 English to German without the prefix; output follows input."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(count):
        prompt = 1 + rng.gammavariate(3.5, TRANSLATION[0] / 3.5)
        pairs.append((int(prompt), 1 + int(prompt * rng.uniform(1.1, 1.7))))
    return scaled(pairs, TRANSLATION)


def read_pairs(path: Path) -> list[Pair]:
    """Rows of a CSV with the columns prompt and output."""
    with path.open(newline="") as file:
        return [(int(row["prompt"]), int(row["output"])) for row in csv.DictReader(file)]


def scaled(pairs: Sequence[Pair], means: tuple[float, float], longest: int = LONGEST) -> list[Pair]:
    """Both lengths multiplied so that their means are `means`; what is longer together loses output."""
    factors = [
        mean / float(np.mean(column))
        for mean, column in zip(means, zip(*pairs, strict=True), strict=True)
    ]
    made = []
    for prompt, output in pairs:
        new = min(longest - 1, max(1, round(prompt * factors[0])))
        made.append((new, min(longest - new, max(1, round(output * factors[1])))))
    return made


def poisson(
    pairs: Sequence[Pair],
    rate: float,
    seconds: float,
    seed: int = 1,
    *,
    prefix: int = 0,
    choices: int = 1,
) -> list[Request]:
    """Arrivals at `rate` a second for `seconds`, lengths drawn from `pairs`.

    The same seed gives the same requests in the same order at any rate, only closer together. A prefix is
    put in front of every prompt.
    """
    rng = random.Random(seed)
    requests: list[Request] = []
    at = 0.0
    while (at := at + rng.expovariate(1.0) / rate) < seconds:
        prompt, output = rng.choice(pairs)
        number = len(requests) + 1
        requests.append(Request(number, at, prefix + prompt, output, choices, prefix))
    return requests


# ---------------------------------------------------------------- the data set itself


def conversations(path: Path) -> Iterator[list[tuple[str, str]]]:
    """(who, text) of each conversation of a ShareGPT JSON file; a last one that is cut off is dropped."""
    text = path.read_text(encoding="utf-8")
    decoder, position = json.JSONDecoder(), text.index("[") + 1
    while True:
        while position < len(text) and text[position] in " \r\n\t,":
            position += 1
        try:
            record, position = decoder.raw_decode(text, position)
        except json.JSONDecodeError:
            return
        yield [(turn["from"], turn["value"]) for turn in record["conversations"]]


def counter(tokenizer: Path) -> Callable[[list[str]], list[int]]:
    """A function from texts to their numbers of tokens."""
    from tokenizers import Tokenizer  # only who counts needs it

    loaded = Tokenizer.from_file(str(tokenizer))
    return lambda texts: [len(encoded.ids) for encoded in loaded.encode_batch(texts)]


def count_first_turns(path: Path, tokenizer: Path) -> list[Pair]:
    """Lengths of every first question and answer of at most 2,048 tokens together."""
    count = counter(tokenizer)
    firsts = [
        (turns[0][1], turns[1][1])
        for turns in conversations(path)
        if [who for who, _ in turns[:2]] == ["human", "gpt"]
    ]
    pairs: list[Pair] = []
    for at in range(0, len(firsts), 1000):
        asked, answered = zip(*firsts[at : at + 1000], strict=True)
        pairs += zip(count(list(asked)), count(list(answered)), strict=True)
    return [pair for pair in pairs if min(pair) > 0 and sum(pair) <= LONGEST]


def pow2(count: int) -> int:
    """The least power of two that is not below `count`."""
    return 1 << math.ceil(math.log2(count)) if count > 1 else 1
