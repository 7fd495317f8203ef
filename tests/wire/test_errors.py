from __future__ import annotations

from wire.errors import Code, Refused

# Clients and dashboards match on these words; a new one may be added, none may change.
WORDS = {
    "invalid_request", "context_length_exceeded", "kv_pool_too_small", "poison_request",
    "unknown_sequence", "duplicate_id", "non_finite_logits", "overloaded", "draining", "unavailable",
    "pool_busy", "no_free_blocks", "behind_refused", "executor_lost", "internal_error",
    "protocol_mismatch", "fenced", "stale_step", "step_gap",
}  # fmt: skip


def test_the_words_that_travel_stay_as_published() -> None:
    assert {code.value for code in Code} >= WORDS


def test_a_request_at_fault_is_never_worth_a_retry() -> None:
    at_fault = list(Code)[: list(Code).index(Code.OVERLOADED)]
    assert not any(code.retryable for code in at_fault)


def test_a_refusal_reads_as_its_code_and_its_sentence() -> None:
    refused = Refused(Code.NEVER_FITS, "needs 90 blocks, the pool has 63")
    assert str(refused) == "kv_pool_too_small: needs 90 blocks, the pool has 63"
    assert (refused.code, refused.message) == (Code.NEVER_FITS, "needs 90 blocks, the pool has 63")
