"""Result files that could not be written are refused before anything is measured."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench import output
from bench.load.options import parse


def test_a_file_in_a_folder_that_is_there_is_taken(tmp_path: Path) -> None:
    assert output.file(str(tmp_path / "new.csv")) == tmp_path / "new.csv"
    (tmp_path / "old.csv").write_text("x")
    assert output.file(str(tmp_path / "old.csv")) == tmp_path / "old.csv"


@pytest.mark.parametrize(
    ("name", "why"), [("nope/x.csv", "there is no folder"), ("", "is a folder")]
)
def test_what_cannot_be_written_is_refused(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=why):
        output.file(str(tmp_path / name))


@pytest.mark.parametrize("flag", ["--csv", "--json", "--plot"])
def test_the_load_client_says_so_at_once(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse("", [flag, str(tmp_path / "nope" / "file")])
    assert "there is no folder" in capsys.readouterr().err
