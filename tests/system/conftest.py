"""Stacks of real processes on a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.stack import Stack
from tests.tiny import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(
        tmp_path_factory.mktemp("model"), architecture="llama", max_position_embeddings=4096
    )


@pytest.fixture(scope="module")
def stack(tiny_model: Path) -> Iterator[Stack]:
    """An ordinary server: room for everything these tests ask."""
    running = Stack(tiny_model, executor={"dtype": "float32", "num-blocks": "2049"})
    try:
        yield running.up()
    finally:
        running.down()
