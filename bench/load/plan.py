"""Turns the settings of a run into requests, and sends them: one round against one server."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import random
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec
from tqdm import tqdm

from bench.load import chat, datasets, probe, workloads
from bench.load.client import Client, Request, ServerProblem
from bench.load.datasets import Arrival, DataProblem
from bench.load.loops import Done, as_traced, closed_loop, open_loop, poisson
from bench.load.options import OPEN_WARMUP
from bench.load.records import Record
from bench.load.workloads import Fit, Vocabulary

WARM_TOKENS = 16  # output of a warm-up request at most: enough for a few steps at full batch
TEMPLATE_TOKENS = 48  # that a chat template adds to a turn, at most in common models
UNKNOWN_VOCABULARY = 30_000  # ids below it exist in the vocabularies of all common models
_NEEDS_DATA = ("sharegpt", "azure", "mooncake")


Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Run:
    """One round against one server.

    Attributes:
        client_cpu: share of one CPU that this client used; near 1 it is the client that was measured.
        before, after: GB/s at which two threads read memory.
    """

    records: list[Record]
    client_cpu: float
    before: float
    after: float


class Plan:
    """The requests of a run, the same for every server of a comparison.

    Raises:
        ServerProblem, DataProblem: the vocabulary or the data cannot be had.
    """

    def __init__(self, options: argparse.Namespace, vocabulary: Vocabulary, context: int) -> None:
        self.options = options
        self.vocabulary = vocabulary
        self.fit = Fit(
            options.scale,
            options.max_input or 1 << 30,
            options.max_output or 1 << 30,
            # A few tokens stay free for those a server adds.
            min(options.context or 1 << 30, context - 4 if context else 1 << 30),
        )
        self._trace: list[Arrival] = []
        self._talks: list[list[tuple[str, str]]] = []
        if options.workload in _NEEDS_DATA and options.data is None:
            raise DataProblem(f"--workload {options.workload} needs --data FILE")
        if options.workload == "azure":
            self._trace = datasets.azure(options.data)
        elif options.workload == "mooncake":
            self._trace = datasets.mooncake(options.data)
        elif options.data is not None:
            self._talks = list(
                tqdm(datasets.sharegpt(options.data), desc="reading", unit="rec", delay=1)
            )

    def requests(self, seed: int, encode: Encode) -> Iterator[Request]:
        """All requests of one seed: without end for random tokens, else as many as the data has."""
        options, vocabulary = self.options, self.vocabulary
        match options.workload:
            case "fixed":
                return workloads.fixed(vocabulary, options.input, options.output, seed)
            case "prefix":
                return workloads.shared_prefix(
                    vocabulary, options.prefix, options.input, options.output, seed,
                    share=options.share == "all",
                )  # fmt: skip
            case "sharegpt":
                return workloads.conversations(self._talks, encode, self.fit, seed)
            case _:
                return workloads.traced(vocabulary, self._trace, self.fit, seed)

    async def round(self, client: Client, seed: int, encode: Encode) -> Run:
        """Warm the server up, then send the requests of `seed` and measure.

        Raises:
            ServerProblem: not one warm-up request was answered.
            DataProblem: the data holds too few requests.
        """
        send = (
            self._chat(seed, encode)
            if self.options.workload == "chat"
            else self._load(seed, encode)
        )
        await warm_up(client, send.warm, self.options.concurrency or OPEN_WARMUP)
        before = probe.read_bandwidth()
        gc.collect()
        gc.freeze()  # data sets are large, and need not be looked at again while a server is measured
        with tqdm(total=send.total, desc=client.model, unit="req") as bar:
            cpu, began = time.process_time(), time.perf_counter()
            records = await send.run(client, lambda record: _advance(bar))
            cpu = (time.process_time() - cpu) / (time.perf_counter() - began)
        return Run(records, cpu, before, probe.read_bandwidth())

    def _load(self, seed: int, encode: Encode) -> _Sending:
        options = self.options
        source = self.requests(seed, encode)
        warm = [_shorter(request) for request in islice(source, options.warmup)]
        counted: Iterator[Request] = source
        if options.requests:
            counted = iter(self._drawn(source, options.requests))
        elif options.speedup:
            counted = iter(list(workloads.within(source, options.seconds * options.speedup)))

        async def run(client: Client, done: Done) -> list[Record]:
            requests: Iterable[Request] = counted
            if not options.rate and not options.speedup:
                return await closed_loop(
                    client, requests, options.concurrency, seconds=options.seconds, done=done
                )
            if options.rate:
                arrivals = poisson(options.rate, random.Random(f"arrivals {seed}"))
            else:
                requests = list(requests)
                arrivals = iter(as_traced(requests, options.speedup))
            return await open_loop(client, requests, arrivals, seconds=options.seconds, done=done)

        return _Sending(warm, run, options.requests)

    def _drawn(self, source: Iterator[Request], count: int) -> list[Request]:
        """All requests made beforehand, so that making them costs nothing while the server is measured."""
        bar = tqdm(islice(source, count), desc="drawing", total=count, delay=1, leave=False)
        ready = list(bar)
        if len(ready) < count:
            raise DataProblem(
                f"{self.options.data} has {len(ready)} requests that fit, beside those for warm-up; "
                f"lower --requests ({count})"
            )
        return ready

    def _chat(self, seed: int, encode: Encode) -> _Sending:
        options = self.options
        warm = islice(workloads.fixed(self.vocabulary, 64, WARM_TOKENS, seed), options.warmup)

        def fits(questions: Sequence[str]) -> bool:
            asked = sum(len(encode(question)) + TEMPLATE_TOKENS for question in questions)
            return self.fit.holds(asked, options.output * options.turns)

        dialogues = (
            chat.recorded_dialogues(self._talks, options.turns, seed, fits)
            if self._talks
            else chat.random_dialogues(
                [options.input] + [options.followup] * (options.turns - 1), seed
            )
        )
        held = iter(list(islice(dialogues, options.requests))) if options.requests else dialogues

        async def run(client: Client, done: Done) -> list[Record]:
            return await chat.converse(
                client, held, options.concurrency, options.output, options.think,
                random.Random(f"thinking {seed}"), seconds=options.seconds, done=done,
            )  # fmt: skip

        total = options.requests * (options.turns + 1) if options.requests else None
        return _Sending(list(warm), run, total)


@dataclass(frozen=True, slots=True)
class _Sending:
    """What a round sends: first some that do not count."""

    warm: list[Request]
    run: Callable[[Client, Done], Awaitable[list[Record]]]
    total: int | None


async def warm_up(client: Client, requests: list[Request], concurrency: int) -> None:
    """Send requests that do not count. Raises ServerProblem if all of them failed."""
    records = await closed_loop(client, requests, concurrency)
    if records and not any(record.ok for record in records):
        first = records[0]
        raise ServerProblem(
            f"all {len(records)} warm-up requests to {client.url} failed: "
            f"{first.error}: {first.message}"
        )


def _shorter(request: Request) -> Request:
    return dataclasses.replace(request, output=min(request.output, WARM_TOKENS))


def _advance(bar: tqdm[None]) -> None:
    bar.update()


async def vocabulary_of(clients: Sequence[Client], given: int | None) -> Vocabulary:
    """What to draw tokens from: as told, as the servers say, or what is safe with most models."""
    if given:
        return Vocabulary.of(given)
    known = []
    for client in clients:
        status, body = await client.get("/tokenizer_info")
        size = body.get("vocab_size") if status == 200 and isinstance(body, dict) else None
        if isinstance(size, int):
            known.append(size)
    return Vocabulary.of(min(known, default=UNKNOWN_VOCABULARY))


def encoder(client: Client, tokenizer: Path | None, key: str) -> Encode:
    """What turns text into token ids: a tokenizer's folder or file, or else the server's /tokenize."""
    if tokenizer is not None:
        from tokenizers import Tokenizer  # needed only here

        path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
        try:
            local = Tokenizer.from_file(str(path))
        except Exception as problem:  # the library raises nothing narrower
            raise DataProblem(f"{path} cannot be read as a tokenizer: {problem}") from problem
        return lambda text: list(local.encode(text, add_special_tokens=False).ids)

    headers = {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )

    def ask(text: str) -> list[int]:
        body = {"model": client.model, "prompt": text, "add_special_tokens": False}
        request = urllib.request.Request(
            client.url + "/tokenize", msgspec.json.encode(body), headers
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                tokens: list[int] = msgspec.json.decode(response.read())["tokens"]
                return tokens
        except (urllib.error.URLError, msgspec.DecodeError, KeyError) as problem:
            raise ServerProblem(
                f"{client.url}/tokenize did not give token ids ({problem}); "
                "give --tokenizer FOLDER instead"
            ) from problem

    return ask
