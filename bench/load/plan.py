"""Turns the settings of a run into requests, and sends them: one round against one server."""

from __future__ import annotations

import argparse
import dataclasses
import random
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import msgspec
from tqdm import tqdm

from bench.load import datasets, workloads
from bench.load.client import Client, Request, ServerProblem
from bench.load.datasets import Arrival, DataProblem
from bench.load.loops import Done, as_traced, closed_loop, open_loop, poisson
from bench.load.records import Record
from bench.load.workloads import Fit, Vocabulary

WARM_TOKENS = 16  # output of a warm-up request at most: enough for a few steps at full batch
UNKNOWN_VOCABULARY = 30_000  # ids below it exist in the vocabularies of all common models
_NEEDS_DATA = ("sharegpt", "azure", "mooncake")


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

    def requests(self, seed: int, encode: Callable[[str], list[int]]) -> Iterator[Request]:
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

    async def round(
        self, client: Client, seed: int, encode: Callable[[str], list[int]], name: str
    ) -> list[Record]:
        """Warm the server up, then send the requests of `seed` and measure.

        Raises:
            ServerProblem: not one warm-up request was answered.
            DataProblem: the data holds too few requests.
        """
        options = self.options
        source = self.requests(seed, encode)
        warm = [_shorter(request) for request in islice(source, options.warmup)]
        counted: Iterator[Request] = source
        total = None
        if options.requests:
            ready = list(tqdm(islice(source, options.requests), desc="drawing", delay=1,
                              total=options.requests, leave=False))  # fmt: skip
            if len(ready) < options.requests:
                raise DataProblem(
                    f"{options.data} has {len(ready)} requests that fit beside {options.warmup} for "
                    f"warm-up; lower --requests ({options.requests})"
                )
            counted, total = iter(ready), len(ready)
        await warm_up(client, warm, options.concurrency or 8)
        with tqdm(total=total, desc=name, unit="req") as bar:
            return await self._send(client, counted, seed, lambda record: _show(bar))

    async def _send(
        self, client: Client, requests: Iterator[Request], seed: int, done: Done
    ) -> list[Record]:
        options = self.options
        if options.rate:
            arrivals = poisson(options.rate, random.Random(f"arrivals {seed}"))
            return await open_loop(client, requests, arrivals, seconds=options.seconds, done=done)
        if options.speedup:
            ready = list(requests)
            arrivals = iter(as_traced(ready, options.speedup))
            return await open_loop(client, ready, arrivals, seconds=options.seconds, done=done)
        return await closed_loop(
            client, requests, options.concurrency, seconds=options.seconds, done=done
        )


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


def _show(bar: tqdm[None]) -> None:
    bar.update()


async def vocabulary_of(client: Client, given: int | None) -> Vocabulary:
    """What to draw tokens from: as told, as the server says, or what is safe with most models."""
    if given:
        return Vocabulary.of(given)
    status, body = await client.get("/tokenizer_info")
    size = body.get("vocab_size") if status == 200 and isinstance(body, dict) else None
    return Vocabulary.of(size if isinstance(size, int) else UNKNOWN_VOCABULARY)


def encoder(client: Client, tokenizer: Path | None, key: str) -> Callable[[str], list[int]]:
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
