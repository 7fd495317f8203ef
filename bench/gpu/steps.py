"""What a step of the whole executor takes: with and without graphs, and how much of it is memd's."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench.gpu import model
from bench.gpu.setting import Peaks, Setting
from executor.accept import Bounds
from executor.gpu import GpuRunner
from executor.load import LoadedModel
from executor.memory import RemoteMemory
from executor.plan import Draw, Plan, Row
from executor.request import pack
from executor.scheduler import Scheduler
from wire.generate import Submit
from wire.memory import MAX_REPLY, PoolSpec
from wire.rpc import Dealer, Limits, ipc
from wire.sampling import Sampling

BATCHES = (1, 8, 64, 256)
CONTEXT = 512  # of each sequence in a timed step
TIMES = 50
MEMD_ROWS, MEMD_PROMPT, MEMD_TOKENS = 64, 512, 96


def graphs(
    setting: Setting, peaks: Peaks, progress: Callable[[float], None]
) -> list[dict[str, Any]]:
    """Milliseconds of a decode step, from plan to tokens, as the step loop sees it."""
    loaded = model.random_model(setting, setting.dtype)
    context, batches, times = (9, (2,), 1) if setting.interpret else (CONTEXT, BATCHES, TIMES)
    found: dict[int, dict[str, Any]] = {}
    for turn, recorded in enumerate((False, True)):
        step = model.runner(
            setting,
            loaded,
            blocks=max(batches) * (-(-context // model.BLOCK)) + 1,
            rows=max(batches),
            tokens=max(512, *batches) if not setting.interpret else 8,
            graphs=recorded,
        )
        for rows in batches:
            plan = _decodes(rows, context)
            for _ in range(0 if setting.interpret else 5):
                step.run(plan)
            taken = []
            for _ in range(times):
                started = time.perf_counter()
                step.run(plan)
                taken.append(time.perf_counter() - started)
            name = "with graphs ms" if recorded else "without ms"
            found.setdefault(rows, {"rows": rows, "context": context})[name] = _median(taken) * 1e3
        del step
        progress((turn + 1) / 2)
    for rows, row in found.items():
        least = _bytes(loaded, rows, context) / peaks.bandwidth
        row["least ms"] = least * 1e3  # the time to read weights and KV once
        row["tokens/s"] = rows / row["with graphs ms"] * 1e3
    return list(found.values())


def _decodes(rows: int, context: int) -> Plan:
    """A step in which each of `rows` sequences computes its token at position `context` - 1."""
    each = -(-context // model.BLOCK)
    greedy = Sampling(seed=0, temperature=0)
    return Plan(
        1,
        [
            Row(
                seq,
                context - 1,
                [seq % 250],
                list(range(1 + seq * each, 1 + (seq + 1) * each)),
                (Draw(seq, 0, context, greedy, (), ()),),
            )
            for seq in range(rows)
        ],
    )


def _bytes(loaded: LoadedModel, rows: int, context: int) -> int:
    """That a decode step must read: every weight but the embedding, and all K and V."""
    c, size = loaded.config, loaded.model.dtype.itemsize
    weights = sum(
        weight.numel()
        for name, weight in loaded.model.parameters().items()
        if "embed_tokens" not in name
    )
    return size * (weights + 2 * c.layers * c.kv_heads * c.head_dim * rows * context)


def memd(setting: Setting, progress: Callable[[float], None]) -> dict[str, Any]:
    """The real step loop's moves against a real memd, timed one by one, over steps that only decode.

    Returns:
        Microseconds of each move (medians), and the share of a step spent on memd: in asking and in waiting
        for what it had not answered by the time the device was done.
    """
    rows, prompt, tokens = (2, 5, 3) if setting.interpret else (MEMD_ROWS, MEMD_PROMPT, MEMD_TOKENS)
    loaded = model.random_model(setting, setting.dtype)
    blocks = rows * (-(-(prompt + tokens) // model.BLOCK) + 1) + 1
    step_tokens = 16 if setting.interpret else 2048
    runner = model.runner(
        setting, loaded, blocks=blocks, rows=rows, tokens=step_tokens, graphs=True
    )
    progress(0.3)
    scheduler = Scheduler(
        Bounds(
            block_size=model.BLOCK,
            blocks=blocks - 1,
            context=loaded.config.context_length,
            vocab=loaded.config.vocab_size,
            step_tokens=step_tokens,
            sequences=rows,
        )
    )
    for request in range(rows):
        ids = [(request * 31 + place * 7) % loaded.config.vocab_size for place in range(prompt)]
        asked = Sampling(seed=0, temperature=0, max_tokens=tokens, ignore_eos=True)
        scheduler.submit(b"bench", Submit(request + 1, pack(ids), asked, 1))
    moves: dict[str, list[float]] = defaultdict(list)
    with (
        _daemon() as directory,
        Dealer(ipc(directory / "memd.sock"), Limits(max_message=MAX_REPLY)) as dealer,
    ):
        spec = PoolSpec(
            "gpu-check", "random", str(setting.dtype), model.BLOCK, blocks, runner.block_bytes
        )
        memory = RemoteMemory(dealer, uuid.uuid4().hex, spec)
        memory.register(lambda: None)
        _turns(scheduler, memory, runner, rows, moves)
        memory.close()
    progress(1.0)
    medians = {name: _median(taken) * 1e6 for name, taken in moves.items()}
    if not medians:
        raise RuntimeError("no step decoded all sequences together")
    whole = sum(medians.values())
    return {
        "rows": rows,
        "steps": len(moves["run"]),
        "us": medians,
        "memd's share": (medians["ask"] + medians["answer"]) / whole,
        "host's share": 1 - medians["run"] / whole,
    }


def _turns(
    scheduler: Scheduler,
    memory: RemoteMemory,
    runner: GpuRunner,
    rows: int,
    moves: dict[str, list[float]],
) -> None:
    """Turn until nothing is left, as `executor.engine` does, and time the steps in which all decode."""
    plan, turn = Plan(0), 0
    while scheduler.busy or plan.computes:
        turn += 1
        decoding = plan.tokens == rows and all(len(row.tokens) == 1 for row in plan.rows)
        marks = [time.perf_counter()]

        def mark(marks: list[float] = marks) -> None:
            marks.append(time.perf_counter())

        proposal = scheduler.propose(fills=turn % 16 == 0)
        mark()
        memory.ask(proposal.wants)
        mark()
        drawn = runner.run(plan) if plan.computes else []
        mark()
        scheduler.update(plan, drawn)
        mark()
        granted = memory.answer(lambda: None)
        mark()
        plan = scheduler.settle(proposal, granted)
        mark()
        if failures := scheduler.take_failures():
            raise RuntimeError(f"a request failed: {failures[0][1].message}")
        if decoding:
            names = ("propose", "ask", "run", "update", "answer", "settle")
            for name, start, end in zip(names, marks, marks[1:], strict=False):
                moves[name].append(end - start)


@contextmanager
def _daemon() -> Iterator[Path]:
    """A memd process; yields its run directory."""
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as run_dir:
        process = subprocess.Popen(
            [sys.executable, "-m", "memd", "--run-dir", run_dir, "--admin-port", "0",
             "--log-level", "error"]
        )  # fmt: skip
        try:
            yield Path(run_dir)
        finally:
            process.terminate()
            process.wait(10)


def _median(values: list[float]) -> float:
    return float(torch.tensor(values, dtype=torch.float64).median())
