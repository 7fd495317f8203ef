"""Another's client, read right."""

from __future__ import annotations

import pytest

from bench.vllm_client import KEYS, Failed, figures

RESULT = {key: float(index) for index, key in enumerate(KEYS)}


def test_figures_take_our_names() -> None:
    read = figures({**RESULT, "completed": 8, "output_throughput": 120.5}, 8)
    assert read["output tokens/s"] == 120.5
    assert len(read) == len(KEYS)


def test_a_run_with_lost_requests_gives_no_figures() -> None:
    with pytest.raises(Failed, match="7 of 8"):
        figures({**RESULT, "completed": 7}, 8)
