from __future__ import annotations

from itertools import chain

import msgspec
import pytest

from memd import views
from tests.memd.driver import Driver, pack
from wire.memory import Admit


def row_ids(page: views.Page) -> list[int]:
    return [row.id for row in page.blocks or []]


def test_slots_filled_counts_each_block_once_even_when_forks_share_its_last_slots() -> None:
    driver = Driver(block_size=4)
    assert views.share_filled(driver.pool) is None
    driver.admit(1, range(6))  # 2 blocks, 6 of 8 slots
    assert views.share_filled(driver.pool) == 6 / 8
    driver.commit(1, 6)
    driver.fork(1, 2, 6)
    assert views.share_filled(driver.pool) == 6 / 8
    driver.append(2, 7)  # a copy of the half-filled block: 3 blocks, 6 + 3 slots
    assert views.share_filled(driver.pool) == 9 / 12
    driver.free(1, 2)
    assert views.share_filled(driver.pool) is None


def test_sharing_saved_is_the_share_of_table_entries_that_cost_no_block() -> None:
    driver = Driver(block_size=4)
    assert views.share_saved(driver.pool) is None
    driver.admit(1, range(7))
    driver.commit(1, 7)
    assert views.share_saved(driver.pool) == 0
    for child in (2, 3, 4):
        driver.fork(1, child, 7)
    assert views.share_saved(driver.pool) == 1 - 2 / 8  # 2 blocks where 8 would be needed
    for child in (2, 3, 4):
        driver.append(child, 8)
    assert views.share_saved(driver.pool) == 1 - 5 / 8
    driver.free(1)
    assert views.share_saved(driver.pool) == 1 - 4 / 6


def test_a_block_tells_its_state_its_readers_and_its_place_in_the_prefix() -> None:
    driver = Driver(block_size=4)
    driver.admit(5, range(10), tenant="acme")
    driver.commit(5, 10)
    driver.fork(5, 6, 10)
    first, second, third = driver.table(5)
    assert views.block_view(driver.pool, third) == views.BlockView(
        id=third,
        state="used",
        refcount=2,
        pins=0,
        generation=1,
        sealed=False,
        filled=2,
        tenant=None,
        parent=None,
        children=0,
        hash=None,
        holders=[views.Holder(5, 2), views.Holder(6, 2)],
        more_holders=0,
    )
    sealed = views.block_view(driver.pool, second)
    assert (sealed.sealed, sealed.filled, sealed.tenant, sealed.parent) == (True, 4, "acme", first)
    assert sealed.hash is not None
    assert len(bytes.fromhex(sealed.hash)) == 8
    head = views.block_view(driver.pool, first)
    assert (head.parent, head.children) == (None, 1)
    driver.free(5, 6)
    assert views.block_view(driver.pool, first).state == "cached"
    assert views.block_view(driver.pool, third).state == "free"
    assert views.block_view(driver.pool, 0).state == "null"


def test_a_copys_source_is_shown_as_quarantined_until_the_next_step() -> None:
    driver = Driver(block_size=4)
    cached = driver.cached(range(8), seq=1)
    granted = driver.admit(2, [0, 1, 2, 3, 4, 5, 99])
    assert [copy.source for copy in granted.copies] == [cached[1]]
    assert views.block_view(driver.pool, cached[1]).state == "quarantined"
    driver.step()
    assert views.block_view(driver.pool, cached[1]).state == "cached"


def test_no_view_holds_a_token_id() -> None:
    driver = Driver(block_size=4)
    secret = 0x5EC2E7
    driver.admit(1, [secret] * 10)
    driver.commit(1, 10)
    pool = driver.pool
    shown = msgspec.json.encode(
        [
            views.pool_view(pool, driver.memory.leases, 0.0),
            views.block_page(pool, None, 0, 100),
            [views.block_view(pool, block) for block in range(pool.total + 1)],
            views.sequence_page(pool, 0, 10),
            views.sequence_view(pool, 1),
        ]
    )
    assert str(secret).encode() not in shown
    assert pack([secret]).hex().encode() not in shown


def test_pages_of_blocks_meet_without_gap_or_overlap() -> None:
    driver = Driver(num_blocks=11, block_size=4)
    driver.cached(range(8), seq=1)
    driver.admit(2, range(100, 110))
    seen, after = [], 0
    while True:
        page = views.block_page(driver.pool, None, after, 3)
        seen += row_ids(page)
        if page.next is None:
            break
        after = page.next
    assert seen == list(range(1, 11))
    by_state = {
        state: row_ids(views.block_page(driver.pool, state, 0, 100))
        for state in ("used", "cached", "free")
    }
    assert by_state["used"] == sorted(driver.table(2))
    assert len(by_state["cached"]) == 2
    assert sorted(chain.from_iterable(by_state.values())) == seen


def test_a_page_for_a_rare_state_gives_up_after_a_bounded_search_and_says_where() -> None:
    driver = Driver(num_blocks=100_000)
    driver.memory.check = lambda: None  # type: ignore[method-assign]
    page = views.block_page(driver.pool, "used", 0, 10)
    assert row_ids(page) == []
    assert page.next == views.MOST_SCANNED


def test_pages_of_sequences_are_in_order_whatever_the_order_of_admission() -> None:
    driver = Driver(num_blocks=50)
    for seq in (9, 3, 7, 1):
        driver.admit(seq, [seq])
    first = views.sequence_page(driver.pool, 0, 3)
    assert [row.seq for row in first.sequences or []] == [1, 3, 7]
    second = views.sequence_page(driver.pool, first.next or 0, 3)
    assert ([row.seq for row in second.sequences or []], second.next) == ([9], None)


def test_a_sequence_shows_its_table_and_which_of_its_blocks_others_read() -> None:
    driver = Driver(block_size=4)
    driver.admit(1, range(10))
    driver.commit(1, 10)
    driver.fork(1, 2, 6)
    view = views.sequence_view(driver.pool, 2)
    assert view == views.SequenceView(
        seq=2,
        tenant="",
        tokens=6,
        computed=6,
        room=6,
        sealed=1,
        table=driver.table(1)[:2],
        shared=[0, 1],
        kin=[1],
    )
    assert views.sequence_view(driver.pool, 3) is None


@pytest.mark.parametrize("blocks", [2, 11, 4097, 4098, 10_000, 100_000])
def test_a_map_covers_every_block_in_a_bounded_number_of_cells(blocks: int) -> None:
    driver = Driver(num_blocks=blocks, block_size=4)
    pool = driver.pool
    view = views.map_view(pool, list(views.map_cells(pool)))
    assert len(view.used) <= views.MOST_CELLS
    assert (len(view.used) - 1) * view.per_cell < pool.total <= len(view.used) * view.per_cell


def test_a_map_of_a_small_pool_shows_each_block() -> None:
    driver = Driver(num_blocks=11, block_size=4)
    cached = driver.cached(range(8), seq=1)
    driver.admit(2, range(100, 106))
    driver.commit(2, 6)
    for child in (3, 4):
        driver.fork(2, child, 6)
    view = views.map_view(driver.pool, list(views.map_cells(driver.pool)))
    assert view.per_cell == view.samples == 1
    for block in range(1, 11):
        state = driver.pool.state_of(block)
        shares = (view.used[block - 1], view.cached[block - 1], view.quarantined[block - 1])
        assert shares == (1000 * (state == "used"), 1000 * (state == "cached"), 0)
        assert view.refs[block - 1] == (30 if block in driver.table(2) else 0)
    assert sum(view.cached) == 1000 * len(cached)


def test_a_map_of_a_large_pool_is_right_in_the_mean() -> None:
    driver = Driver(num_blocks=40_001, block_size=4)
    driver.memory.check = lambda: None  # type: ignore[method-assign]
    driver.step(admits=[Admit(1, pack(range(60_000)), 60_000)])  # 15,000 blocks
    view = views.map_view(driver.pool, list(views.map_cells(driver.pool)))
    assert view.per_cell == 10
    assert abs(sum(view.used) / 1000 * view.per_cell - 15_000) < 10
