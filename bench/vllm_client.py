"""vLLM's own load client against two servers in turns: what one is of the other, at several concurrencies.

A figure from another's client cannot have been tuned by us. Both servers run already, with the same weights;
each round draws new random prompts, the same for both, so that no prefix cache helps either. Needs a vLLM
installation (for its client) and a folder with the model's tokenizer.

    python -m bench.vllm_client --vllm PATH/bin/vllm --tokenizer FOLDER --url http://127.0.0.1:8000 \\
        --versus http://127.0.0.1:8100 [--concurrency 1,8,16,64] [--alternations 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bench import output
from bench.load.probe import read_bandwidth
from bench.load.report import write_json
from bench.load.versus import compare, table

# Keys of the client's result file, and what they are called here.
KEYS = {
    "output_throughput": "output tokens/s",
    "request_throughput": "requests/s",
    "mean_ttft_ms": "TTFT mean ms",
    "median_ttft_ms": "TTFT p50 ms",
    "p99_ttft_ms": "TTFT p99 ms",
    "mean_tpot_ms": "TPOT mean ms",
    "median_itl_ms": "ITL p50 ms",
    "p99_itl_ms": "ITL p99 ms",
}


class Failed(Exception):
    """The client or some of its requests failed; the message has its last words."""


def figures(result: Mapping[str, Any], wanted: int) -> dict[str, float]:
    """The client's result under our names.

    Raises:
        Failed: fewer than `wanted` requests were completed.
    """
    if (completed := int(result["completed"])) != wanted:
        raise Failed(f"{completed} of {wanted} requests were completed; look at the server's log")
    return {ours: float(result[theirs]) for theirs, ours in KEYS.items()}


def run(options: argparse.Namespace, url: str, concurrency: int, seed: int) -> dict[str, float]:
    """One measurement of one server.

    Raises:
        Failed: see `figures`.
    """
    count = max(options.least, concurrency * options.waves)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(str(options.vllm), "bench", "serve", "--base-url", url, "--model", options.model),
            *("--tokenizer", str(options.tokenizer), "--dataset-name", "random", "--ignore-eos"),
            *("--random-input-len", str(options.input), "--random-output-len", str(options.output)),
            *("--num-prompts", str(count), "--max-concurrency", str(concurrency)),
            *("--seed", str(seed), "--save-result", "--result-dir", folder),
            *("--result-filename", "result.json"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
        result = Path(folder) / "result.json"
        if done.returncode or not result.exists():
            raise Failed(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
        return figures(json.loads(result.read_text()), count)


def _program(text: str) -> Path:
    if (found := shutil.which(text)) is None:
        raise argparse.ArgumentTypeError(f"{text} is not a program that can be run")
    return Path(found)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.vllm_client",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--vllm", type=_program, required=True, help="the vllm program")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with tokenizer.json")
    parser.add_argument("--model", default="smollm2", help="the model's name at both servers")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="A")
    parser.add_argument("--versus", required=True, metavar="URL", help="B")
    parser.add_argument(
        "--concurrency", default="1,8,16,64", help="requests at once, one table each"
    )
    parser.add_argument("--alternations", type=int, default=3, help="rounds of A then B")
    parser.add_argument("--input", type=int, default=256, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of each answer")
    parser.add_argument("--waves", type=int, default=2, help="requests per place at once")
    parser.add_argument("--least", type=int, default=8, help="fewest requests of a measurement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=output.file, help="write all figures to this file")
    options = parser.parse_args()
    levels = [int(part) for part in options.concurrency.split(",")]
    content: dict[str, Any] = {}
    try:
        with tqdm(total=len(levels) * options.alternations * 2, unit="run") as bar:
            for level in levels:
                sides: tuple[list[dict[str, float]], ...] = ([], [])
                probes = [read_bandwidth()]
                for turn in range(options.alternations):
                    seed = options.seed + 1000 * level + turn
                    for side, url in zip(sides, (options.url, options.versus), strict=True):
                        bar.set_description(f"{level} at once, {url}")
                        side.append(run(options, url, level, seed))
                        bar.update()
                    probes.append(read_bandwidth())
                rows = compare(*sides)
                content[str(level)] = {"rows": [asdict(row) for row in rows], "GB/s": probes}
                if options.json:
                    write_json(options.json, content)
                shown = " ".join(f"{probe:.0f}" for probe in probes)
                bar.write(f"\n{level} at once; memory read at {shown} GB/s between the rounds")
                bar.write(table(rows, (options.url, options.versus)))
    except Failed as error:
        sys.exit(f"bench.vllm_client: {error}")


if __name__ == "__main__":
    main()
