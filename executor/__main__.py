"""`python -m executor`: load a model, register its pool at memd, serve gateways."""

from __future__ import annotations

import fcntl
import gc
import logging
import os
import signal
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# Read once, when torch loads OpenMP. Threads that spin while they wait make a step three times slower as soon
# as anything else wants a core, and a server's gateway always does.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from executor.accept import MAX_CONTEXT, Bounds
from executor.config import Config, read
from executor.device import free_memory, measured_blocks, why_no_gpu
from executor.engine import CARE_S, Engine, Stopped
from executor.gpu import GpuRunner
from executor.graphs import CudaRecorder
from executor.kv import block_bytes
from executor.load import DEFAULT_MODEL, LoadedModel, load_model
from executor.memory import RemoteMemory
from executor.models.registry import UnknownModel
from executor.native import NativeRunner, choose_weights, why_not
from executor.runner import Runner
from executor.scheduler import Scheduler
from executor.server import Server
from executor.weights import BadModel
from executor.worker import Worker
from kernels.dispatch import Unavailable, kernels_for
from wire import logs
from wire.errors import Refused
from wire.generate import MAX_TO_EXECUTOR, ModelCard
from wire.memory import MAX_REPLY, PoolSpec
from wire.rpc import BadEndpoint, Dealer, Limits, Router, ipc, private_directory
from wire.settings import Size

log = logging.getLogger("executor")

KV_MEMORY = Size(1 << 30)  # when nothing is said, and nothing can be measured

AnyRunner = Runner | NativeRunner | GpuRunner


class CannotStart(Exception):
    """A reason, for people, why there is nothing to serve."""


def main() -> int:
    """Exit status 0 after a drain, 2 when a setting is at fault, so that the same again would end the same
    way, 1 when it broke."""
    config = read()
    logs.configure(f"executor-{config.index}", config.log_level, config.log_format)
    try:
        return serve(config)
    except (CannotStart, BadEndpoint, BadModel, UnknownModel) as error:
        log.error("%s", error)
        return 2
    except Refused as error:
        log.error("the memory daemon refused this executor: %s", error.message)
    except Exception:
        # Crash-only: memd takes the blocks back, gateways tell their clients, the launcher restarts.
        log.exception("stopped by an error that should not happen")
    return 1


def serve(config: Config) -> int:
    """Run until told to stop."""
    directory = private_directory(config.run_dir)
    lock = _lock(directory / f"executor-{config.index}.lock")
    instance = uuid.uuid4().hex
    stopping = _Stopping()
    worker = Worker()
    try:
        with Router(ipc(config.socket), Limits(max_message=MAX_TO_EXECUTOR)) as router:
            server = Server(router, instance)

            def idle() -> None:
                if stopping.count:
                    raise Stopped
                server.service()

            loaded = worker.call(lambda: _load(config, server), idle, CARE_S)
            runner = worker.call(lambda: _runner(config, loaded, server), idle, CARE_S)
            memory_socket = ipc(directory / "memd.sock")
            with Dealer(memory_socket, Limits(max_message=MAX_REPLY)) as dealer:
                memory = RemoteMemory(dealer, instance, _pool(config, loaded, runner))
                scheduler = Scheduler(_bounds(config, loaded, runner))
                engine = Engine(
                    scheduler,
                    memory,
                    runner,
                    server,
                    worker=worker,
                    drain_seconds=config.drain_seconds,
                    step_timeout=config.step_timeout,
                )
                server.open(_card(config, loaded, scheduler.bounds), scheduler, engine.status)
                stopping.then(engine.stop)
                gc.collect()
                gc.freeze()  # the model and the libraries stay: no collection need look at them
                engine.run(lambda: log.info("ready model=%s pool=%s", config.model, config.pool))
                time.sleep(0.05)  # zmq sends the last messages from its own thread
    except Stopped:
        pass
    finally:
        config.socket.unlink(missing_ok=True)
        os.close(lock)
    log.info("stopped")
    return 0


class _Stopping:
    """SIGTERM and SIGINT: counted from the start, passed on to the engine once there is one."""

    def __init__(self) -> None:
        self.count = 0
        self._action: Callable[[], None] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def then(self, action: Callable[[], None]) -> None:
        self._action = action
        for _ in range(self.count):
            action()

    def _on_signal(self, number: int, frame: object) -> None:
        self.count += 1
        if self._action is not None:
            self._action()


def _lock(path: Path) -> int:
    """Hold the right to be the executor of this index; the descriptor must stay open."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise CannotStart(
            f"another executor holds {path}: give this one another --index or --run-dir"
        ) from None
    return descriptor


def _check_device(config: Config) -> None:
    """Before the weights are read, which takes a while.

    Raises:
        CannotStart: the device is not there, or cannot run the kernels asked for.
    """
    if config.device == "cuda" and (reason := why_no_gpu()):
        raise CannotStart(f"--device cuda: {reason}")
    if config.device != "cpu" and config.kernels == "native":
        raise CannotStart("--kernels native is code for CPUs: use --device cpu, or --kernels auto")
    if config.kernels == "triton":
        try:
            kernels_for("triton", torch.device(config.device))
        except Unavailable as unavailable:
            raise CannotStart(f"--kernels triton: {unavailable}") from None


def _load(config: Config, server: Server) -> LoadedModel:
    """Runs on the worker, as everything of torch does; gateways hear meanwhile what is going on."""
    name = config.served_model_name or config.model
    _check_device(config)
    if config.threads:
        torch.set_num_threads(config.threads)
    shown = -1.0

    def progress(what: str, share: float) -> None:
        nonlocal shown
        server.reason = f"loading {name}: {what}, {share:.0%}"
        if share >= 1 or share < shown or share - shown >= 0.1:
            shown = share
            log.info("loading %s %d%% (%s)", name, int(share * 100), what)

    try:
        return load_model(
            config.model, dtype=config.dtype, device=config.device, on_progress=progress
        )
    except torch.OutOfMemoryError as error:
        raise CannotStart(
            f"the weights of {name} do not fit: {free_memory(torch.device(config.device))}; use a "
            "smaller model, or a larger GPU"
        ) from error


def _runner(config: Config, loaded: LoadedModel, server: Server) -> AnyRunner:
    """Allocates the KV tensors and warms up.

    Raises:
        CannotStart: there is no room for them, or the kernels asked for cannot run here.
    """
    dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
    kind = _kernels(config, loaded, server, dtype)
    server.reason = "warming up"
    log.info("warming up")
    device = torch.device(config.device)

    def build(num_blocks: int) -> AnyRunner:
        return kind(
            loaded,
            num_blocks=num_blocks,
            block_size=config.block_size,
            device=device,
            dtype=dtype,
        )

    def probe(num_blocks: int) -> GpuRunner:
        runner = build(num_blocks)
        assert isinstance(runner, GpuRunner)
        return runner

    try:
        # On a GPU, unless told, as many blocks as fit; a CPU's memory is not all ours.
        measured = kind is not Runner and device.type == "cuda"
        num_blocks = _num_blocks(config, loaded, dtype, measured=measured)
        if num_blocks is None:
            enough = -(-config.step_tokens // config.block_size) + 1
            num_blocks = measured_blocks(probe, enough, device, config.gpu_memory_share)
            if num_blocks < 2:
                raise CannotStart(
                    f"--gpu-memory-share {config.gpu_memory_share} leaves no room for K and V beside "
                    f"the weights: {free_memory(device)}; give a larger share, a smaller "
                    "--max-step-tokens or a smaller model"
                )
        runner = build(num_blocks)
        if isinstance(runner, GpuRunner):
            runner.warm_up(lambda share: _say(server, f"recording graphs, {share:.0%}"))
        else:
            runner.warm_up()
    except (torch.OutOfMemoryError, MemoryError) as error:
        room = f"; {free_memory(device)}" if device.type == "cuda" else ""
        raise CannotStart(
            f"out of memory while making room for K and V: {error}{room}; give a smaller "
            "--kv-memory, --gpu-memory-share or --max-step-tokens"
        ) from error
    return runner


def _say(server: Server, reason: str) -> None:
    server.reason = reason


def _num_blocks(
    config: Config, loaded: LoadedModel, dtype: torch.dtype, *, measured: bool
) -> int | None:
    """KV blocks to allocate, the null block included, which is never granted; None: not said, and to be
    measured."""
    if config.num_blocks:
        return config.num_blocks + 1
    if config.kv_memory is None and measured:
        return None
    memory = config.kv_memory or KV_MEMORY
    each = block_bytes(loaded.config, config.block_size, dtype)
    if memory < 2 * each:
        raise CannotStart(
            f"--kv-memory {memory} holds {memory // each} KV blocks of {each} bytes, at least "
            "2 are needed: give more memory or a smaller --block-size"
        )
    return int(memory) // each


def _kernels(
    config: Config, loaded: LoadedModel, server: Server, dtype: torch.dtype
) -> Callable[..., AnyRunner]:
    """What computes the steps, as asked for and as this machine allows."""
    native = config.device == "cpu" and config.kernels in ("auto", "native")
    if config.weights in ("file", "int8", "w8a8") and not native:
        raise CannotStart(
            f"--weights {config.weights} needs the native CPU step: use --device cpu with --kernels "
            "auto or native"
        )
    if config.kernels == "torch":
        return Runner
    if config.kernels == "triton" or config.device != "cpu":
        return _triton(config, torch.device(config.device))
    server.reason = "building the native step"
    reason = why_not(loaded, dtype, config.block_size)
    if reason is None:
        return _native(config, loaded, dtype)
    if config.kernels == "native":
        raise CannotStart(f"--kernels native: {reason}; use --kernels torch")
    held = (
        "" if config.weights in ("auto", "plain") else f" and --weights {config.weights} not heeded"
    )
    log.warning("kernels=torch, slower than native code%s: %s", held, reason)
    return Runner


def _native(config: Config, loaded: LoadedModel, dtype: torch.dtype) -> Callable[..., AnyRunner]:
    try:
        weights = choose_weights(config.weights, loaded, dtype)
    except ValueError as error:
        raise CannotStart(str(error)) from error
    log.info("kernels=native weights=%s", weights)
    if weights == "file" and loaded.file is not None:
        known, matrices = loaded.file.quantised_matrices()
        if known < matrices:
            log.info("%d of %d matrices are kept in bfloat16", matrices - known, matrices)
    return partial(NativeRunner, weights=weights)


def _triton(config: Config, device: torch.device) -> Callable[..., AnyRunner]:
    try:
        kernels = kernels_for("triton", device)
    except Unavailable as reason:  # and not asked for by name
        log.warning("kernels=torch, slower than Triton's: %s", reason)
        return Runner
    graphs = config.cuda_graphs and device.type == "cuda"
    log.info("kernels=triton graphs=%s", graphs)

    def build(loaded: LoadedModel, **sizes: Any) -> GpuRunner:
        return GpuRunner(
            loaded,
            kernels=kernels,
            step_tokens=config.step_tokens,
            sequences=config.max_sequences,
            context=config.max_model_len,
            record=CudaRecorder() if graphs else None,
            **sizes,
        )

    return build


def _identity(loaded: LoadedModel, runner: AnyRunner) -> str:
    """Equal ones compute equal K and V."""
    held = runner.weights if isinstance(runner, NativeRunner) else "plain"
    return loaded.digest if held == "plain" else f"{loaded.digest}-{held}"


def _pool(config: Config, loaded: LoadedModel, runner: AnyRunner) -> PoolSpec:
    """What memd is told of the KV tensors."""
    return PoolSpec(
        name=config.pool,
        model=_identity(loaded, runner),
        dtype=config.dtype,
        block_size=config.block_size,
        num_blocks=runner.kv.num_blocks,
        block_bytes=runner.block_bytes,
    )


def _bounds(config: Config, loaded: LoadedModel, runner: AnyRunner) -> Bounds:
    """What requests may ask for. What was not to be expected of the settings is told."""
    blocks = runner.kv.num_blocks - 1
    most, asked = min(loaded.card.context_length, MAX_CONTEXT), config.max_model_len
    if asked and asked > most:
        log.warning("--max-model-len %d is more than the model's %d, which counts", asked, most)
    context = min(most, asked or most)
    if (room := blocks * config.block_size) < context:
        log.warning(
            "K and V of %d tokens fit, for all requests together; the model's context of %d needs "
            "--kv-memory %dMiB",
            room,
            context,
            -(-context * runner.block_bytes // config.block_size >> 20) + 1,
        )
    return Bounds(
        block_size=config.block_size,
        blocks=blocks,
        context=context,
        vocab=loaded.card.vocab_size,
        end_ids=loaded.card.eos_ids,
        step_tokens=config.step_tokens,
        sequences=config.max_sequences,
        waiting=config.max_waiting,
        waiting_tokens=config.max_waiting_tokens,
    )


def _card(config: Config, loaded: LoadedModel, bounds: Bounds) -> ModelCard:
    """What gateways are told of the model."""
    card = loaded.card
    own_name = DEFAULT_MODEL if config.model == DEFAULT_MODEL else card.name
    return ModelCard(
        name=config.served_model_name or own_name,
        root=card.root,
        created=int(time.time()),
        architecture=card.architecture,
        dtype=config.dtype,
        context_length=bounds.context,
        pool_tokens=bounds.blocks * bounds.block_size,
        block_size=config.block_size,
        vocab_size=card.vocab_size,
        tokenizer=card.tokenizer,
        chat_template=card.chat_template,
        bos_token=card.bos_token,
        eos_token=card.eos_token,
        pad_token=card.pad_token,
        eos_ids=card.eos_ids,
        add_bos=card.add_bos,
    )


if __name__ == "__main__":
    status = main()
    logging.shutdown()
    # The worker may still be inside the device: waiting could take for ever, tearing torch down crashes.
    os._exit(status)
