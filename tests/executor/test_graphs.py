"""Which steps are replayed, and as which batch; recording itself needs a GPU."""

from __future__ import annotations

import pytest
import torch

from executor.graphs import Graphs, buckets
from tests.executor.recorder import Replays


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (33, [1, 2, 4, 8, 16, 24, 32, 33]),
    ],
)
def test_buckets_rise_to_the_largest_batch(most: int, sizes: list[int]) -> None:
    assert buckets(most) == sizes


@pytest.mark.parametrize("most", range(1, 70))
def test_a_batch_takes_the_smallest_bucket_that_holds_it(most: int) -> None:
    graphs = Graphs(torch.zeros, most, Replays())
    assert list(graphs.capture())[-1] == (len(buckets(most)), len(buckets(most)))
    for rows in range(1, most + 1):
        bucket = graphs.bucket(rows)
        assert bucket == min(size for size in buckets(most) if size >= rows)
        assert bucket - rows <= 7
    assert graphs.bucket(most + 1) is None


def test_the_largest_batch_is_recorded_first_so_that_all_share_its_memory() -> None:
    replays = Replays()
    list(Graphs(torch.zeros, 24, replays).capture())
    assert [len(result) for result in replays.results] == [24, 16, 8, 4, 2, 1]


def test_a_batch_that_was_not_recorded_is_not_replayed() -> None:
    graphs = Graphs(torch.zeros, 24, Replays())
    assert graphs.bucket(3) is None
    next(graphs.capture())
    assert (graphs.bucket(3), graphs.bucket(17)) == (None, 24)
