"""Compile every launch of every kernel for real devices, without one, and look at what it takes.

    python -m kernels.aot [--targets sm_80,sm_90,sm_100,gfx942] [--spread] [--jobs 2] [--markdown]
        [--json FILE]

Each kernel module's `launches(target)` yields the specialisations a runner would launch there. They are
compiled by Triton down to machine code; shared memory and registers are read from that and checked against
what the device has. The exit status is 1 when one does not compile or takes more.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import pkgutil
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import kernels
from kernels.launch import Launch

_KIB = 1024
_FEW = 16
_TENSOR_MEMORY = 512  # columns, where a device has it (sm_100)


@dataclass(frozen=True, slots=True)
class Target:
    """A kind of device and what one program may take of it."""

    name: str  # as `kernels.launch.architecture` names it
    device: str  # one that people have
    backend: str  # as Triton names it
    arch: int | str
    warp: int  # threads
    shared: int  # bytes
    registers: int  # of a thread
    register_file: int  # of all threads together


# Sources: CUDA C++ Programming Guide, table of compute capabilities; AMD CDNA 3 ISA guide, where 512 vector
# registers are general and accumulation ones together.
TARGETS = (
    Target("sm_80", "A100", "cuda", 80, 32, 163 * _KIB, 255, 64 * _KIB),
    Target("sm_90", "H100, H200", "cuda", 90, 32, 227 * _KIB, 255, 64 * _KIB),
    Target("sm_100", "B200", "cuda", 100, 32, 227 * _KIB, 255, 64 * _KIB),
    Target("gfx942", "MI300X", "hip", "gfx942", 64, 64 * _KIB, 512, 128 * _KIB),
)


@dataclass(slots=True)
class Result:
    """One launch compiled for one target."""

    target: str
    kernel: str
    note: str
    shared: int = 0  # bytes
    registers: int = 0  # of a thread
    spills: int = 0  # bytes of a thread that did not fit into registers
    seconds: float = 0.0  # of processors
    problem: str = ""  # why it cannot run there; empty: it can


class Unfit(Exception):
    """Why nothing can be compiled here, and what to do."""


def modules() -> list[str]:
    """Names of the modules of this package that launch kernels."""
    names = [info.name for info in pkgutil.iter_modules(kernels.__path__) if not info.ispkg]
    loaded = (importlib.import_module(f"kernels.{name}") for name in names if name != "aot")
    return [module.__name__ for module in loaded if hasattr(module, "launches")]


@lru_cache
def launches(module: str, target: str) -> tuple[Launch, ...]:
    """What `module` launches on `target`, none twice, in a fixed order."""
    unique: dict[str, Launch] = {}
    for launch in importlib.import_module(module).launches(target):
        unique.setdefault(launch.key, launch)
    return tuple(unique.values())


@dataclass(frozen=True, slots=True)
class Job:
    """Launch `index` of those `module` makes on `target`. Travels to another process; a launch cannot."""

    module: str
    index: int
    target: Target

    def result(self) -> Result:
        launch = launches(self.module, self.target.name)[self.index]
        return Result(self.target.name, launch.name, launch.note)


def work(targets: Sequence[Target], spread: bool) -> list[Job]:
    """All launches on all targets; or, to `spread` them, each on one target or another.

    A module of few launches, which are quick to compile, is not spread.
    """
    jobs: list[Job] = []
    for target in targets:
        for module in modules():
            every = launches(module, target.name)
            of_kernel: Counter[str] = Counter()
            for index, launch in enumerate(every):
                turn = of_kernel[launch.name]
                of_kernel[launch.name] += 1
                # Shifted by one after each round: launches often come in pairs, and all targets meet both.
                chosen = targets[(turn + turn // len(targets)) % len(targets)]
                if not spread or len(every) < _FEW or chosen == target:
                    jobs.append(Job(module, index, target))
    return jobs


def compile_one(job: Job) -> Result:
    """Compile a launch; never raises for what is wrong with the kernel."""
    from triton import compile as triton_compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    target, result = job.target, job.result()
    launch = launches(job.module, target.name)[job.index]
    parameters = launch.function.arg_names
    began = _processor_seconds()
    try:
        compiled = triton_compile(
            ASTSource(
                launch.function,
                {name: launch.signature.get(name, "constexpr") for name in parameters},
                dict(launch.constants),
                {
                    (parameters.index(name),): [["tt.divisibility", 16]]
                    for name in sorted(launch.aligned)
                },
            ),
            target=GPUTarget(target.backend, target.arch, target.warp),
            options={"num_warps": launch.num_warps, "num_stages": launch.num_stages},
        )
    except Exception as error:  # Triton raises many kinds; all mean that this launch fails there
        result.problem = f"does not compile: {type(error).__name__}: {_first_lines(str(error))}"
        return result
    result.seconds = _processor_seconds() - began
    result.shared = int(compiled.metadata.shared)
    read = _amd_resources if target.backend == "hip" else _nvidia_resources
    result.registers, result.spills = read(compiled.asm)
    result.problem = excess(result, launch.num_warps, target)
    if (columns := getattr(compiled.metadata, "tmem_size", 0)) > _TENSOR_MEMORY:
        result.problem = f"takes {columns} columns of tensor memory; there are {_TENSOR_MEMORY}"
    return result


def _processor_seconds() -> float:
    """Of this process and of what it started and waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def excess(result: Result, num_warps: int, target: Target) -> str:
    """Which limit of the target a launch passes; empty: none."""
    threads = num_warps * target.warp
    for taken, limit, what in (
        (result.shared, target.shared, "bytes of shared memory"),
        (result.registers, target.registers, "registers in a thread"),
        (result.registers * threads, target.register_file, f"registers in {threads} threads"),
    ):
        if taken > limit:
            return f"takes {taken} {what}; {target.device} has {limit}"
    return ""


def _nvidia_resources(asm: Any) -> tuple[int, int]:
    """Registers, and bytes of stack: these kernels have no local arrays, so the stack holds spills alone."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(asm["cubin"])
        cubin.flush()
        command = [str(tool), "--dump-resource-usage", cubin.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text) + _number(
        r"LOCAL:(\d+)", text
    )


def _amd_resources(asm: Any) -> tuple[int, int]:
    """Vector registers, and bytes of scratch memory."""
    text = asm["amdgcn"]
    return _number(r"\.vgpr_count:\s+(\d+)", text), _number(
        r"\.private_segment_fixed_size:\s+(\d+)", text
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"no {pattern} in what the compiler reports:\n{text[:2000]}")
    return int(found[1])


def _first_lines(text: str) -> str:
    return " / ".join(line.strip() for line in text.splitlines() if line.strip())[:300]


def compile_all(
    jobs: Sequence[Job], processes: int, done: Callable[[Result], object]
) -> list[Result]:
    """Compile in that many processes, calling `done` after each launch.

    Returns:
        In the order of `jobs`.
    """
    results = [job.result() for job in jobs]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context, initializer=_quiet) as pool:
        tasks = {pool.submit(compile_one, job): place for place, job in enumerate(jobs)}
        for task in as_completed(tasks):
            try:
                results[tasks[task]] = task.result()
            except BrokenProcessPool:
                results[tasks[task]].problem = (
                    "was not compiled: the compiler died, on this launch or one before it "
                    "(with --jobs 1 it is the first that is listed)"
                )
            done(results[tasks[task]])
    return results


def _quiet() -> None:
    warnings.simplefilter("ignore")


def table(results: Iterable[Result]) -> str:
    """The results as a table in Markdown: a line for each target and kernel."""
    lines = [
        "| target | kernel | launches | shared memory, at most | registers, at most | spilled |",
        "|---|---|---|---|---|---|",
    ]
    devices = {target.name: target for target in TARGETS}
    groups: dict[tuple[str, str], list[Result]] = {}
    for item in results:
        groups.setdefault((item.target, item.kernel), []).append(item)
    order = list(devices)
    for name, kernel in sorted(groups, key=lambda group: (order.index(group[0]), group[1])):
        items, target = groups[name, kernel], devices[name]
        shared = max(item.shared for item in items) / _KIB
        registers = max(item.registers for item in items)
        spills = [item.spills for item in items if item.spills]
        spilled = f"{len(spills)} of {len(items)}, {max(spills)} bytes" if spills else "none"
        lines.append(
            f"| {name} ({target.device}) | {kernel} | {len(items)} "
            f"| {shared:.1f} of {target.shared // _KIB} KiB "
            f"| {registers} of {target.registers} | {spilled} |"
        )
    return "\n".join(lines)


@contextmanager
def _progress(total: int) -> Iterator[Callable[[Result], object]]:
    """A bar where tqdm is installed, otherwise a line for each launch; both on stderr."""
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        yield lambda result: print(
            f"{result.target} {result.kernel} {result.note}: {result.seconds:.1f} s",
            file=sys.stderr,
        )
        return
    with tqdm(total=total, unit="launch", desc="compile", mininterval=1) as bar:
        yield lambda result: bar.update()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    known = {target.name: target for target in TARGETS}

    def chosen(text: str) -> list[Target]:
        names = text.split(",")
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]} is not one of {', '.join(known)}")
        return [known[name] for name in names]

    parser = argparse.ArgumentParser(prog="python -m kernels.aot", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--targets", type=chosen, default=list(TARGETS), help="comma-separated")
    parser.add_argument(
        "--spread",
        action="store_true",
        help="compile each launch for one target or another, not for all",
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result there")
    parser.add_argument("--markdown", action="store_true", help="print the table of the docs alone")
    return parser.parse_args(arguments)


def _compilable() -> None:
    """
    Raises:
        Unfit: Triton is missing, or its kernels were defined for the interpreter.
    """
    try:
        from triton.runtime.jit import JITFunction
    except ModuleNotFoundError:
        raise Unfit("Triton is not installed: pip install 'pagekeeper[gpu]'") from None
    for module in modules():
        for launch in launches(module, TARGETS[0].name):
            if not isinstance(launch.function, JITFunction):
                raise Unfit(
                    f"{module} was imported with TRITON_INTERPRET set, so it has nothing to compile: "
                    "unset it and start again"
                )


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 1 when a launch cannot run on a target, 2 when nothing can be compiled."""
    options = _parse(arguments)
    # Read when a kernel is defined, here and in the processes to come.
    os.environ.pop("TRITON_INTERPRET", None)
    # Multiplying and adding in one instruction: Triton's default today, said here lest another one comes.
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache  # nothing compiled before is taken for this
        try:
            _compilable()
        except Unfit as error:
            print(f"kernels.aot: {error}", file=sys.stderr)
            return 2
        jobs = work(options.targets, options.spread)
        with _progress(len(jobs)) as done:
            results = compile_all(jobs, options.jobs, done)
    if options.json:
        options.json.write_text(json.dumps([asdict(item) for item in results], indent=1) + "\n")
    print(table(results))
    failed = [item for item in results if item.problem]
    for item in failed:
        print(f"{item.target} {item.kernel} ({item.note}) {item.problem}", file=sys.stderr)
    if not options.markdown:
        print(
            f"\n{len(results) - len(failed)} of {len(results)} launches can run, compiled in "
            f"{time.perf_counter() - began:.0f} s"
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
