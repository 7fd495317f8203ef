from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import ApiError, error_response
from gateway.limits import Admission, Limits, Ticket


def refused(admission: Admission, key: str, tokens: int) -> ApiError:
    with pytest.raises(ApiError) as caught:
        admission.enter(key, tokens)
    return caught.value


def try_to_enter(admission: Admission, key: str, tokens: int) -> Ticket | int:
    """The ticket, or the status of the refusal."""
    try:
        return admission.enter(key, tokens)
    except ApiError as error:
        return error.status


def test_the_server_full_is_a_503_with_a_whole_number_of_seconds_to_wait() -> None:
    admission = Admission(Limits(max_requests=2, max_queued_tokens=100, per_key_requests=0))
    first = admission.enter("a", 1)
    admission.enter("b", 1)
    error = refused(admission, "c", 1)
    assert (error.status, error.code) == (503, "overloaded")
    assert error_response(error).headers["Retry-After"].isdigit()
    assert "2" in error.message
    first.leave()
    admission.enter("c", 1)


def test_a_key_at_its_limit_is_a_429_and_other_keys_go_on() -> None:
    admission = Admission(Limits(max_requests=9, max_queued_tokens=100, per_key_requests=2))
    tickets = [admission.enter("a", 1), admission.enter("a", 1)]
    error = refused(admission, "a", 1)
    assert (error.status, error.code, error.type) == (
        429,
        "rate_limit_exceeded",
        "rate_limit_error",
    )
    assert error_response(error).headers["Retry-After"].isdigit()
    admission.enter("b", 1)
    tickets[0].leave()
    admission.enter("a", 1)


def test_without_api_keys_there_is_no_limit_per_key() -> None:
    admission = Admission(Limits(max_requests=9, max_queued_tokens=100, per_key_requests=1))
    for _ in range(9):
        admission.enter("", 1)


def test_prompt_tokens_count_until_the_first_token_comes() -> None:
    admission = Admission(Limits(max_requests=9, max_queued_tokens=100, per_key_requests=0))
    waiting = admission.enter("a", 60)
    error = refused(admission, "b", 41)
    assert error.status == 503
    assert all(number in error.message for number in ("60", "41", "100"))
    admission.enter("b", 40)
    waiting.started()
    waiting.started()
    admission.enter("b", 60)
    assert admission.queued_tokens == 100


def test_a_prompt_above_the_whole_bound_is_let_in_when_nothing_waits() -> None:
    admission = Admission(Limits(max_requests=9, max_queued_tokens=100, per_key_requests=0))
    with admission.enter("a", 500):
        assert refused(admission, "a", 1).status == 503
    assert (admission.requests, admission.queued_tokens) == (0, 0)


def test_leaving_twice_counts_once_also_after_an_exception() -> None:
    admission = Admission(Limits(max_requests=9, max_queued_tokens=100, per_key_requests=1))
    with pytest.raises(RuntimeError), admission.enter("a", 10) as ticket:
        raise RuntimeError
    ticket.leave()
    assert (admission.requests, admission.queued_tokens) == (0, 0)
    admission.enter("a", 10)


def test_a_draining_server_lets_nobody_in_and_forgets_nobody() -> None:
    admission = Admission(Limits(max_requests=9, max_queued_tokens=100, per_key_requests=0))
    inside = admission.enter("a", 1)
    admission.drain()
    error = refused(admission, "a", 1)
    assert (error.status, error.code) == (503, "draining")
    assert admission.requests == 1
    inside.leave()
    assert admission.requests == 0


@given(
    st.lists(st.tuples(st.sampled_from("esl"), st.sampled_from(["", "a", "b"]), st.integers(0, 60)))
)
def test_whatever_comes_and_goes_the_counts_are_those_of_who_is_inside(
    moves: list[tuple[str, str, int]],
) -> None:
    admission = Admission(Limits(max_requests=5, max_queued_tokens=100, per_key_requests=2))
    inside: list[tuple[Ticket, str, int]] = []
    for kind, key, number in moves:
        if kind == "e":
            mine = sum(k == key for _, k, _ in inside)
            queued = sum(tokens for _, _, tokens in inside)
            full = len(inside) == 5 or (queued > 0 and queued + number > 100)
            entered = try_to_enter(admission, key, number)
            if isinstance(entered, Ticket):
                assert not full
                inside.append((entered, key, number))
            else:
                assert entered == (429 if key and mine == 2 else 503)
                assert entered == 429 or full
        elif inside:
            at = number % len(inside)
            ticket, owner, _ = inside[at]
            if kind == "s":
                ticket.started()
                inside[at] = (ticket, owner, 0)
            else:
                ticket.leave()
                del inside[at]
        assert admission.requests == len(inside)
        assert admission.queued_tokens == sum(tokens for _, _, tokens in inside)
        assert all(count <= 2 for key, count in Counter(k for _, k, _ in inside).items() if key)
