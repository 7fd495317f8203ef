from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from wire.logs import configure


@pytest.fixture(autouse=True)
def root_logger_as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text_lines_name_the_process_and_the_level(capsys: pytest.CaptureFixture[str]) -> None:
    configure("memd", "info", "text")
    logging.getLogger("memd.server").warning("lease ended instance=%s", "ab")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.rstrip().endswith("W memd lease ended instance=ab")


def test_json_lines_hold_one_object_each_whatever_the_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    configure("memd", "debug", "json")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logging.getLogger("memd.core").exception('a "quoted"\nmessage %d', 7)
    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert entry["level"] == "error"
    assert entry["logger"] == "memd.core"
    assert entry["message"] == 'a "quoted"\nmessage 7'
    assert "ValueError: two\nlines" in entry["error"]
    assert entry["time"].endswith("Z")


def test_random_ids_are_short_on_info_lines_for_people_and_whole_elsewhere(
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole = "0123456789abcdef" * 2
    configure("gateway", "info", "text")
    logging.getLogger("x").info("refused request=req-%s status=404", whole)
    logging.getLogger("x").error("broke request=req-%s", whole)
    configure("gateway", "info", "json")
    logging.getLogger("x").info("refused request=req-%s", whole)
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.endswith("refused request=req-01234567 status=404")
    assert whole in second
    assert whole in third


def test_lines_below_the_level_are_not_written(capsys: pytest.CaptureFixture[str]) -> None:
    configure("memd", "warning", "text")
    logging.getLogger("x").info("quiet")
    assert capsys.readouterr().err == ""


def test_setting_up_again_does_not_write_lines_twice(capsys: pytest.CaptureFixture[str]) -> None:
    configure("memd", "info", "text")
    configure("memd", "info", "text")
    logging.getLogger("x").info("once")
    assert capsys.readouterr().err.count("once") == 1
