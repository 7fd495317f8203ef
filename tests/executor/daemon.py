"""memd's core behind a real socket, on a thread, with faults to order, for tests of `RemoteMemory`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from memd.core import Memory
from wire.memory import MAX_STEP, MemoryCodec, Request
from wire.rpc import Limits, PeerGone, PeerSlow, Router, ipc


class Daemon:
    """Starts at once; `kill` and `start` are a restart with an empty memory."""

    def __init__(self, path: Path, lease_ms: int = 3000) -> None:
        self._endpoint = ipc(path)
        self._lease_ms = lease_ms
        self._epoch = 0
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.answers: Callable[[Request, int], int] = lambda request, count: 1
        """How many times the reply to the `count`-th message is sent; 0 loses it."""
        self.handled: list[Request] = []
        self.silent = False  # messages stay in the socket, as for a stopped process
        self.core = Memory(boot_id="none", epoch=0, key=b"")
        self.start()

    def start(self) -> None:
        self._epoch += 1
        self._stop.clear()
        self.core = Memory(
            boot_id=f"boot-{self._epoch}",
            epoch=self._epoch,
            key=b"secret",
            lease_ms=self._lease_ms,
        )
        self._thread = threading.Thread(target=self._serve, args=(self.core,), daemon=True)
        self._thread.start()

    def kill(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def used(self) -> int:
        """Blocks held in all pools."""
        return sum(pool.counts().used for pool in list(self.core.pools.values()))

    def _serve(self, core: Memory) -> None:
        codec = MemoryCodec()
        with Router(self._endpoint, Limits(max_message=MAX_STEP)) as router:
            while not self._stop.is_set():
                if self.silent or not router.poll(5):
                    time.sleep(0.001)
                    core.tick(time.monotonic())
                    continue
                for peer, payload in router.receive():
                    request = codec.decode_request(payload)
                    self.handled.append(request)
                    reply = codec.encode(core.handle(time.monotonic(), request))
                    for _ in range(self.answers(request, len(self.handled))):
                        try:
                            router.send(peer, reply)
                        except (PeerGone, PeerSlow):
                            break
                core.tick(time.monotonic())
