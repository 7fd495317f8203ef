"""One stream of the native step against llama.cpp, on the same GGUF file: tokens a second, and prompt time.

Each is a process of its own that holds the model and is asked in turns for a prompt of so many tokens and so
many greedy tokens behind it, both with the same threads. llama.cpp comes as llama-cpp-python, in this
environment or in another one whose interpreter is named.

    python -m bench.llama [--peer-python VENV/bin/python] [--model NAME] [--weights auto,plain] [--prompt 256]
        [--new 128] [--rounds 5] [--threads 2] [--csv FILE]

The native step is driven as the executor does, one plan a step; nothing of scheduler, memd and HTTP is in it,
and nothing of llama.cpp's server is.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from bench import output

# Runs where llama_cpp is: writes some prose as tokens, then answers each {"prompt": [...], "new": n} with
# {"prompt_s", "decode_s", "tokens"}, all as lines of JSON.
_PEER = """
import json, pydoc_data.topics, sys, time
try:
    import llama_cpp
except ImportError as error:
    sys.exit(f"{sys.executable} cannot import llama_cpp ({error}): install llama-cpp-python there, or give "
             "--peer-python a Python that has it")
path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = llama_cpp.Llama(path, n_ctx=context, n_threads=threads, n_threads_batch=threads, n_batch=512,
                        verbose=False)
text = "\\n".join(pydoc_data.topics.topics.values()).encode()
print(json.dumps({"version": llama_cpp.__version__, "system": llama_cpp.llama_print_system_info().decode(),
                  "text": model.tokenize(text, add_bos=False)}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    model.reset()
    began = time.perf_counter()
    model.eval(asked["prompt"])
    token = model.sample(temp=0.0, repeat_penalty=1.0)
    first = time.perf_counter()
    tokens = [token]
    for _ in range(asked["new"] - 1):
        model.eval([token])
        token = model.sample(temp=0.0, repeat_penalty=1.0)
        tokens.append(token)
    ended = time.perf_counter()
    print(json.dumps({"prompt_s": first - began, "decode_s": ended - first, "tokens": tokens}), flush=True)
"""
BLOCK = 16


class CannotCompare(Exception):
    """Why, in one line."""


@dataclass(slots=True)
class Side:
    """One process and what was measured of it."""

    name: str
    process: subprocess.Popen[str]
    tokens_per_s: list[float] = field(default_factory=list)
    prompt_ms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)  # of the last round

    def hello(self) -> dict[str, Any]:
        """What it says once it is ready.

        Raises:
            CannotCompare: it ended instead.
        """
        return self._read()

    def measure(self, prompt: Sequence[int], new: int) -> None:
        """One round.

        Raises:
            CannotCompare: the process ended.
        """
        to = self._pipe(self.process.stdin)
        try:
            to.write(json.dumps({"prompt": list(prompt), "new": new}) + "\n")
            to.flush()
        except BrokenPipeError:
            pass  # what it said last is more to the point
        found = self._read()
        self.tokens_per_s.append((new - 1) / found["decode_s"])
        self.prompt_ms.append(found["prompt_s"] * 1e3)
        self.tokens = found["tokens"]

    def close(self) -> None:
        """End the process."""
        self._pipe(self.process.stdin).close()
        self.process.wait(30)

    def _read(self) -> dict[str, Any]:
        line = self._pipe(self.process.stdout).readline()
        if not line:
            self.process.wait(30)
            raise CannotCompare(f"{self.name} ended with status {self.process.returncode}")
        found: dict[str, Any] = json.loads(line)
        return found

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        if pipe is None:
            raise CannotCompare("a process without a pipe")
        return pipe


def spawn(name: str, command: Sequence[str]) -> Side:
    """Start a side."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"} if name != "llama.cpp" else None
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    return Side(name, process)


def serve(model: str, weights: str, threads: int, context: int) -> int:
    """The native side: as `_PEER`, in this process."""
    import torch

    from executor.load import load_model
    from executor.native import NativeRunner, choose_weights, why_not
    from executor.plan import Draw, Plan, Row
    from wire.sampling import Sampling

    torch.set_num_threads(threads)
    loaded = load_model(model, dtype="bfloat16", device="cpu", on_progress=lambda what, share: None)
    if reason := why_not(loaded, torch.bfloat16):
        print(reason, file=sys.stderr)
        return 1
    held = choose_weights(weights, loaded, torch.bfloat16)  # type: ignore[arg-type]
    blocks = -(-context // BLOCK)
    runner = NativeRunner(
        loaded,
        num_blocks=blocks + 1,
        block_size=BLOCK,
        device="cpu",
        dtype=torch.bfloat16,
        threads=threads,
        weights=held,
    )
    greedy = Sampling(seed=0, temperature=0)
    table = random.Random(0).sample(range(1, blocks + 1), blocks)

    def step(start: int, part: list[int]) -> int:
        end = start + len(part)
        draw = Draw(0, 0, end, greedy, (), ())
        return runner.run(Plan(0, [Row(0, start, part, table[: -(-end // BLOCK)], (draw,))]))[
            0
        ].token

    print(json.dumps({"weights": held}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        tokens = [step(0, asked["prompt"])]
        first = time.perf_counter()
        for position in range(len(asked["prompt"]), len(asked["prompt"]) + asked["new"] - 1):
            tokens.append(step(position, tokens[-1:]))
        ended = time.perf_counter()
        print(
            json.dumps({"prompt_s": first - began, "decode_s": ended - first, "tokens": tokens}),
            flush=True,
        )
    return 0


def main() -> int:
    """Exit status 1, with a line that says why, when there is nothing to compare."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.llama",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="smollm2", help="a .gguf file, or the default model")
    parser.add_argument(
        "--peer-python", default=sys.executable, help="where llama_cpp is installed"
    )
    parser.add_argument("--weights", default="auto", help="of ours; several: auto,plain")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--new", type=int, default=128, help="tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--csv", type=output.file)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.new < 2:
        parser.error("--new must be at least 2: the first token belongs to the prompt")
    context = args.prompt + args.new + 1
    if args.serve:
        return serve(args.model, args.weights, args.threads, context)
    from executor.load import find
    from executor.weights import BadModel

    try:
        path = find(args.model)
    except BadModel as error:
        sys.exit(str(error))
    if path.suffix != ".gguf":
        sys.exit(f"{path} is not a GGUF file, which is what llama.cpp reads")
    peer = [args.peer_python, "-c", _PEER, str(path), str(args.threads), str(context)]
    ours = [
        (f"pagekeeper {weights}", [*_again(args), "--weights", weights])
        for weights in args.weights.split(",")
    ]
    sides: list[Side] = []
    try:
        text: list[int] = []
        for name, command in [("llama.cpp", peer), *ours]:
            sides.append(spawn(name, command))
            hello = sides[-1].hello()
            text = hello.pop("text", text)
            print(f"{name}: {hello}")
        compare(sides, text, args)
    except CannotCompare as error:
        print(f"nothing to compare: {error}", file=sys.stderr)
        return 1
    finally:
        for side in sides:
            side.close()
    report(sides, args.csv)
    return 0


def _again(args: argparse.Namespace) -> list[str]:
    """This program as the native side."""
    sizes = [f"--{name}={getattr(args, name)}" for name in ("model", "threads", "prompt", "new")]
    return [sys.executable, "-m", "bench.llama", "--serve", *sizes]


def compare(sides: Sequence[Side], text: Sequence[int], args: argparse.Namespace) -> None:
    """Rounds in turns, behind one that does not count; each with another piece of the text."""
    rng = random.Random(0)
    for number in tqdm(range(-1, args.rounds), desc="rounds", disable=None):
        start = rng.randrange(len(text) - args.prompt)
        prompt = text[start : start + args.prompt]
        for side in sides:
            side.measure(prompt, args.new)
            if number < 0:
                side.tokens_per_s.clear()
                side.prompt_ms.clear()


def report(sides: Sequence[Side], path: Path | None) -> None:
    """Medians, spreads and ratios to the first side."""
    first = sides[0]
    print(f"{'':22}{'tokens/s':>24}{'ratio':>8}{'prompt ms':>26}{'ratio':>8}{'same tokens':>13}")
    rows = []
    for side in sides:
        rate, prompt = statistics.median(side.tokens_per_s), statistics.median(side.prompt_ms)
        faster = rate / statistics.median(first.tokens_per_s)
        sooner = statistics.median(first.prompt_ms) / prompt
        same = sum(a == b for a, b in zip(side.tokens, first.tokens, strict=True))
        print(
            f"{side.name:22}{rate:>10.1f} ({min(side.tokens_per_s):.0f}-{max(side.tokens_per_s):.0f})".ljust(
                46
            )
            + f"{faster:>8.2f}{prompt:>12.0f} ({min(side.prompt_ms):.0f}-{max(side.prompt_ms):.0f})".ljust(
                34
            )
            + f"{sooner:>8.2f}{same:>8} of {len(first.tokens)}"
        )
        rows.append(
            {"runner": side.name, "tokens_per_s": f"{rate:.2f}", "prompt_ms": f"{prompt:.1f}"}
        )
    if path is not None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
