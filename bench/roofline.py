"""How near a running server's decode steps come to what this machine allows: its bandwidth and peak rate.

In every round memory bandwidth and the peak rate of products are probed on all threads, then the server
decodes N streams at once, read by a client that takes next to nothing of the same CPUs, and if wished the
same step runs alone in this process. The least time of a step is that of its products, or of reading the
weights if that takes longer, and that of reading K and V (Williams et al., CACM 2009, one roof after the
other). The server must hold its weights as bfloat16.

    pagekeeper up --weights plain
    python -m bench.roofline [--url http://127.0.0.1:8000] [--streams 1,8,16,64] [--rounds 3] [--alone]
"""

from __future__ import annotations

import argparse
import ctypes
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from statistics import median

import uvloop
from tqdm import tqdm

from bench.load import lean, workloads
from bench.load.client import Client, ServerProblem
from bench.load.plan import vocabulary_of
from bench.load.probe import read_bandwidth
from bench.load.records import Record
from executor.gguf import GgufFile, read_json
from executor.load import DEFAULT_MODEL, find
from executor.models.config import ModelConfig
from executor.weights import BadModel
from kernels.cpu.build import FLAGS, Unavailable, best_variant, compiler

SOURCE = Path(__file__).with_name("peak.cpp")
BYTES = 2  # of a bfloat16
PROBE_S = 0.3
MOST_SHARE = 1.25  # a neighbour may leave just when bandwidth has been probed


@dataclass(frozen=True, slots=True)
class Work:
    """What a decode step must at least do: weights that are multiplied, and K and V of one position."""

    weights: int  # numbers
    kv: int  # numbers of one position of one sequence

    @classmethod
    def of(cls, config: ModelConfig) -> Work:
        """Of a dense model: every linear layer, and the head."""
        width = config.head_dim * (2 * config.heads + 2 * config.kv_heads)
        layer = config.hidden * width + 3 * config.hidden * config.intermediate
        return cls(
            config.layers * layer + config.hidden * config.vocab_size,
            config.layers * 2 * config.kv_heads * config.head_dim,
        )

    def least(self, streams: int, context: float, bandwidth: float, peak: float) -> float:
        """Seconds of a step of `streams` sequences of `context` positions.

        Args:
            bandwidth: bytes a second.
            peak: FLOP/s.
        """
        products = max(2 * self.weights * streams / peak, self.weights * BYTES / bandwidth)
        return products + streams * context * self.kv * BYTES / bandwidth


@dataclass(slots=True)
class Level:
    """One number of streams, and what was measured of it: an entry a round, seconds."""

    streams: int
    least: list[float] = field(default_factory=list)
    served: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)


def step_time(records: Sequence[Record]) -> tuple[float, float]:
    """Mean seconds of a step while every stream decodes, and the context of that time's middle, in positions.

    Raises:
        ServerProblem: they never decoded all at once, or one failed.
    """
    if failed := [record for record in records if not record.ok]:
        raise ServerProblem(f"{len(failed)} requests failed: {failed[0].error} {failed[0].message}")
    began = max(record.arrivals[0] for record in records)
    ended = min(record.arrivals[-1] for record in records)
    inside = [[at for at in record.arrivals if began < at <= ended] for record in records]
    steps = sum(map(len, inside)) / len(records)
    if steps < 8:
        raise ServerProblem(
            f"all streams ran at once for {steps:.0f} steps, at least 8 are needed: the first answer ended "
            "when the last prompt was hardly through; raise --output, or lower --input"
        )
    before = [
        record.prompt_tokens + len(record.arrivals) - sum(at > began for at in record.arrivals)
        for record in records
    ]
    return (ended - began) / steps, sum(before) / len(records) + steps / 2


class Peak:
    """Measures FLOP/s of bfloat16 products, or of whatever the native step has instead on this CPU.

    Raises:
        Unavailable: it cannot be built here.
    """

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            target = str(Path(folder) / "peak.so")
            command = [*compiler(), *FLAGS, *best_variant().flags, str(SOURCE), "-o", target]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace")
            if done.returncode:
                raise Unavailable(f"{command[0]} failed on {SOURCE.name}: {done.stderr[-500:]}")
            self._run = ctypes.CDLL(target).peak
        self._run.restype, self._run.argtypes = ctypes.c_double, [ctypes.c_double]

    def rate(self, threads: int) -> float:
        """Of `threads` threads together."""
        with ThreadPoolExecutor(threads) as pool:
            return float(sum(pool.map(self._run, [PROBE_S] * threads)))


def shape(model: str) -> ModelConfig:
    """Of a model's folder, file or short name."""
    path = find(model)
    if path.is_file():
        return GgufFile(path).config()
    return ModelConfig.from_json(read_json(path / "config.json"))


async def measure(options: argparse.Namespace) -> list[Level]:
    """All rounds.

    Raises:
        ServerProblem: the server cannot be measured.
        Unavailable: there is no compiler for the probe.
        BadModel: there is no such model.
    """
    probe = Peak()
    work = Work.of(shape(options.model))
    levels = [Level(int(part)) for part in options.streams.split(",")]
    alone = Alone(options, levels) if options.alone else None
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(Client(options.url))
        await client.connect()
        vocabulary = await vocabulary_of([client], None)
        bar = stack.enter_context(tqdm(total=options.rounds * len(levels), unit="run"))
        for turn in range(options.rounds):
            for level in levels:
                bandwidth = read_bandwidth(options.threads) * 1e9
                rate = probe.rate(options.threads)
                seed = options.seed + 1000 * turn + level.streams
                requests = workloads.fixed(vocabulary, options.input, options.output, seed)
                records = await lean.at_once(client, list(islice(requests, level.streams)))
                served, context = step_time(records)
                level.served.append(served)
                level.least.append(work.least(level.streams, context, bandwidth, rate))
                if alone is not None:
                    level.alone.append(alone.step(level, int(context)))
                bar.set_postfix_str(f"{bandwidth / 1e9:.0f} GB/s, {rate / 1e9:.0f} GFLOP/s")
                bar.update()
    return levels


class Alone:
    """The native step in this process, without a server."""

    def __init__(self, options: argparse.Namespace, levels: Sequence[Level]) -> None:
        from bench.kernels import cpu_step

        self._bench = cpu_step
        most = max(level.streams for level in levels) * (options.input + options.output)
        self._blocks = 2 + most // cpu_step.BLOCK * 2
        made = cpu_step.runners(options.model, self._blocks, "native", ["plain"])
        self._runner = made["native"]
        self._rng = random.Random(options.seed)

    def step(self, level: Level, context: int) -> float:
        """Median seconds of a step."""
        plan = self._bench.decode_plan(level.streams, context, self._blocks, self._rng)
        return self._bench.timed(lambda: self._runner.run(plan)) / 1e3


def table(levels: Sequence[Level]) -> str:
    """Medians, ms, and what share of the time the machine needed at least."""
    alone = f"{'alone ms':>10}{'share':>8}" if levels[0].alone else ""
    lines = [f"{'streams':>8}{'least ms':>10}{'served ms':>11}{'share':>8}{alone}"]
    for level in levels:
        line = f"{level.streams:>8}{median(level.least) * 1e3:>10.1f}"
        line += f"{median(level.served) * 1e3:>11.1f}"
        line += f"{share(level.least, level.served):>8.0%}"
        if level.alone:
            line += f"{median(level.alone) * 1e3:>10.1f}{share(level.least, level.alone):>8.0%}"
        lines.append(line)
    return "\n".join(lines)


def share(least: Sequence[float], took: Sequence[float]) -> float:
    """The median of the rounds' own shares."""
    return median(a / b for a, b in zip(least, took, strict=True))


def impossible(levels: Sequence[Level]) -> bool:
    """Whether a step took much less time than its work needs: then the server does other work."""
    return any(share(level.least, level.served) > MOST_SHARE for level in levels)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.roofline",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="what the server serves")
    parser.add_argument("--streams", default="1,8,16,64", help="that decode together")
    parser.add_argument("--input", type=int, default=224, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=192, help="tokens of each answer")
    parser.add_argument("--rounds", type=int, default=3, help="of all of them")
    parser.add_argument("--threads", type=int, default=2, help="the server computes on")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--alone", action="store_true", help="measure the step in this process too")
    try:
        levels = uvloop.run(measure(parser.parse_args()))
        print(table(levels))
        if impossible(levels):
            raise ServerProblem(
                "faster than bfloat16 weights can be read: the server holds others; start it with "
                "--weights plain, and give its model as --model"
            )
    except (ServerProblem, Unavailable, BadModel) as problem:
        print(f"bench.roofline: {problem}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
