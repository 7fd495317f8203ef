"""How long the native step waits for the rest of the executor, and what all that costs: from the end of one
call to the next.

All around it is real: the default model, the step loop, memd as a process, a client over the gateway's socket
as another. Every stream decodes one token a step, with prompts of `PROMPT` tokens before. Between two calls
caches hold weights and nothing else, which makes the same Python cost three times what it costs in a loop by
itself (`bench.step_loop`).

    python -m bench.step_gap [--streams 1,8,16,64] [--temperatures 0,1] [--steps 120] [--weights plain]
        [--parts]

With --parts also the CPU time of each part of a step in the executor, median over all loads. Those of Python
are propose, settle, prepare, goes_on, go_on; emit, service, ask, hear are mostly ZeroMQ and the system.
"""

from __future__ import annotations

import argparse
import multiprocessing
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import torch
from tqdm import tqdm

from executor.accept import Bounds
from executor.engine import Engine
from executor.load import DEFAULT_MODEL, LoadedModel, load_model
from executor.memory import RemoteMemory
from executor.native import NativeRunner, why_not
from executor.request import pack
from executor.scheduler import Scheduler
from executor.server import Server
from executor.worker import Worker
from kernels.cpu import native
from wire.generate import (
    MAX_TO_EXECUTOR,
    MAX_TO_GATEWAY,
    PROTOCOL,
    Events,
    GenerateCodec,
    Gone,
    Hello,
    ModelCard,
    Ping,
    Submit,
    ToExecutor,
    Welcome,
)
from wire.memory import MAX_REPLY, PoolSpec
from wire.rpc import Dealer, Limits, PeerGone, Router, ipc
from wire.sampling import Sampling

PROMPT = 64
BLOCK_SIZE = 16
PATIENCE_S = 120.0
PING_S = 0.5

Load = tuple[int, float]  # streams, temperature


class Probe:
    """Stands before the native engine, on the device's thread, and looks at the clocks."""

    def __init__(self, engine: native.Engine) -> None:
        self._engine = engine
        # Made on the thread of the step loop.
        self._loop = time.pthread_getcpuclockid(threading.get_ident())
        self._last: Load | None = None
        self._ended = 0.0
        self._spent = (0.0, 0.0)  # this thread's and the loop's when the last call ended
        self.gaps: dict[Load, list[float]] = defaultdict(list)  # seconds, as all below
        self.steps: dict[Load, list[float]] = defaultdict(list)
        self.parts: dict[str, list[float]] = {}  # CPU time of each
        self.costs: dict[Load, list[float]] = defaultdict(list)  # CPU time of both outside calls

    def run(self, step: native.Step) -> None:
        started, spent = time.perf_counter(), self._times()
        self._engine.run(step)
        tokens, rows, outputs = step[: native.COPIES]
        load = (rows, float(step[native.DRAWS] > 0))
        decoding = tokens == rows == outputs
        last, device, loop = self._ended, *self._spent
        self._ended, self._spent = time.perf_counter(), self._times()
        if decoding and load == self._last:
            self.gaps[load].append(started - last)
            self.steps[load].append(self._ended - started)
            # The loop works beside the call, so all its time since the last one ended is of one step.
            self.costs[load].append(spent[0] - device + self._spent[1] - loop)
        self._last = load if decoding else None

    def _times(self) -> tuple[float, float]:
        return time.thread_time(), time.clock_gettime(self._loop)


PARTS: dict[type, tuple[str, ...]] = {
    Scheduler: ("propose", "settle", "goes_on", "go_on", "update"),
    NativeRunner: ("prepare",),
    Server: ("service", "emit"),
    RemoteMemory: ("ask", "hear"),
}


def time_parts(objects: Sequence[object]) -> dict[str, list[float]]:
    """From now on the CPU seconds of every call of `PARTS` on these."""
    spent: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **more: Any) -> Any:
            started = time.thread_time()
            try:
                return call(*args, **more)
            finally:
                spent[name].append(time.thread_time() - started)

        return run

    for each in objects:
        for name in PARTS[type(each)]:
            setattr(each, name, timed(name, getattr(each, name)))
    return spent


@contextmanager
def memd(folder: Path) -> Iterator[None]:
    """The memory daemon, as a process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "memd", "--run-dir", str(folder), "--admin-port", "0",
         "--log-level", "error"]
    )  # fmt: skip
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


def client(endpoint: str, loads: Sequence[Load], steps: int) -> None:
    """One load after the other, as a gateway would send it."""
    codec, request = GenerateCodec(), 0
    bar = tqdm(total=steps * len(loads), desc="steps", leave=False, disable=None)
    with bar, Dealer(endpoint, Limits(max_message=MAX_TO_GATEWAY)) as dealer:

        def send(message: ToExecutor) -> None:
            end = time.monotonic() + PATIENCE_S
            while True:
                try:
                    return dealer.send(codec.encode(message))
                except PeerGone:
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.01)

        def messages() -> Iterator[object]:
            pinged = 0.0
            while dealer.poll(int(PATIENCE_S * 1000)):
                if time.monotonic() - pinged > PING_S:
                    pinged = time.monotonic()
                    send(Ping())
                for payload in dealer.receive():
                    yield codec.decode_to_gateway(payload)
            raise SystemExit(f"no word from the executor for {PATIENCE_S:.0f} s")

        send(Hello(PROTOCOL, uuid.uuid4().hex))
        if not any(isinstance(message, Welcome) for message in messages()):
            return
        for streams, temperature in loads:
            sampling = Sampling(
                seed=1, temperature=temperature, max_tokens=steps + streams // 4, ignore_eos=True
            )
            for _ in range(streams):
                request += 1
                send(Submit(request, pack([request % 900 + 1] * PROMPT), sampling))
            left = streams
            for message in messages():
                if isinstance(message, Gone):
                    raise SystemExit(f"the executor ended the session: {message.message}")
                if isinstance(message, Events):
                    if message.failed:
                        raise SystemExit(f"a request failed: {message.failed[0].message}")
                    bar.update()
                    left -= sum(bool(delta.finish) for delta in message.deltas)
                if not left:
                    break


def measure(
    loaded: LoadedModel, loads: Sequence[Load], steps: int, weights: str, folder: Path, parts: bool
) -> Probe:
    """Run all loads, one after the other."""
    most = max(streams for streams, _ in loads)
    blocks = most * -(-(PROMPT + steps + most) // BLOCK_SIZE) + 1
    runner = NativeRunner(
        loaded,
        num_blocks=blocks + 1,
        block_size=BLOCK_SIZE,
        device="cpu",
        dtype=torch.bfloat16,
        weights=weights,  # type: ignore[arg-type]
    )
    runner.warm_up()
    probe = Probe(runner._engine)
    runner._engine = probe  # type: ignore[assignment]
    card = loaded.card
    bounds = Bounds(BLOCK_SIZE, blocks, card.context_length, card.vocab_size, card.eos_ids)
    scheduler, worker = Scheduler(bounds), Worker()
    spec = PoolSpec("pool", loaded.digest, "bfloat16", BLOCK_SIZE, blocks + 1, runner.block_bytes)
    endpoint = ipc(folder / "executor-0.sock")
    spawn = multiprocessing.get_context("spawn")
    with (
        memd(folder),
        Router(endpoint, Limits(max_message=MAX_TO_EXECUTOR)) as router,
        Dealer(ipc(folder / "memd.sock"), Limits(max_message=MAX_REPLY)) as dealer,
    ):
        memory = RemoteMemory(dealer, uuid.uuid4().hex, spec)
        server = Server(router, uuid.uuid4().hex)
        engine = Engine(scheduler, memory, runner, server, worker=worker)
        if parts:
            probe.parts = time_parts((scheduler, memory, runner, server))
        model = ModelCard(
            "m", "m", 0, "Llama", "bfloat16", bounds.context, blocks * BLOCK_SIZE, BLOCK_SIZE,
            bounds.vocab, b"{}", eos_ids=bounds.end_ids,
        )  # fmt: skip
        server.open(model, scheduler, engine.status)
        gateway = spawn.Process(target=client, args=(endpoint, loads, steps))

        def stop_after_it() -> None:
            gateway.join()
            engine.stop()
            engine.stop()

        gateway.start()
        threading.Thread(target=stop_after_it).start()
        engine.run()
        worker.close()
    if gateway.exitcode:
        sys.exit("the client ended with an error")
    return probe


def main(argv: Sequence[str] | None = None, loaded: LoadedModel | None = None) -> None:
    """
    Args:
        loaded: in bfloat16; default: the default model.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", default="1,8,16,64")
    parser.add_argument("--temperatures", default="0,1", help="0, 1 or both")
    parser.add_argument("--steps", type=int, default=120, help="of each load (%(default)s)")
    parser.add_argument("--weights", default="plain", choices=("plain", "file", "int8", "w8a8"))
    parser.add_argument("--parts", action="store_true", help="the CPU time of each part as well")
    options = parser.parse_args(argv)
    loads = [
        (int(streams), float(temperature))
        for temperature in options.temperatures.split(",")
        for streams in options.streams.split(",")
    ]
    loaded = loaded or load_model(
        DEFAULT_MODEL, dtype="bfloat16", device="cpu", on_progress=lambda what, share: None
    )
    if reason := why_not(loaded, torch.bfloat16):
        sys.exit(reason)
    with tempfile.TemporaryDirectory(prefix="pk-") as folder:
        probe = measure(loaded, loads, options.steps, options.weights, Path(folder), options.parts)
    print(
        "streams  temperature   gap ms: median  p10   p90    step ms  gap's share   CPU ms beside it"
    )
    for load in loads:
        if len(gaps := probe.gaps[load]) < 2:
            sys.exit(f"{load[0]} streams never decoded together: ask for more --steps")
        tenths = quantiles(gaps, n=10)
        gap, step = 1000 * median(gaps), 1000 * median(probe.steps[load])
        print(
            f"{load[0]:7}  {load[1]:11.0f}          {gap:6.2f} {1000 * tenths[0]:6.2f} "
            f"{1000 * tenths[-1]:6.2f}     {step:6.2f}  {gap / (gap + step):10.1%}   "
            f"{1000 * fmean(probe.costs[load]):16.2f}"
        )
    for name, seconds in probe.parts.items():
        print(f"{name:>10} {1e6 * median(seconds):4.0f} us")


if __name__ == "__main__":
    main()
