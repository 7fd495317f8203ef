"""How much is let in: requests in all, prompt tokens that wait, requests of one key.

Refusing at the door is cheaper than queueing without end: a queue longer than clients wait only makes
tokens nobody reads. 429 is this key's own limit, 503 the server's.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from aiohttp import web

from gateway.errors import ApiError, counted, from_refusal
from wire.errors import Code


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one gateway. `per_key_requests` 0 means no bound per key."""

    max_requests: int
    max_queued_tokens: int
    per_key_requests: int


class Ticket:
    """One admitted request. Leave exactly when it ends; leaving twice is harmless."""

    __slots__ = ("_admission", "_inside", "_key", "_tokens")

    def __init__(self, admission: Admission, key: str, tokens: int) -> None:
        self._admission = admission
        self._key = key
        self._tokens = tokens
        self._inside = True

    def started(self) -> None:
        """The first token came: the prompt waits no longer. Harmless when repeated."""
        self._admission.queued_tokens -= self._tokens
        self._tokens = 0

    def leave(self) -> None:
        """The request ended, in whatever way."""
        if self._inside:
            self._inside = False
            self.started()
            self._admission._leave(self._key)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()


class Admission:
    """Counts what is inside and refuses what would be too much.

    Attributes:
        requests: in progress.
        queued_tokens: prompt tokens of requests that have no token yet.
        draining: nothing new is let in.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.requests = 0
        self.queued_tokens = 0
        self.draining = False
        self._per_key: Counter[str] = Counter()

    def enter(self, key: str, prompt_tokens: int) -> Ticket:
        """Let a request in.

        Args:
            key: whose limit counts, as `request[auth.KEY_ID]`; "" (no API keys in use) has none.
            prompt_tokens: of all its prompts together.

        Raises:
            ApiError: 429 at the key's limit; 503 when the server is full or draining.
        """
        limits = self.limits
        if self.draining:
            raise from_refusal(
                Code.DRAINING, "This server is shutting down; retry, or use another replica."
            )
        if key and limits.per_key_requests and self._per_key[key] >= limits.per_key_requests:
            raise ApiError(
                429,
                f"This API key has {counted(self._per_key[key], 'request')} in progress and may have "
                f"{limits.per_key_requests}; wait for one to finish "
                "(--per-key-requests, GATEWAY_PER_KEY_REQUESTS).",
                type="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after=1,
            )
        if self.requests >= limits.max_requests:
            raise from_refusal(
                Code.OVERLOADED,
                f"The server has {counted(self.requests, 'request')} in progress and takes "
                f"{limits.max_requests}; retry later (--max-requests, GATEWAY_MAX_REQUESTS).",
            )
        waiting = self.queued_tokens
        # A prompt larger than the whole bound is let in when nothing waits, else it never would be.
        if waiting and waiting + prompt_tokens > limits.max_queued_tokens:
            raise from_refusal(
                Code.OVERLOADED,
                f"{waiting} prompt tokens wait already; with the {prompt_tokens} of this request "
                f"they exceed {limits.max_queued_tokens}; retry later "
                "(--max-queued-tokens, GATEWAY_MAX_QUEUED_TOKENS).",
            )
        self.requests += 1
        self.queued_tokens += prompt_tokens
        self._per_key[key] += 1
        return Ticket(self, key, prompt_tokens)

    def drain(self) -> None:
        """Let nobody in any more; those inside go on."""
        self.draining = True

    def _leave(self, key: str) -> None:
        self.requests -= 1
        self._per_key[key] -= 1
        if not self._per_key[key]:
            del self._per_key[key]


ADMISSION = web.AppKey("admission", Admission)
