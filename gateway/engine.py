"""All executors of this gateway: which one gets a request, and what is in progress."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from aiohttp import web

from gateway.inbox import Inbox
from gateway.link import Link, SubmitOptions
from gateway.metrics import Metrics
from gateway.served import Model
from wire.errors import Code, Refused
from wire.generate import GenerateCodec
from wire.rpc import ipc

log = logging.getLogger(__name__)

_TICK_S = 0.25


class Engine:
    """All executors of this gateway.

    Args:
        run_dir: where their sockets are.
        names: of the sockets, without suffix.
    """

    def __init__(self, run_dir: Path, names: Sequence[str], metrics: Metrics) -> None:
        codec, gateway = GenerateCodec(), uuid.uuid4().hex
        self.links: Final = [
            Link(index, name, ipc(run_dir / f"{name}.sock"), gateway, codec, metrics)
            for index, name in enumerate(names)
        ]
        self._last_id = 0
        self._inboxes: set[Inbox] = set()

    def start(self) -> None:
        """Connect, on the running loop."""
        self._loop = asyncio.get_running_loop()
        for link in self.links:
            link.open(self._loop)
        self._ticker = self._loop.call_later(_TICK_S, self._tick)

    def stop(self) -> None:
        """Say goodbye and fail what is left."""
        self._ticker.cancel()
        for link in self.links:
            link.close()

    @property
    def model(self) -> Model | None:
        """What is served: the first executor's model. None until one was welcomed."""
        return next((link.model for link in self.links if link.model is not None), None)

    def not_ready(self) -> str:
        """Why no request can run now, for people; empty when one can."""
        reasons = [
            f"executor {link.name}: {why}" for link in self.links if (why := link.not_ready())
        ]
        return "; ".join(reasons) if len(reasons) == len(self.links) else ""

    def require_model(self) -> Model:
        """The model.

        Raises:
            Refused: none is loaded yet.
        """
        if (model := self.model) is None:
            raise Refused(Code.UNAVAILABLE, f"Loading model ({self.not_ready()}); retry soon.")
        return model

    def open(self) -> Inbox:
        """A new inbox; it must be closed with `release`."""
        inbox = Inbox(asyncio.get_running_loop())
        self._inboxes.add(inbox)
        return inbox

    def release(self, inbox: Inbox) -> None:
        """Close an inbox, aborting what is unfinished."""
        inbox.close()
        self._inboxes.discard(inbox)

    def submit(
        self, inbox: Inbox, prompts: Sequence[Sequence[int]], options: SubmitOptions
    ) -> None:
        """Start `options.n` choices after each prompt; choice k of prompt p is `p * n + k`.

        Raises:
            Refused: no executor is ready.
        """
        for index, tokens in enumerate(prompts):
            self._last_id += 1
            link = self._pick()
            link.submit(inbox, index * options.n, self._last_id, tokens, options)

    def fail_all(self, failure: Refused) -> None:
        """End every request in progress (the time to drain is over)."""
        for inbox in self._inboxes:
            inbox.fail(failure)

    @property
    def in_progress(self) -> int:
        """HTTP requests that wait for tokens."""
        return len(self._inboxes)

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(_TICK_S, self._tick)
        now = self._loop.time()
        for inbox in self._inboxes:
            inbox.tick(now)

    def _pick(self) -> Link:
        """The least loaded executor that is ready and serves the model."""
        ready = [link for link in self._serving() if not link.not_ready()]
        if not ready:
            log.info("no executor is ready: %s", self.not_ready())
            raise Refused(Code.UNAVAILABLE, self._away())
        return min(ready, key=lambda link: link.load)

    def _away(self) -> str:
        """For people who wait for an answer; `not_ready` has the details."""
        reported = [link.not_ready() for link in self.links if link.status is not None]
        if not reported:
            return "The model is being restarted; try again in a few seconds."
        return f"The model is not ready ({'; '.join(reported)}); try again in a few seconds."

    def _serving(self) -> Iterator[Link]:
        """Executors that serve the same as the first one."""
        if (model := self.model) is None:
            return
        for link in self.links:
            if link.model is not None and link.model.meaning == model.meaning:
                yield link


ENGINE = web.AppKey("engine", Engine)
