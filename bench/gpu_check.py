"""What only a GPU can tell, in one command of a few minutes: are the numbers right, and how fast is it?

Sections run one after the other; one that fails does not stop those after it. What was found is written as
JSON after each, and shown as tables, which stand beside it in a file of the same name. The exit status is
1 when a section failed: wrong numbers or tokens, or an error. A speed below its goal is shown, and fails
nothing.

    python -m bench.gpu_check [--out gpu_check.json] [--only numerics,decode] [--interpret]

`--interpret` runs all of it, much reduced, on a CPU in Triton's interpreter: the times mean nothing there,
but what is spent on a GPU afterwards is known to work.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench import output

Progress = Callable[[float], None]
Section = Callable[[Progress], Any]

# What docs/kernels.md promises.
LARGE = ("decode, 64 x 2048", "decode, 256 x")  # the batches it is promised for
DECODE_GOAL = 0.85  # least share of peak bandwidth in decode
OVERHEAD_GOAL = 0.05  # most time more than torch's attention on contiguous K and V takes
MEMD_GOAL = 0.01  # share of a step


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0 when every section passed, 1 when one failed, 2 when there is nothing to run on."""
    parser = argparse.ArgumentParser(
        description="Check kernels and executor on a GPU.", allow_abbrev=False
    )
    parser.add_argument("--interpret", action="store_true", help="reduced, on a CPU, no GPU needed")
    parser.add_argument(
        "--out",
        type=output.file,
        default=Path("gpu_check.json"),
        help="JSON to write; the tables go beside it, as .txt (default gpu_check.json)",
    )
    parser.add_argument("--only", default="", help="sections to run, separated by commas")
    given = parser.parse_args(argv)
    if given.interpret:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported

    import torch

    from bench.gpu.setting import Setting
    from executor.device import why_no_gpu

    if not given.interpret and (reason := why_no_gpu()):
        print(f"gpu_check: {reason}; --interpret runs it on a CPU", file=sys.stderr)
        return 2
    setting = Setting(torch.device("cpu" if given.interpret else "cuda"), given.interpret)
    sections = _sections(setting)
    wanted = [name for name in given.only.split(",") if name] or list(sections)
    if unknown := [name for name in wanted if name not in sections]:
        parser.error(f"--only {unknown[0]}: sections are {', '.join(sections)}")
    report: dict[str, Any] = {"interpreted": given.interpret, "sections": {}}
    tables = given.out.with_suffix(".txt")
    shown = ""
    for name in wanted:
        outcome = report["sections"][name] = _run(name, sections[name])
        if not given.interpret:  # where times mean nothing
            outcome["goals"] = _goals(name, outcome)
        text = _shown(name, outcome)
        print(text, flush=True)
        shown += text + "\n"
        given.out.write_text(json.dumps(report, indent=1))
        tables.write_text(shown)
    failed = [name for name in wanted if report["sections"][name]["status"] == "failed"]
    verdict = f"FAILED: {', '.join(failed)}" if failed else "all passed"
    print(f"wrote {given.out} and {tables}: {verdict}")
    tables.write_text(f"{shown}\n{verdict}\n")
    return 1 if failed else 0


def _sections(setting: Any) -> dict[str, Section]:
    from bench.gpu import model, numerics, speed, steps
    from bench.gpu import setting as device

    peaks = device.peaks(setting)
    return {
        "device": lambda progress: _device(setting, peaks),
        "numerics": lambda progress: numerics.check(setting, progress),
        "tokens": lambda progress: model.tokens(setting, progress),
        "decode": lambda progress: speed.decodes(setting, peaks, progress),
        "prefill": lambda progress: speed.prefills(setting, peaks, progress),
        "moves": lambda progress: speed.moves(setting, peaks, progress),
        "graphs": lambda progress: steps.graphs(setting, peaks, progress),
        "memd": lambda progress: steps.memd(setting, progress),
    }


def _device(setting: Any, peaks: Any) -> dict[str, Any]:
    import platform

    import torch
    import triton

    from bench.gpu.setting import measured_peaks

    reached = measured_peaks(setting)
    name, memory, driver = platform.processor() or platform.machine(), None, None
    if setting.device.type == "cuda":
        properties = torch.cuda.get_device_properties(setting.device)
        name, memory = properties.name, properties.total_memory
        driver = f"compute capability {properties.major}.{properties.minor}"
    return {
        "name": name,
        "what": driver,
        "memory GiB": memory and memory / 2**30,
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "triton": triton.__version__,
        "peaks from": peaks.source,
        "peak GB/s": peaks.bandwidth / 1e9,
        "peak TFLOP/s": peaks.flops / 1e12,
        "a copy GB/s": reached.bandwidth / 1e9,
        "a product TFLOP/s": reached.flops / 1e12,
    }


def _run(name: str, section: Section) -> dict[str, Any]:
    """One section, whatever becomes of it."""
    from tqdm import tqdm

    started = time.perf_counter()
    with tqdm(
        total=100, desc=f"{name:10}", leave=False, disable=None, bar_format="{desc} {bar} {elapsed}"
    ) as bar:

        def progress(share: float) -> None:
            bar.update(round(100 * share) - bar.n)

        try:
            found = section(progress)
        except Exception as error:
            story = traceback.format_exc(limit=-6)
            found = {"failures": [f"{type(error).__name__}: {error}"[:2000]], "traceback": story}
    failures = found.get("failures", []) if isinstance(found, dict) else []
    return {
        "status": "failed" if failures else "passed",
        "seconds": round(time.perf_counter() - started, 1),
        "found": found,
        "goals": [],
    }


def _goals(name: str, outcome: dict[str, Any]) -> list[str]:
    """In words, which goals were met and which missed."""
    found = outcome["found"]
    if outcome["status"] == "failed":
        return []
    if name == "decode":
        goals = []
        for row in found:
            if row["shape"].startswith(LARGE):
                share = row["of bandwidth"]
                goals.append(_goal(f"{row['shape']}: of bandwidth", share, DECODE_GOAL, above=True))
                if row["over torch"] is not None and "bfloat16" in row["shape"]:
                    over = row["over torch"]
                    goals.append(_goal(f"{row['shape']}: over torch", over, OVERHEAD_GOAL))
        return goals
    if name == "memd":
        return [_goal("memd's share", found["memd's share"], MEMD_GOAL)]
    return []


def _goal(what: str, value: float, goal: float, *, above: bool = False) -> str:
    met = value >= goal if above else value <= goal
    word = "at least" if above else "at most"
    return f"{'met' if met else 'MISSED'}: {what} {value:.1%}, goal {word} {goal:.0%}"


def _shown(name: str, outcome: dict[str, Any]) -> str:
    """A section for people."""
    lines = [f"\n== {name}: {outcome['status']} in {outcome['seconds']} s"]
    found = outcome["found"]
    if isinstance(found, list):
        lines += _table(found)
    else:
        for key, value in found.items():
            if isinstance(value, dict):
                lines += [f"  {key}", *(f"    {inner:24} {_cell(v)}" for inner, v in value.items())]
            elif isinstance(value, list):
                lines += [f"  {key}: {item}" for item in value]
            elif value is not None:
                lines.append(f"  {key:26} {_cell(value)}")
    return "\n".join(lines + [f"  {goal}" for goal in outcome["goals"]])


def _table(rows: list[dict[str, Any]]) -> list[str]:
    names = list(rows[0]) if rows else []
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(names))]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in cells
    ]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(inner)}" for key, inner in value.items())
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
