from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from wire.announce import announced


def test_the_file_is_there_with_our_pid_while_the_body_runs(tmp_path: Path) -> None:
    path = tmp_path / "run" / "a.json"
    with announced(path, url="http://a"):
        assert json.loads(path.read_bytes()) == {"url": "http://a", "pid": os.getpid()}
        assert [entry.name for entry in path.parent.iterdir()] == ["a.json"]
        assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not path.exists()


def test_it_is_taken_away_after_an_error_too(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with pytest.raises(KeyError), announced(path):
        raise KeyError
    assert not path.exists()


@pytest.mark.parametrize("later", [b'{"pid": 1}', b"", b"{", b"[]", b'{"pid": "x"}', b"\xff"])
def test_a_file_that_somebody_else_wrote_meanwhile_stays(tmp_path: Path, later: bytes) -> None:
    path = tmp_path / "a.json"
    with announced(path):
        path.write_bytes(later)
    assert path.read_bytes() == later


def test_a_file_that_is_gone_already_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with announced(path):
        path.unlink()


def test_a_file_that_cannot_be_written_costs_a_warning_and_an_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: Path, content: bytes) -> int:
        self.touch()
        raise OSError(28, "No space left on device")

    path = tmp_path / "a.json"
    path.write_bytes(b'{"pid": 1}')
    monkeypatch.setattr(Path, "write_bytes", full)
    with announced(path):
        assert list(tmp_path.iterdir()) == []
    assert f"{path} cannot be written: No space left on device" in caplog.text
