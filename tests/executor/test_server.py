"""Sessions of gateways, over a real socket."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.executor.house import CARD, Gateway, House
from tests.fakes import VOCAB, oracle
from wire.errors import Code
from wire.generate import Abort, Bye, Ping


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.close()
    house.local.core.check()


@pytest.fixture
def gateway(house: House) -> Iterator[Gateway]:
    gateway = Gateway(house)
    yield gateway
    gateway.close()


def test_hello_brings_the_card_and_a_status(gateway: Gateway) -> None:
    gateway.await_(lambda: gateway.statuses)
    assert gateway.welcome is not None
    assert gateway.welcome.card == CARD
    assert gateway.welcome.session_ms == 3000
    assert gateway.statuses[0].blocks_total == 4000


def test_hello_is_answered_with_the_reason_while_the_model_loads(tmp_path: Path) -> None:
    house = House(tmp_path, opened=False)
    house.server.reason = "loading tiny: weights, 40%"
    gateway = Gateway(house)
    assert (gateway.gone[0].code, gateway.gone[0].message) == (
        Code.UNAVAILABLE,
        "loading tiny: weights, 40%",
    )
    house.open()
    gateway.hello()
    assert gateway.welcome is not None
    gateway.close()
    house.close()


def test_a_request_streams_its_tokens_and_its_last_delta_says_why(gateway: Gateway) -> None:
    gateway.submit(1, [4, 5, 6], 10, n=2)
    gateway.await_(lambda: len(gateway.finished) == 2)
    assert gateway.texts[1, 0] == oracle([4, 5, 6], 0, 10)
    assert gateway.texts[1, 1] == oracle([4, 5, 6], 1, 10)
    assert set(gateway.finished.values()) == {"length"}


def test_one_message_per_step_carries_all_of_a_gateways_requests(
    house: House, gateway: Gateway
) -> None:
    for request in range(1, 9):
        gateway.submit(request, [request], 10)
    gateway.await_(lambda: len(gateway.finished) == 8)
    assert len(gateway.events) <= house.engine.steps
    assert max(len(e.deltas) + len(e.tokens.indices) for e in gateway.events) == 8


def test_two_gateways_may_use_the_same_ids(house: House, gateway: Gateway) -> None:
    other = Gateway(house)
    gateway.submit(1, [4], 6)
    other.submit(1, [5], 6)
    gateway.await_(lambda: gateway.finished)
    other.await_(lambda: other.finished)
    assert gateway.texts[1, 0] == oracle([4], 0, 6)
    assert other.texts[1, 0] == oracle([5], 0, 6)
    other.close()


def test_refusals_come_back_as_failures_with_their_reason(gateway: Gateway) -> None:
    gateway.submit(1, [VOCAB])
    gateway.submit(2, [1] * 5000)
    gateway.submit(3, [])
    gateway.submit(4, [3, 4], 5)
    gateway.await_(lambda: gateway.finished)
    codes = {request: failed.code for request, failed in gateway.failed.items()}
    assert codes == {1: Code.INVALID, 2: Code.CONTEXT_LENGTH, 3: Code.INVALID}
    assert gateway.texts[4, 0] == oracle([3, 4], 0, 5)


def test_a_repeated_id_fails_and_takes_the_older_request_with_it(
    house: House, gateway: Gateway
) -> None:
    gateway.submit(1, [1], 4000)
    gateway.submit(1, [2], 5)
    gateway.await_(lambda: gateway.failed)
    assert gateway.failed[1].code is Code.DUPLICATE
    house.until(lambda: not house.scheduler.busy)


def test_an_abort_frees_the_blocks_and_brings_no_event(house: House, gateway: Gateway) -> None:
    gateway.submit(1, [1] * 50, 4000)
    gateway.await_(lambda: gateway.texts)
    assert house.local.used() > 0
    gateway.send(Abort(1))
    gateway.send(Abort(99))
    house.until(lambda: house.local.used() == 0)
    gateway.receive()
    assert not gateway.failed
    assert not gateway.finished


def test_a_silent_gateway_loses_its_session_and_a_pinging_one_does_not(
    house: House, gateway: Gateway
) -> None:
    other = Gateway(house)
    gateway.submit(1, [1], 4000)
    other.submit(1, [2], 4000)
    gateway.await_(lambda: gateway.texts)
    other.await_(lambda: other.texts)
    for _ in range(4):
        house.clock.ahead += 1
        other.send(Ping())
        other.await_(lambda: True)
        house.turn(3)
    assert house.scheduler.requests == 1
    gateway.await_(lambda: gateway.gone)
    gateway.send(Ping())
    gateway.await_(lambda: len(gateway.gone) > 1)
    assert gateway.gone[-1].code is Code.UNAVAILABLE
    other.send(Bye())
    house.until(lambda: not house.scheduler.busy)
    assert house.local.used() == 0
    other.close()


def test_a_session_outlives_a_pause_of_the_executor(house: House, gateway: Gateway) -> None:
    gateway.submit(1, [1], 4000)
    gateway.await_(lambda: gateway.texts)
    house.clock.ahead += 60  # nothing was heard meanwhile, and nothing could be
    house.turn(3)
    assert house.scheduler.requests == 1
    assert not gateway.gone


def test_a_gateway_that_disconnects_has_its_requests_aborted(house: House) -> None:
    gateway = Gateway(house)
    gateway.submit(1, [1], 4000)
    gateway.await_(lambda: gateway.texts)
    gateway.close()
    house.until(lambda: not house.scheduler.busy)
    assert house.local.used() == 0


def test_a_new_session_of_a_gateway_ends_its_old_one(house: House, gateway: Gateway) -> None:
    gateway.submit(1, [1], 4000)
    gateway.await_(lambda: gateway.texts)
    again = Gateway(house, hello=False)
    again.name = gateway.name
    again.hello()
    assert again.welcome is not None
    assert house.scheduler.requests == 0
    again.close()


def test_another_major_protocol_is_turned_away_in_words(house: House) -> None:
    gateway = Gateway(house, hello=False)
    gateway.hello((1, 0))
    assert gateway.gone[0].code is Code.PROTOCOL
    assert "1.0" in gateway.gone[0].message
    assert "2.0" in gateway.gone[0].message
    gateway.close()


def test_malformed_messages_are_dropped_and_too_many_end_the_session(
    house: House, gateway: Gateway
) -> None:
    for junk in (b"", b"\xc1", b"\x91" * 3000, gateway.codec.encode(Ping())[:-1], b"\x92\xa5hello"):
        gateway.send_bytes(junk)
    gateway.submit(1, [1, 2], 4)
    gateway.await_(lambda: gateway.finished)
    assert house.server.bad_frames == 5
    for _ in range(16):
        gateway.send_bytes(b"junk")
    gateway.await_(lambda: gateway.gone)
    assert gateway.gone[0].code is Code.PROTOCOL


def test_a_gateway_that_takes_nothing_is_cut_off_and_others_go_on(house: House) -> None:
    house.runner.deep = False
    stuck = Gateway(house, queue=16)
    for request in range(1, 4):
        stuck.submit(request, [request], 4000)
    good = Gateway(house)
    good.submit(1, [9, 8], 30)
    good.await_(lambda: good.finished)
    assert good.texts[1, 0] == oracle([9, 8], 0, 30)

    house.until(lambda: house.scheduler.requests == 0)
    assert house.scheduler.counters.generated_tokens < 3 * 4000
    stuck.close()
    good.close()


def test_without_a_session_everything_but_hello_is_turned_away(house: House) -> None:
    gateway = Gateway(house, hello=False)
    gateway.submit(1, [1])
    gateway.await_(lambda: gateway.gone)
    assert gateway.gone[0].code is Code.UNAVAILABLE
    assert house.scheduler.requests == 0
    gateway.close()
