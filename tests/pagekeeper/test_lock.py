from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagekeeper.lock import AlreadyRunning, RunLock, owner


def test_a_second_launcher_is_told_who_runs(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        with pytest.raises(AlreadyRunning) as refused:
            RunLock(tmp_path)
        assert refused.value.pid == os.getpid()
        assert owner(tmp_path) == os.getpid()
    assert owner(tmp_path) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_file_left_by_a_killed_launcher_locks_nobody_out(tmp_path: Path) -> None:
    (tmp_path / "pagekeeper.lock").write_text("999999\n")
    assert owner(tmp_path) == 0
    with RunLock(tmp_path):
        assert owner(tmp_path) == os.getpid()
