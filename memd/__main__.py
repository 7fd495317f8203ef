"""`python -m memd`: one memory daemon per run directory."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from time import monotonic

import uvloop
import zmq

from memd import compiled
from wire.clock import PauseClock

CORE = "compiled" if compiled.prefer() else "plain"  # before anything imports a module of it

from memd.admin import Admin
from memd.config import BadConfig, Config, check, read
from memd.core import Memory
from memd.epoch import AlreadyRunning, RunLock, identify
from memd.server import LIMITS, Server
from wire import logs
from wire.announce import announced
from wire.rpc import BadEndpoint, Router, ipc, private_directory

log = logging.getLogger(__name__)

SOCKET_FILE = "memd.sock"
ABOUT_FILE = "memd.json"  # tells where the admin server is, once it answers

# Young collections stay small, and full ones, which would visit every prefix node of every pool (0.1 s per
# million), only run when a pool has ended (`Server.tick`).
GC_THRESHOLDS = (10_000, 5, 1_000_000)


async def serve(config: Config, memory: Memory, router: Router) -> int:
    """Run until SIGTERM or SIGINT; returns the exit status."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[int] = loop.create_future()

    def end(status: int) -> Callable[[], None]:
        return lambda: None if done.done() else done.set_result(status)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end(0))
    server = Server(memory, router, PauseClock(monotonic, config.lease_ms / 2000), end(1))
    admin = Admin(server, config)
    about = config.run_dir / ABOUT_FILE
    url = await admin.start()
    try:
        server.start(loop)
        with announced(about, admin=url, socket=str(config.run_dir / SOCKET_FILE)):
            log.info(
                "ready epoch=%d boot_id=%s admin=%s core=%s",
                memory.epoch,
                memory.boot_id,
                url,
                CORE,
            )
            gc.collect()
            gc.freeze()
            gc.set_threshold(*GC_THRESHOLDS)
            return await done
    finally:
        server.stop()
        await admin.stop()
        log.info("stopped")


def run(config: Config) -> int:
    """Take the run directory, bind, serve.

    Raises:
        BadConfig, BadEndpoint, AlreadyRunning, OSError: why this memd cannot start.
    """
    check(config)
    private_directory(config.run_dir)
    lock = RunLock(config.run_dir)
    try:
        if config.nice:
            _be_nice(config.nice)
        identity = identify(config.state_dir or config.run_dir)
        memory = Memory(
            boot_id=identity.boot_id,
            epoch=identity.epoch,
            key=identity.key,
            lease_ms=config.lease_ms,
            reserves=config.reserves,
        )
        with (
            Router(ipc(config.run_dir / SOCKET_FILE), LIMITS) as router,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            return runner.run(serve(config, memory, router))
    finally:
        lock.release()


def _be_nice(value: int) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, 0, value)
    except OSError as error:
        log.warning("--nice %d: %s; going on with the priority given", value, error.strerror)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 0 after a signal, 2 for bad settings, 1 when it cannot serve."""
    config = read(argv)
    logs.configure("memd", config.log_level, config.log_format)
    try:
        return run(config)
    except BadConfig as error:
        print(f"memd: {error}", file=sys.stderr)
        return 2
    except (BadEndpoint, AlreadyRunning, OSError, zmq.ZMQError) as error:
        print(f"memd: cannot start: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
