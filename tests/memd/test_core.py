"""Who may speak: registration, generations, epochs, step numbers, leases."""

from __future__ import annotations

from memd.journal import replay
from tests.memd.driver import ME, OTHER, Driver, memory, pack, spec
from wire.errors import Code
from wire.memory import Admit, Goodbye, Granted, Register, Registered, Rejected, Step


def test_a_registration_tells_identity_generation_and_lease() -> None:
    reply = memory(lease_ms=1234).handle(0.0, Register((1, 9), ME, spec()))
    assert reply == Registered("boot", 7, ME, 1, 1234)


def test_another_major_protocol_is_refused_with_both_versions() -> None:
    reply = memory().handle(0.0, Register((2, 0), ME, spec()))
    assert isinstance(reply, Rejected)
    assert reply.code == Code.PROTOCOL
    assert "2.0" in reply.message
    assert "1.0" in reply.message


def test_a_pool_held_by_a_living_instance_is_busy_until_its_lease_ends() -> None:
    one = Driver()
    one.now = 2.9
    reply = one.memory.handle(one.now, Register((1, 0), OTHER, one.spec))
    assert isinstance(reply, Rejected)
    assert reply.code == Code.POOL_BUSY
    assert isinstance(one.memory.handle(3.0, Register((1, 0), OTHER, one.spec)), Registered)
    assert one.rejected().code == Code.FENCED
    assert [ended.reason for ended in one.memory.tick(3.0)] == ["lease"]


def test_registering_again_starts_a_cold_pool_of_a_higher_generation() -> None:
    one = Driver()
    one.cached(range(8), 1)
    before = one.generation
    one.register()
    assert one.generation == before + 1
    assert one.admit(1, range(9)).admitted[0].computed == 0


def test_generations_rise_for_the_whole_life_of_memd_across_pools() -> None:
    held = memory()
    seen = [
        Driver(under=held, name="x").generation,
        Driver(under=held, name="y").generation,
        Driver(under=held, name="x").generation,
    ]
    assert seen == [1, 2, 3]


def test_a_step_of_another_instance_generation_or_epoch_is_fenced() -> None:
    one = Driver()
    before = one.memory.digest()
    for step in (Step(OTHER, 1, 7, 1), Step(ME, 2, 7, 1), Step(ME, 1, 6, 1)):
        reply = one.memory.handle(0.0, step)
        assert isinstance(reply, Rejected)
        assert (reply.code, reply.boot_id, reply.epoch) == (Code.FENCED, "boot", 7)
    assert one.memory.digest() == before


def test_the_same_number_again_is_answered_with_the_same_reply_and_done_once() -> None:
    one = Driver()
    step = Step(ME, 1, 7, 1, admits=[Admit(1, pack(range(9)), 100)])
    first = one.memory.handle(0.0, step)
    before = one.memory.pools["p"].counts()
    assert one.memory.handle(0.0, step) is first
    assert one.memory.pools["p"].counts() == before


def test_an_older_number_is_stale_and_a_skipped_one_a_gap() -> None:
    one = Driver()
    one.step()
    one.step()
    for number, code in ((0, Code.STALE), (1, Code.STALE), (4, Code.GAP)):
        reply = one.memory.handle(0.0, Step(ME, 1, 7, number))
        assert isinstance(reply, Rejected)
        assert (reply.code, reply.number) == (code, number)


def test_the_end_of_a_lease_frees_all_its_executor_held_and_fences_it() -> None:
    one = Driver()
    one.admit(1, range(9))
    one.now = 2.0
    one.step()  # renews
    assert one.memory.tick(4.9) == []
    (ended,) = one.memory.tick(5.0)
    assert (ended.pool, ended.generation, ended.reason) == ("p", 1, "lease")
    assert (ended.sequences, ended.used) == (1, 3)
    assert not one.memory.pools
    one.now = 5.0
    assert one.rejected().code == Code.FENCED


def test_a_step_after_the_lease_is_fenced_even_before_a_tick() -> None:
    one = Driver()
    one.now = 3.0
    reply = one.send()
    assert isinstance(reply, Rejected)
    assert reply.code == Code.FENCED
    assert not one.memory.pools


def test_goodbye_ends_the_pool_at_once_and_a_second_one_is_fenced() -> None:
    one = Driver()
    one.admit(1, range(9))
    reply = one.memory.handle(0.0, Goodbye(ME, 1))
    assert isinstance(reply, Granted)
    assert reply.number == 0
    assert not one.memory.pools
    again = one.memory.handle(0.0, Goodbye(ME, 1))
    assert isinstance(again, Rejected)
    assert again.code == Code.FENCED


def test_two_executors_with_two_pools_do_not_touch_each_other() -> None:
    held = memory()
    one, two = Driver(under=held, name="x"), Driver(under=held, name="y", instance=OTHER)
    one.cached(range(8), 1)
    assert two.admit(1, range(9)).admitted[0].computed == 0
    held.handle(0.0, Goodbye(OTHER, two.generation))
    assert one.admit(2, range(9)).admitted[0].computed == 8


def test_the_journal_replays_to_the_same_digest() -> None:
    one = Driver()
    one.cached(range(8), 1)
    one.admit(2, range(11))
    one.send(frees=[99])
    one.memory.pin("p", one.table(2)[0], one.now)
    one.now = 1.5
    one.append(2, 13)
    assert replay(one.memory.journal, memory()).digest() == one.memory.digest()
