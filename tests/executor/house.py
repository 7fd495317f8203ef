"""An executor without a model: engine, server and sockets, turned by hand, and gateways to talk to it."""

from __future__ import annotations

import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from executor.accept import Bounds
from executor.engine import Engine
from executor.memory import MemoryClient
from executor.request import pack
from executor.scheduler import Scheduler
from executor.server import Server
from executor.worker import Worker
from tests.fakes import END, VOCAB, FakeRunner, LocalMemory
from wire.generate import (
    MAX_TO_EXECUTOR,
    MAX_TO_GATEWAY,
    PROTOCOL,
    Events,
    Failed,
    GenerateCodec,
    Gone,
    Hello,
    ModelCard,
    Status,
    Submit,
    ToExecutor,
    ToGateway,
    Welcome,
)
from wire.rpc import Dealer, Limits, PeerGone, Router, ipc
from wire.sampling import Sampling

CARD = ModelCard("tiny", "tiny", 0, "Fake", "none", 4096, 4000, 4, VOCAB, b"{}", eos_ids=(END,))


class Clock:
    """The real one, which tests can push forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.ahead


class House:
    """One executor. `turn` is one turn of its loop."""

    def __init__(
        self,
        path: Path,
        *,
        blocks: int = 4000,
        memory: MemoryClient | None = None,
        opened: bool = True,
        drain_seconds: float = 30.0,
        step_timeout: float = 120.0,
        end_every: int = 0,
    ) -> None:
        self.clock = Clock()
        self.endpoint = ipc(path / "executor-0.sock")
        self.router = Router(self.endpoint, Limits(max_message=MAX_TO_EXECUTOR, queue=64))
        self.server = Server(self.router, uuid.uuid4().hex, self.clock)
        self.scheduler = Scheduler(Bounds(4, blocks, 4096, VOCAB, (END,)))
        self.local = LocalMemory(blocks, 4)
        self.local.register(lambda: None)
        self.memory = memory or self.local
        self.runner = FakeRunner(4, end_every=end_every)
        self.worker = Worker()
        self.engine = Engine(
            self.scheduler,
            self.memory,
            self.runner,
            self.server,
            worker=self.worker,
            drain_seconds=drain_seconds,
            step_timeout=step_timeout,
            clock=self.clock,
        )
        self.thread: threading.Thread | None = None
        self.died: BaseException | None = None
        if opened:
            self.open()

    def open(self) -> None:
        self.server.open(CARD, self.scheduler, self.engine.status)

    def start(self) -> None:
        """Run the loop on a thread from now on, instead of by hand."""

        def run() -> None:
            try:
                self.engine.run()
            except BaseException as error:
                self.died = error

        self.thread = threading.Thread(target=run)
        self.thread.start()

    def join(self) -> None:
        """Wait for the loop to end; raises what it ended with."""
        assert self.thread is not None
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.thread = None
        if self.died is not None:
            raise self.died

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            if self.thread is None:
                self.engine.turn()
            else:
                time.sleep(0.002)

    def until(self, condition: Callable[[], object], seconds: float = 60.0) -> None:
        """Turn until something holds."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "it did not happen in time"
            self.turn()

    def close(self) -> None:
        if self.thread is not None:
            self.engine.stop()
            self.engine.stop()
            self.thread.join(20)
        self.worker.close()
        self.router.close()


class Gateway:
    """A gateway's side of one connection, by hand."""

    def __init__(self, house: House, *, hello: bool = True, queue: int = 1024) -> None:
        self.house = house
        self.name = uuid.uuid4().hex
        self.codec = GenerateCodec()
        self.dealer = Dealer(house.endpoint, Limits(max_message=MAX_TO_GATEWAY, queue=queue))
        self.welcome: Welcome | None = None
        self.gone: list[Gone] = []
        self.statuses: list[Status] = []
        self.texts: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.finished: dict[tuple[int, int], str] = {}
        self.failed: dict[int, Failed] = {}
        self.events: list[Events] = []
        if hello:
            self.hello()

    def hello(self, protocol: tuple[int, int] = PROTOCOL) -> None:
        self.welcome = None
        seen = len(self.gone)
        self.send(Hello(protocol, self.name))
        self.await_(lambda: self.welcome or len(self.gone) > seen)

    def send(self, message: ToExecutor) -> None:
        self.send_bytes(self.codec.encode(message))

    def send_bytes(self, payload: bytes) -> None:
        end = time.monotonic() + 10
        while True:
            try:
                self.dealer.send(payload)
                return
            except PeerGone:
                assert time.monotonic() < end, "not connected in time"
                time.sleep(0.005)

    def submit(self, request: int, prompt: list[int], max_tokens: int = 8, n: int = 1) -> None:
        sampling = Sampling(seed=1, max_tokens=max_tokens)
        self.send(Submit(request, pack(prompt), sampling, n))

    def receive(self) -> None:
        for payload in self.dealer.receive():
            self._take(self.codec.decode_to_gateway(payload))

    def await_(self, condition: Callable[[], object]) -> None:
        """Let the executor turn, and receive, until something holds."""

        def check() -> object:
            self.receive()
            return condition()

        self.house.until(check)

    def _take(self, message: ToGateway) -> None:
        match message:
            case Welcome():
                self.welcome = message
            case Gone():
                self.gone.append(message)
            case Status():
                self.statuses.append(message)
            case Events():
                self.events.append(message)
                for delta in (*message.deltas, *message.tokens.deltas()):
                    self.texts[delta.id, delta.index] += delta.tokens
                    if delta.finish:
                        self.finished[delta.id, delta.index] = delta.finish
                for failed in message.failed:
                    self.failed[failed.id] = failed

    def close(self) -> None:
        self.dealer.close()
