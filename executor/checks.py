"""What every runner asks of a row before any id in it reaches memory, and the plans it warms up with."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from executor.plan import Draw, Plan, Row
from wire.sampling import Sampling


def check_span(row: Row, blocks: int, block_size: int, context_length: int) -> None:
    """
    Raises:
        ValueError: the row's positions are outside the model's or its table's.
    """
    end = row.start + len(row.tokens)
    if not row.tokens or row.start < 0 or end > context_length:
        raise ValueError(
            f"sequence {row.seq}: tokens at positions {row.start} to {end - 1}; the model has "
            f"0 to {context_length - 1}"
        )
    if end > blocks * block_size:
        raise ValueError(
            f"sequence {row.seq}: {end} tokens do not fit {blocks} blocks of {block_size}"
        )


def check_range(what: str, ids: NDArray[np.int64], least: int, end: int) -> None:
    """
    Args:
        ids: at least one.

    Raises:
        ValueError: one is below `least`, or not below `end`.
    """
    if ids.min() < least or ids.max() >= end:
        wrong = ids.min() if ids.min() < least else ids.max()
        raise ValueError(
            f"{what} {wrong} is out of range; the least is {least}, the most {end - 1}"
        )


def warm_up_plans(block_size: int, context_length: int) -> Iterator[Plan]:
    """One prompt and one decode step in block 1."""
    room = min(block_size, context_length)
    count = max(1, room - 1)
    draw = Draw(1, 0, count, Sampling(seed=0, temperature=0), (), ())
    for start, tokens in ((0, [0] * count), (count, [0])):
        if start + len(tokens) <= room:
            yield Plan(0, [Row(1, start, tokens, [1], (draw,))])
