"""What asking memd costs: a step's round trip, and every operation beside vLLM's in-process manager.

    python -m bench.memd [--sequences 1,64,256,1024] [--pools 10000,1000000] [--rounds 6] [--csv FILE]
                         [--threads N] [--pause-ms 5] [--peer-python PATH]

Pools are full of cached prefixes, as in a daemon that has served for a while. A round trip goes from a step's
message to its answer, encoding and decoding included, in three settings:

- *idle*: nothing else runs, as while an executor waits for its answer: its device has finished by then
- *busy*: `--threads` threads compute, one per CPU, as while the answer is not waited for yet
- *paced*: the same, with `--pause-ms` between an answer and the next step, so that caches are cold

Operations have one sequence each, with a prompt of 161 tokens, and are timed in one process (the core plain
and compiled, vLLM's manager where `--peer-python` has one) and over the socket, in turns. Exit status 1 when
the idle round trip of 256 sequences takes more than 150 µs at the median.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import output
from memd import compiled

BOUND_US = 150.0  # the promise: median round trip at 256 sequences
PROMISED = 256
SAMPLES = 64  # a round and cell
OPERATIONS = ("admit", "lookup", "fork", "free", "audit")
PEER = Path(__file__).with_name("peer.py")

Row = dict[str, object]


class Subject:
    """A worker process."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = " ".join(command)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.name = str(self._read())

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise SystemExit(f"{self._command} ended with status {self._process.returncode}")
        return json.loads(line)

    def measure(self, **asked: object) -> list[float] | None:
        """Seconds of each sample, or None for an operation it does not have."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        taken: list[float] | None = self._read()
        return taken

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure_pool(
    blocks: int,
    sequences: list[int],
    rounds: int,
    samples: int,
    threads: int,
    pause_ms: float,
    peer: Path | None,
) -> list[Row]:
    """All figures of one pool size; subjects take turns, round by round."""
    ours = [sys.executable, "-m", "bench.memd.worker"]
    kinds = ["daemon", "answer", "compiled", "plain"]
    if compiled.found() is None:
        kinds.remove("compiled")
    commands = [[*ours, kind, str(blocks)] for kind in kinds]
    if peer is not None:
        commands.append([str(peer), str(PEER), str(blocks)])
    settings: dict[str, dict[str, object]] = {
        "idle": {},
        "busy": {"threads": threads},
        "paced": {"threads": threads, "pause_ms": pause_ms},
    }
    with ExitStack() as stack:
        subjects = []
        total = len(commands) + (rounds + 1) * (
            len(sequences) * (len(settings) + len(commands) - 1) + len(commands) * len(OPERATIONS)
        )
        progress = stack.enter_context(tqdm(total=total, desc=f"{blocks} blocks", unit="cell"))
        for command in commands:
            subject = Subject(command)
            stack.callback(subject.close)
            subjects.append(subject)
            progress.update()
        remote, *local = subjects
        times: dict[tuple[str, str, int], list[float]] = {}

        def note(turn: int, name: str, op: str, count: int, taken: list[float] | None) -> None:
            if turn and taken is not None:  # the first round warms up
                times.setdefault((name, op, count), []).extend(taken)
            progress.update()

        for turn in range(rounds + 1):
            for count in sequences:
                for name, setting in settings.items():
                    taken = remote.measure(op="step", count=count, samples=samples, **setting)
                    note(turn, f"{remote.name}, {name}", "step", count, taken)
                for subject in local:
                    taken = subject.measure(op="step", count=count, samples=samples)
                    note(turn, subject.name, "step", count, taken)
            for op in OPERATIONS:
                for subject in subjects:
                    # An audit takes seconds, and always the same.
                    wanted = op != "audit" or turn == 1
                    note(
                        turn,
                        subject.name,
                        op,
                        1,
                        subject.measure(op=op, samples=samples) if wanted else None,
                    )
    return [
        {
            "blocks": blocks,
            "operation": op,
            "sequences": count,
            "subject": name,
            "samples": len(taken),
            "p50_us": round(quantile(taken, 0.5) * 1e6, 1),
            "p99_us": round(quantile(taken, 0.99) * 1e6, 1),
            "per_sequence_us": round(quantile(taken, 0.5) * 1e6 / count, 2),
        }
        for (name, op, count), taken in times.items()
    ]


def table(rows: list[Row]) -> str:
    """A line per pool, operation and number of sequences, a column per subject: p50 / p99 in microseconds."""
    names = list(dict.fromkeys(str(row["subject"]) for row in rows))
    cells = {
        (row["blocks"], row["operation"], row["sequences"], row["subject"]): row for row in rows
    }
    lines = [
        "| blocks | operation | sequences | " + " | ".join(names) + " |",
        "|---:|---|---:|" + "---:|" * len(names),
    ]
    for blocks, operation, count in dict.fromkeys(key[:3] for key in cells):
        found = [cells.get((blocks, operation, count, name)) for name in names]
        figures = (f"{cell['p50_us']} / {cell['p99_us']}" if cell else "–" for cell in found)
        lines.append(f"| {blocks:,} | {operation} | {count} | " + " | ".join(figures) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.memd", description="Time memd's operations.", allow_abbrev=False
    )
    parser.add_argument("--sequences", default="1,64,256,1024", help="that decode together")
    parser.add_argument("--pools", default="10000,1000000", help="blocks, the null block included")
    parser.add_argument("--rounds", type=int, default=6, help=f"of {SAMPLES} samples a cell")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="a round and cell")
    parser.add_argument("--threads", type=int, help="that compute meanwhile; default: one per CPU")
    parser.add_argument("--pause-ms", type=float, default=5.0, help="between two steps, paced")
    parser.add_argument("--peer-python", type=Path, help="a Python that has vLLM installed")
    parser.add_argument("--csv", type=output.file, help="also write all figures here")
    given = parser.parse_args(argv)
    sequences = [int(text) for text in given.sequences.split(",")]
    if compiled.found() is None:
        print(
            "memd's core is not compiled here: `python -m memd.compiled` compiles it",
            file=sys.stderr,
        )
    rows: list[Row] = []
    for blocks in map(int, given.pools.split(",")):
        rows += measure_pool(
            blocks,
            sequences,
            given.rounds,
            given.samples,
            given.threads or len(os.sched_getaffinity(0)),
            given.pause_ms,
            given.peer_python,
        )
    print("p50 / p99 in µs")
    print(table(rows))
    if given.csv:
        with given.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    slow = [
        row
        for row in rows
        if row["subject"] == "over ipc, idle"
        and row["sequences"] == PROMISED
        and float(str(row["p50_us"])) > BOUND_US
    ]
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
