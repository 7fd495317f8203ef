"""Public data sets of what people ask language models, read from their files."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import msgspec

_AZURE = "a CSV of TIMESTAMP,ContextTokens,GeneratedTokens"
_MOONCAKE = "JSON lines of timestamp, input_length, output_length, hash_ids"
_SHAREGPT = 'a JSON array of records with "conversations"'


class DataProblem(Exception):
    """A file that is not there, or not what it should be; the text says which and what is expected."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace.

    Attributes:
        at: seconds after the trace's first request.
        inputs, outputs: lengths in tokens.
        blocks: ids of the prompt's blocks of 512 tokens, equal where prompts share a prefix.
    """

    at: float
    inputs: int
    outputs: int
    blocks: tuple[int, ...] = ()


def azure(path: Path) -> list[Arrival]:
    """A trace of Azure's LLM inference services: CSV of TIMESTAMP, ContextTokens, GeneratedTokens.

    Raises:
        DataProblem: no such file, or not such a trace.
    """
    try:
        with path.open(newline="") as file:
            rows = [
                (_instant(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
                for row in csv.DictReader(file)
            ]
    except (OSError, KeyError, ValueError, TypeError) as problem:
        raise _not(path, _AZURE, problem) from problem
    if not rows:
        raise _not(path, _AZURE, "it has no rows")
    first = min(at for at, _, _ in rows)
    return [Arrival(at - first, inputs, outputs) for at, inputs, outputs in rows]


def _instant(text: str) -> float:
    """Seconds; the trace has seven digits after the point, of which Python's parser takes six."""
    whole, _, fraction = text.partition(".")
    seconds = datetime.fromisoformat(whole + "+00:00").timestamp()
    return seconds + float(f"0.{fraction or 0}")


class _MooncakeRow(msgspec.Struct):
    timestamp: int  # milliseconds
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def mooncake(path: Path) -> list[Arrival]:
    """A trace of Mooncake (Qin et al., FAST 2025): JSON lines, gzipped if the name ends so.

    Raises:
        DataProblem: no such file, or not such a trace.
    """
    decode = msgspec.json.Decoder(_MooncakeRow).decode
    try:
        data = path.read_bytes()
        rows = [
            decode(line)
            for line in (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()
        ]
    except (OSError, EOFError, msgspec.MsgspecError) as problem:
        raise _not(path, _MOONCAKE, problem) from problem
    if not rows:
        raise _not(path, _MOONCAKE, "it has no lines")
    first = min(row.timestamp for row in rows)
    return [
        Arrival((row.timestamp - first) / 1000, row.input_length, row.output_length, row.hash_ids)
        for row in rows
    ]


def sharegpt(path: Path) -> Iterator[list[tuple[str, str]]]:
    """Conversations as (who, what), who being "human" or "gpt", in the file's order.

    The file is one JSON array, read record by record: one that is cut off gives all records before the cut.

    Raises:
        DataProblem: no such file, or no record in it.
    """
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError as problem:
        raise _not(path, _SHAREGPT, problem) from problem
    found = 0
    for record in _records(text):
        if isinstance(record, dict) and isinstance(record.get("conversations"), list):
            found += 1
            yield [
                (str(turn.get("from")), str(turn.get("value", "")))
                for turn in record["conversations"]
                if isinstance(turn, dict)
            ]
    if not found:
        raise _not(path, _SHAREGPT, "no record found")


def _records(text: str) -> Iterator[object]:
    decoder = json.JSONDecoder()
    place = text.find("[") + 1
    while True:
        while place < len(text) and text[place] in " \t\r\n,":
            place += 1
        try:
            record, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError:
            return
        yield record


def _not(path: Path, expected: str, problem: object) -> DataProblem:
    return DataProblem(f"{path} cannot be read as {expected}: {problem}")
