from __future__ import annotations

import io

import pytest

from pagekeeper.progress import BAR_CELLS, Progress, bar, loading


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("12:00:01 I executor loading smollm2 37%", ("smollm2", 37)),
        ('{"level":"info","message":"loading a/b 100%"}', ("a/b", 100)),
        ("loading x 250%", ("x", 100)),
        ("loaded smollm2 in 3 s", None),
        ("pool is 37% full", None),
    ],
)
def test_load_lines_are_told_from_others(line: str, found: tuple[str, int] | None) -> None:
    assert loading(line) == found


@pytest.mark.parametrize("percent", [0, 1, 50, 99, 100])
def test_the_bar_is_full_only_at_the_end(percent: int) -> None:
    assert len(bar(percent)) == BAR_CELLS
    assert ("░" not in bar(percent)) == (percent == 100)


def test_without_a_terminal_each_quarter_is_one_plain_line() -> None:
    out = io.StringIO()
    progress = Progress(out)
    for percent in range(0, 101):
        progress.loading("m", percent)
    progress.done()
    assert out.getvalue().splitlines() == [f"loading m {p} %" for p in range(0, 101, 25)]
    assert "\x1b" not in out.getvalue()


def test_on_a_terminal_log_lines_are_whole_and_the_bar_stays_below_them() -> None:
    out = Terminal()
    progress = Progress(out)
    progress.loading("m", 50)
    progress.line("a log line")
    assert "\r\x1b[2Ka log line\n" in out.getvalue()
    assert out.getvalue().endswith(" 50 %")
    progress.done()
    assert out.getvalue().endswith("\r\x1b[2K")
