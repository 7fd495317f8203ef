from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from memd.epoch import EPOCH_FILE, LOCK_FILE, AlreadyRunning, RunLock, identify, next_epoch


def test_the_first_epoch_is_one_and_each_start_counts_one_more(tmp_path: Path) -> None:
    assert [next_epoch(tmp_path) for _ in range(3)] == [1, 2, 3]


def test_the_epoch_is_on_disk_before_it_is_used(tmp_path: Path) -> None:
    epoch = next_epoch(tmp_path)
    assert (tmp_path / EPOCH_FILE).read_text() == f"{epoch}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == [EPOCH_FILE]


def test_a_missing_state_directory_is_made(tmp_path: Path) -> None:
    assert next_epoch(tmp_path / "a" / "b") == 1
    assert next_epoch(tmp_path / "a" / "b") == 2


@pytest.mark.parametrize(
    "damage", [b"", b"x", b"-5\n", b"1.5", b"\xff\xfe", b"0", b"9" * 30, b"1 2", b"\0" * 4096]
)
def test_a_damaged_file_gives_a_high_epoch_and_later_starts_count_on_from_it(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        next_epoch(tmp_path)
    (tmp_path / EPOCH_FILE).write_bytes(damage)
    with caplog.at_level(logging.WARNING):
        high = next_epoch(tmp_path)
    assert 2**52 <= high < 2**53 - 1
    assert "random epoch" in caplog.text
    assert next_epoch(tmp_path) == high + 1


def test_where_nothing_can_be_written_every_start_has_a_high_epoch_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / EPOCH_FILE).mkdir()  # cannot be replaced by a file, whoever we are
    with caplog.at_level(logging.WARNING):
        epochs = {next_epoch(tmp_path) for _ in range(5)}
    assert len(epochs) == 5
    assert min(epochs) >= 2**52
    assert "cannot be written" in caplog.text


def test_a_state_directory_that_is_a_file_does_not_keep_memd_from_starting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert next_epoch(tmp_path / "file") >= 2**52


def test_a_full_disk_does_not_lose_the_old_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_epoch(tmp_path)

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    assert next_epoch(tmp_path) >= 2**52
    monkeypatch.undo()
    assert next_epoch(tmp_path) == 2


def test_boot_id_and_key_are_new_at_every_start(tmp_path: Path) -> None:
    first, second = identify(tmp_path), identify(tmp_path)
    assert first.boot_id != second.boot_id
    assert first.key != second.key
    assert len(first.key) == 32
    assert second.epoch == first.epoch + 1
    assert first.key.hex() not in repr(first)
    assert "key" not in repr(first)


def test_a_second_lock_is_refused_naming_who_has_the_first(tmp_path: Path) -> None:
    lock = RunLock(tmp_path)
    with pytest.raises(AlreadyRunning, match=f"process {os.getpid()}.*--run-dir"):
        RunLock(tmp_path)
    lock.release()
    RunLock(tmp_path).release()


def test_a_lock_file_left_by_a_dead_process_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("999999999999\n")
    RunLock(tmp_path).release()
    assert (tmp_path / LOCK_FILE).read_text() == f"{os.getpid()}\n"
