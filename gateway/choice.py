"""One choice of a request: its tokens become text, cut at a stop string, with logprobs that match. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gateway.detokenize import Detokenizer
from gateway.openai import FinishReason
from gateway.stops import StopScanner
from wire.generate import Delta, TokenLogprobs


class TokenEntry(msgspec.Struct, frozen=True):
    """One shown token and its log-probabilities."""

    token: int
    offset: int  # characters of the choice's text before it
    logprobs: TokenLogprobs


class Piece(msgspec.Struct, frozen=True):
    """What one delta adds to one choice. At most one piece of a choice has a finish reason: its last."""

    choice: int
    text: str
    finish: FinishReason | None = None
    entries: Sequence[TokenEntry] = ()


class Choice:
    """Turns the deltas of one choice into pieces.

    Args:
        index: among the choices of the HTTP request.
        detokenizer: knows the prompt.
        stops: stop strings; `include_stop` shows them.
        min_tokens: before which no stop string counts.
        offset: characters in front of the choice's first token (an echoed prompt).

    Attributes:
        generated: tokens so far, the one that ended it included.
        cached: prompt tokens that were not computed.
        queued_ms: how long its request waited for its first step.
        finished: nothing may be fed any more.
    """

    __slots__ = (
        "_decoded",
        "_detokenizer",
        "_entries",
        "_min_tokens",
        "_scanner",
        "_shown",
        "_stops",
        "cached",
        "finished",
        "generated",
        "index",
        "queued_ms",
    )

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        offset: int = 0,
    ) -> None:
        self.index = index
        self.generated = 0
        self.cached = 0
        self.queued_ms = 0
        self.finished = False
        self._detokenizer = detokenizer
        self._stops = bool(stops)
        self._scanner = StopScanner(stops, include_stop)
        self._min_tokens = min_tokens
        self._decoded = offset  # characters decoded, shown or held
        self._shown = offset  # characters shown
        self._entries: list[TokenEntry] = []  # whose text is not shown yet

    def feed(self, delta: Delta) -> Piece:
        """Take the next tokens."""
        if len(delta.tokens) == 1 and not (
            self._stops
            or delta.finish
            or delta.logprobs
            or delta.cached
            or delta.queued_ms
            or self._entries
        ):
            # Nearly every delta there is. What follows would make the same of it, at several times the cost.
            text = self._detokenizer.feed_one(delta.tokens[0])
            self.generated += 1
            self._decoded += len(text)
            self._shown += len(text)
            return Piece(self.index, text)
        self.cached = self.cached or delta.cached
        self.queued_ms = self.queued_ms or delta.queued_ms
        # An end or stop id ends the text; it is not part of it.
        tokens = delta.tokens[:-1] if delta.finish == "stop" else delta.tokens
        shown, stopped = "", False
        for position, token in enumerate(tokens):
            self.generated += 1
            if delta.logprobs:
                self._entries.append(TokenEntry(token, self._decoded, delta.logprobs[position]))
            text, stopped = self._scan(self._detokenizer.feed_one(token))
            shown += text
            if stopped:
                break
        if not stopped and delta.finish:
            self.generated += len(delta.tokens) - len(tokens)
            text, stopped = self._scan(self._detokenizer.flush())
            shown += text if stopped else text + self._scanner.release()
        self._shown += len(shown)
        self.finished = stopped or bool(delta.finish)
        finish: FinishReason | None = None
        if self.finished:
            finish = "length" if delta.finish == "length" and not stopped else "stop"
        return Piece(self.index, shown, finish, self._release_entries(stopped))

    def _scan(self, text: str) -> tuple[str, bool]:
        """What of the decoded text is shown now, and whether a stop string ended it."""
        self._decoded += len(text)
        if self.generated < self._min_tokens:
            return self._scanner.skip(text), False
        scanned = self._scanner.feed(text)
        return scanned.text, scanned.stop is not None

    def _release_entries(self, stopped: bool) -> list[TokenEntry]:
        """Entries go out with the text they begin; those cut off by a stop string never do."""
        if not self._entries:
            return []
        everything = self.finished and not stopped
        count = 0
        while count < len(self._entries) and (
            everything or self._entries[count].offset < self._shown
        ):
            count += 1
        released, self._entries = self._entries[:count], self._entries[count:]
        return released
