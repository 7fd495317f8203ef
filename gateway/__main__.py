"""`python -m gateway`: serve until SIGTERM, then let running streams finish.

Exit status: 0 after an orderly end, 2 when a setting is wrong or the address is taken.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import sys
from collections.abc import Sequence

import uvloop
from aiohttp import web

from gateway.app import build_app
from gateway.auth import KEYS
from gateway.config import GatewayConfig, load_config
from gateway.engine import ENGINE
from gateway.errors import counted
from gateway.guard import GuardedRunner
from gateway.limits import ADMISSION
from wire.announce import announced
from wire.errors import Code, Refused
from wire.logs import configure

log = logging.getLogger(__name__)

_POLL_S = 0.05
_LAST_WORDS_S = 1.0  # for error events to leave after the drain's deadline


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gateway; returns the exit status."""
    config = load_config(argv)
    configure("gateway", config.log_level, config.log_format)
    try:
        app = build_app(config)
    except ValueError as error:
        return _refuse(str(error))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(app, config))


def _refuse(message: str) -> int:
    print(f"gateway: {message}", file=sys.stderr)
    return 2


async def _serve(app: web.Application, config: GatewayConfig) -> int:
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        # The first asks for an orderly end, the second for a quick one.
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)

    runner = GuardedRunner(app, config)
    try:
        await runner.setup()
        try:
            host, port = await runner.listen(config.host, config.port)
        except OSError as error:
            return _refuse(_why_not_bound(config, error))
        url = _url(host, port)
        note = config.run_dir / "gateway.json"
        with announced(note, url=url, needs_key=len(app[KEYS]) > 0):
            log.info("listening on %s", url)
            gc.freeze()  # what is loaded stays: collections that look at it again would hold up tokens
            await stop.wait()
            await _drain(app, config.drain_seconds, hurry)
            runner.stop_listening()
    finally:
        await runner.cleanup()
    log.info("stopped")
    return 0


async def _drain(app: web.Application, seconds: float, hurry: asyncio.Event) -> None:
    """Take nothing new (503, and /ready says so), wait for what runs, then end it with an error event."""
    admission = app[ADMISSION]
    admission.drain()
    log.info("draining: %s for up to %g s", counted(admission.requests, "request"), seconds)
    await _until_idle(app, seconds, hurry)
    if admission.requests:
        log.warning("%s did not finish in time", counted(admission.requests, "request"))
        app[ENGINE].fail_all(
            Refused(Code.DRAINING, "The server shut down before this request finished; retry.")
        )
        await _until_idle(app, _LAST_WORDS_S, asyncio.Event())


async def _until_idle(app: web.Application, seconds: float, hurry: asyncio.Event) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while app[ADMISSION].requests and not hurry.is_set():
        if asyncio.get_running_loop().time() >= deadline:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(hurry.wait(), _POLL_S)


def _why_not_bound(config: GatewayConfig, error: OSError) -> str:
    where = f"port {config.port} of {config.host}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use; stop what listens there or choose another --port"
    if error.errno == errno.EACCES:
        return f"{where} may not be used by this user; choose a --port above 1023"
    return f"cannot listen on {where}: {error.strerror or error}"


def _url(host: str, port: int) -> str:
    """Where this machine reaches the server."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


if __name__ == "__main__":
    sys.exit(main())
