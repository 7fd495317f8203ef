"""Error codes every process knows: what each means, whose fault it is, whether a retry can help.

A refusal crosses a socket as a `Code` plus one sentence for people: what, which value, which limit,
what to do. The gateway maps codes to HTTP statuses (`gateway/errors.py`); nothing else decides.
"""

from __future__ import annotations

from enum import StrEnum


class Code(StrEnum):
    """Why something was refused. The value is what travels and what metrics are labelled with."""

    # The request itself is at fault; sending it again cannot help.
    INVALID = "invalid_request"  # a value out of range, an id outside the vocabulary
    CONTEXT_LENGTH = "context_length_exceeded"  # prompt + max_tokens over the model's context
    NEVER_FITS = "kv_pool_too_small"  # needs more blocks than the whole pool has
    POISON = "poison_request"  # executors died running it, more than once
    UNKNOWN_SEQUENCE = "unknown_sequence"  # a sequence id memd has never been told of, or forgot
    DUPLICATE = "duplicate_id"  # an id already in use, or one block twice in a batch
    NOT_NUMBERS = "non_finite_logits"  # the model produced NaN or infinity for this request

    # The server cannot right now; a retry may help.
    OVERLOADED = "overloaded"  # a queue bound was reached
    DRAINING = "draining"  # shutting down, finishes what it has
    UNAVAILABLE = "unavailable"  # a peer process is not there, or not yet
    POOL_BUSY = "pool_busy"  # the pool name is held by an executor whose lease still lives
    NO_BLOCKS = "no_free_blocks"  # this step cannot grow that sequence: preempt or wait
    BEHIND = "behind_refused"  # not looked at: an earlier admission of the step was refused
    LOST = "executor_lost"  # the executor that ran the request is gone
    INTERNAL = "internal_error"  # a bug; the log has the story

    # The two sides disagree about the past; the sender must register again.
    PROTOCOL = "protocol_mismatch"
    FENCED = "fenced"  # stale epoch, generation or lease
    STALE = "stale_step"  # an older step number than the last one answered
    GAP = "step_gap"  # a step number was skipped

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed later without a change by the caller."""
        return self in _RETRYABLE


_RETRYABLE = frozenset(
    {
        Code.OVERLOADED,
        Code.DRAINING,
        Code.UNAVAILABLE,
        Code.POOL_BUSY,
        Code.NO_BLOCKS,
        Code.BEHIND,
        Code.LOST,
        Code.INTERNAL,
    }
)


class Refused(Exception):
    """A call was refused, with the code that travels and the sentence a person reads.

    Attributes:
        code: the reason, for programs.
        message: one sentence: what, which value, which limit, what to do.
    """

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(f"{code.value}: {message}")
        self.code = code
        self.message = message
