from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from wire.settings import Secret, Size, default_run_dir, flag, load, parse_size


def _even(value: int) -> None:
    if value % 2:
        raise ValueError("must be even")


@dataclass(frozen=True, slots=True)
class Example:
    port: int = flag(8000, "a port", least=0, most=65535)
    share: float = flag(0.5, "100% of it is 1", least=0, most=1)
    memory: Size = flag(Size(1 << 30), "bytes")
    run_dir: Path = flag(Path("/run/x"), "a path")
    state_dir: Path | None = flag(None, "a path or nothing")
    kind: Literal["text", "json"] = flag("text", "one of two")
    hosts: tuple[str, ...] = flag((), "names")
    fast: bool = flag(False, "on or off")
    token: Secret | None = flag(None, "a secret")
    pairs: int = flag(2, "an even number", check=_even)


def read(*argv: str, **environ: str) -> Example:
    return load(Example, program="example", prefix="EX", description="", argv=argv, environ=environ)


def test_without_flags_and_environment_the_defaults_hold() -> None:
    assert read() == Example()


def test_a_flag_beats_the_environment_which_beats_the_default() -> None:
    assert read(EX_PORT="9000").port == 9000
    assert read("--port", "9001", EX_PORT="9000").port == 9001


def test_every_kind_of_field_is_read_from_text() -> None:
    settings = read(
        "--share=0.25", "--memory", "1.5GiB", "--run-dir", "/tmp/r", "--state-dir", "s", "--kind",
        "json", "--hosts", "a, b,,c", "--fast", "--token", "s3cret", "--pairs", "4",
    )  # fmt: skip
    assert settings == Example(
        share=0.25,
        memory=Size(3 << 29),
        run_dir=Path("/tmp/r"),
        state_dir=Path("s"),
        kind="json",
        hosts=("a", "b", "c"),
        fast=True,
        token=Secret("s3cret"),
        pairs=4,
    )


@pytest.mark.parametrize("text", ["true", "1", "YES", "on"])
def test_a_switch_is_turned_on_by_any_word_for_it(text: str) -> None:
    assert read("--fast", text).fast
    assert read(EX_FAST=text).fast


def test_a_switch_that_the_environment_turned_on_can_be_turned_off() -> None:
    assert not read("--fast=false", EX_FAST="1").fast


def test_an_empty_variable_means_nothing_for_an_optional_path() -> None:
    assert read(EX_STATE_DIR="").state_dir is None


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--port", "70000"], {}, "example: --port 70000: must be at most 65535"),
        (["--port", "-1"], {}, "example: --port -1: must be at least 0"),
        (["--port", "http"], {}, "example: --port http: must be a whole number"),
        ([], {"EX_PORT": "9x"}, "example: EX_PORT 9x: must be a whole number"),
        (["--share", "nan"], {}, "example: --share nan: must be at least 0"),
        (["--memory", "lots"], {}, "example: --memory lots: must be a size such as 512MiB or 2GiB"),
        (["--memory", "0"], {}, "example: --memory 0: must be a size above 0"),
        (["--memory=-1GiB"], {}, "example: --memory -1GiB: must be a size above 0"),
        (["--memory", "1e999GiB"], {}, "must be a size"),
        (["--kind", "xml"], {}, "example: --kind xml: must be one of text, json"),
        (["--fast", "maybe"], {}, "example: --fast maybe: must be true or false"),
        (["--pairs", "3"], {}, "example: --pairs 3: must be even"),
    ],
)
def test_a_bad_value_ends_the_process_with_the_flag_the_value_and_the_rule(
    argv: list[str],
    environ: dict[str, str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit, match="2"):
        read(*argv, **environ)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("argv", "environ"), [(["--token", ""], {}), ([], {"EX_TOKEN": " "})])
def test_an_empty_secret_is_an_error_and_not_an_open_door(
    argv: list[str], environ: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        read(*argv, **environ)
    assert "must not be empty" in capsys.readouterr().err


def test_a_secret_is_never_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        read("--token", "s3cret", "--print-config")
    assert "s3cret" not in capsys.readouterr().out
    assert "s3cret" not in repr(read("--token", "s3cret"))


def test_an_abbreviated_or_unknown_flag_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for argv in (["--por", "1"], ["--nonsense"]):
        with pytest.raises(SystemExit, match="2"):
            read(*argv)
    assert "is not a flag of this command" in capsys.readouterr().err


def test_print_config_shows_what_would_be_used_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        read("--print-config", "--memory", "2GiB", EX_PORT="9000")
    shown = json.loads(capsys.readouterr().out)
    assert shown["port"] == 9000
    assert shown["memory"] == "2GiB"
    assert shown["state_dir"] is None


def test_help_names_each_flag_its_default_and_its_twin(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        read("--help")
    shown = " ".join(capsys.readouterr().out.split())
    assert "--port N a port (default 8000) [EX_PORT]" in shown
    assert "100% of it is 1 (default 0.5) [EX_SHARE]" in shown


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("512MiB", 512 << 20), ("2GB", 2 * 10**9), ("1.5 GiB", 3 << 29), ("8k", 8192)],
)
def test_sizes_are_binary_or_decimal_as_written(text: str, size: int) -> None:
    assert parse_size(text) == size


def test_the_run_directory_is_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert default_run_dir() == Path("/run/user/7/pagekeeper")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_run_dir().parent == Path("/tmp")
