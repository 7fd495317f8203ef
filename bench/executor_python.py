"""How much CPU time the executor of a running server spends in Python, per step.

N streams decode at once, read by a client that takes next to nothing of the same CPUs. Meanwhile `perf` looks
a thousand times a second at what the executor's threads do; all that is in the interpreter itself counts as
Python, whoever called it. That is where it runs, with caches that hold weights and little else, so it is
several times what the same code takes by itself (`bench.step_loop`).

    pagekeeper up --weights plain
    python -m bench.executor_python [--url http://127.0.0.1:8000] [--streams 64] [--rounds 5] [--seconds 30]
"""

from __future__ import annotations

import argparse
import asyncio
import math
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import uvloop
from tqdm import tqdm

from bench.load import lean, workloads
from bench.load.client import Client, ServerProblem
from bench.load.plan import vocabulary_of
from bench.load.processes import behind
from bench.load.records import Record

HERTZ = 997  # in no step with anything that happens so many times a second
INTERPRETER = re.compile(r"libpython|/python3?[0-9.]*$")
SAMPLE = re.compile(
    r"\s([0-9.]+):\s+[0-9a-f]+ .*\(([^()]*)\)\s*$"
)  # its time, and the file of the code


@dataclass(frozen=True, slots=True)
class Round:
    """Samples per file of code while `steps` steps ran."""

    steps: float
    files: Counter[str]

    def ms(self, samples: int) -> float:
        """CPU time a step."""
        return samples / HERTZ * 1000 / self.steps

    @property
    def python(self) -> int:
        """Samples in the interpreter."""
        return sum(count for file, count in self.files.items() if INTERPRETER.search(file))


def executor(url: str) -> int:
    """The process of the server's only executor.

    Raises:
        ServerProblem: it cannot be told.
    """
    processes = behind(urlsplit(url).port or 80)
    found: list[int] = [
        process.pid for process in processes if process.cmdline()[1:3] == ["-m", "executor"]
    ]
    if len(found) != 1:
        raise ServerProblem(f"{len(found)} executors are behind {url}: name one with --pid")
    return found[0]


async def sample(pid: int, seconds: float, folder: Path) -> tuple[float, Counter[str]]:
    """Samples of a process by file of code, and the seconds from the first to the last.

    Raises:
        ServerProblem: perf may not, or there were none.
    """
    data = str(folder / "perf.data")
    look = ["-F", str(HERTZ), "-p", str(pid), "-o", data, "--", "sleep", str(seconds)]
    await _output("perf", "record", "-q", *look)
    text = await _output("perf", "script", "-i", data, "-F", "time,ip,sym,dso")
    found = [match for line in text.splitlines() if (match := SAMPLE.search(" " + line))]
    if len(found) < 2:
        raise ServerProblem(f"perf saw nothing of process {pid}: is it the executor?")
    return float(found[-1][1]) - float(found[0][1]), Counter(match[2] for match in found)


async def _output(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, error = await process.communicate()
    if process.returncode:
        raise ServerProblem(f"{' '.join(command[:2])} failed: {error.decode()[-300:].strip()}")
    return out.decode(errors="replace")


async def measure(options: argparse.Namespace, pid: int) -> list[Round]:
    """
    Raises:
        ServerProblem: the server or perf cannot be used, or an answer ended too early.
    """
    rounds = []
    async with Client(options.url) as client:
        await client.connect()
        vocabulary = await vocabulary_of([client], None)
        for turn in tqdm(range(options.rounds), unit="round", disable=None):
            requests = workloads.fixed(vocabulary, options.input, options.output, turn + 1)
            reading = asyncio.create_task(
                lean.at_once(client, list(islice(requests, options.streams)))
            )
            await asyncio.sleep(options.warm)
            began = time.perf_counter()
            with tempfile.TemporaryDirectory() as folder:
                seconds, files = await sample(pid, options.seconds, Path(folder))
            records: list[Record] = await reading
            ended = began + seconds
            if min(record.ended for record in records) < ended:
                raise ServerProblem("an answer ended while perf looked: raise --output")
            if any(record.arrivals[0] > began for record in records):
                raise ServerProblem("not all streams had begun when perf looked: raise --warm")
            tokens = sum(began <= at < ended for record in records for at in record.arrivals)
            rounds.append(Round(tokens / options.streams, files))
    return rounds


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--pid", type=int, help="of the executor (default: the only one here)")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30, help="of a round (%(default)s)")
    parser.add_argument("--warm", type=float, default=20, help="seconds before it (%(default)s)")
    parser.add_argument("--input", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=400, help="tokens of an answer")
    options = parser.parse_args(argv)
    if shutil.which("perf") is None:
        sys.exit("this needs Linux's `perf`: install linux-perf (Debian) or linux-tools (Ubuntu)")
    try:
        pid = options.pid or executor(options.url)
        rounds = uvloop.run(measure(options, pid))
    except ServerProblem as problem:
        sys.exit(str(problem))
    for each in rounds:
        python, error = each.ms(each.python), each.ms(1) * math.sqrt(each.python)
        print(f"{each.steps:6.0f} steps  Python {python:.2f} ms a step, +- {error:.2f}")
    print(f"median {median(each.ms(each.python) for each in rounds):.2f} ms")
    files = sum((each.files for each in rounds), Counter[str]())
    steps = sum(each.steps for each in rounds)
    for file, count in files.most_common(12):
        print(f"{count / HERTZ * 1000 / steps:8.3f} ms  {file.rsplit('/', 1)[-1]}")


if __name__ == "__main__":
    main()
