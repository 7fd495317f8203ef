"""Flags with environment twins, made from one frozen dataclass per process.

A field `kv_memory` of a process with prefix `EXECUTOR` becomes `--kv-memory` and `EXECUTOR_KV_MEMORY`;
the flag beats the environment, which beats the default. A bad value ends the process with status 2 and one
line that names the flag, the value and the rule. `--print-config` prints what would be used, as JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import msgspec

Config = TypeVar("Config")


class Size(int):
    """A number of bytes; written `512MiB`, `1GiB`, `2GB` or plain digits."""

    def __str__(self) -> str:
        for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if self and self % factor == 0:
                return f"{self // factor}{unit}"
        return str(int(self))


class Secret(str):
    """A key or token: never empty, and shown nowhere (`--print-config` and errors print `***`).

    Raises:
        ValueError: it is empty. An unset secret is no secret; an empty one is a mistake.
    """

    def __new__(cls, text: str) -> Secret:
        if not text.strip():
            raise ValueError("must not be empty: leave it unset, or set a real one")
        return super().__new__(cls, text)

    def __repr__(self) -> str:
        return "'***'"


_UNITS = {
    "": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30,
}  # fmt: skip


def parse_size(text: str) -> Size:
    """Bytes in `text`.

    Raises:
        ValueError: it is not a positive number with a known unit.
    """
    digits = text.strip().rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = text.strip()[len(digits) :].lower()
    if unit not in _UNITS:
        raise ValueError("must be a size such as 512MiB or 2GiB")
    size = float(digits) * _UNITS[unit]
    if not 0 < size < 1 << 60:
        raise ValueError("must be a size above 0")
    return Size(int(size))


def flag(
    default: Any,
    help: str,
    *,
    least: float | None = None,
    most: float | None = None,
    check: Callable[[Any], None] | None = None,
) -> Any:
    """A field of a config dataclass. `check` raises ValueError with the rule that was broken."""
    return dataclasses.field(
        default=default, metadata={"help": help, "least": least, "most": most, "check": check}
    )


def _parse(kind: Any, text: str) -> Any:
    """`text` as a value of the annotated type `kind`; raises ValueError saying the rule."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if text == "" and type(None) in args and Secret not in args:
            return None
        return _parse(next(arg for arg in args if arg is not type(None)), text)
    if origin is typing.Literal:
        if text not in args:
            raise ValueError(f"must be one of {', '.join(map(str, args))}")
        return text
    if origin is tuple:
        return tuple(_parse(args[0], part.strip()) for part in text.split(",") if part.strip())
    if kind is bool:
        if text.lower() in ("1", "true", "yes", "on"):
            return True
        if text.lower() in ("0", "false", "no", "off"):
            return False
        raise ValueError("must be true or false")
    if kind is Size:
        return parse_size(text)
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            whole = "a whole number" if kind is int else "a number"
            raise ValueError(f"must be {whole}") from None
    return kind(text)


def _validate(field: dataclasses.Field[Any], value: Any) -> None:
    least, most = field.metadata.get("least"), field.metadata.get("most")
    if value is not None and least is not None and not value >= least:
        raise ValueError(f"must be at least {least}")
    if value is not None and most is not None and not value <= most:
        raise ValueError(f"must be at most {most}")
    if value is not None and (check := field.metadata.get("check")):
        check(value)


def _refuse(program: str, message: str) -> NoReturn:
    print(f"{program}: {message}", file=sys.stderr)
    raise SystemExit(2)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as `_refuse` does, without the usage of all flags before it."""

    def error(self, message: str) -> NoReturn:
        _refuse(self.prog, f"{message}; --help lists the flags")


def _unknown(words: Sequence[str], fields: Sequence[str]) -> str:
    word = words[0].partition("=")[0]
    near = difflib.get_close_matches(word, [flag_name(name) for name in fields], 1)
    meant = f"did you mean {near[0]}? " if near else ""
    return f"{word} is not a flag of this command: {meant}--help lists them"


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def load(
    config: type[Config],
    *,
    program: str,
    prefix: str,
    description: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Build `config` from flags, environment and defaults; exits with status 2 on a bad value.

    Args:
        config: a frozen dataclass whose fields were made with `flag`.
        program: as people call it, for messages.
        prefix: of the environment twins.
        argv: default `sys.argv[1:]`.
        environ: default `os.environ`.
    """
    environ = os.environ if environ is None else environ
    fields = dataclasses.fields(config)  # type: ignore[arg-type]
    kinds = typing.get_type_hints(config)
    parser = _Parser(prog=program, description=description, allow_abbrev=False, exit_on_error=True)
    for field in fields:
        twin = f"{prefix}_{field.name.upper()}"
        shown = "" if field.default in (None, "", ()) else f" (default {_show(field.default)})"
        extra: dict[str, Any] = {"metavar": _metavar(kinds[field.name])}
        if kinds[field.name] is bool:
            extra |= {"nargs": "?", "const": "true", "metavar": "BOOL"}
        parser.add_argument(
            flag_name(field.name),
            dest=field.name,
            default=None,
            help=f"{field.metadata['help']}{shown} [{twin}]".replace("%", "%%"),
            **extra,
        )
    parser.add_argument("--print-config", action="store_true", help="print the settings and exit")
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        _refuse(program, _unknown(unknown, [field.name for field in fields]))

    values: dict[str, Any] = {}
    for field in fields:
        twin = f"{prefix}_{field.name.upper()}"
        text, source = getattr(given, field.name), flag_name(field.name)
        if text is None and twin in environ:
            text, source = environ[twin], twin
        try:
            value = field.default if text is None else _parse(kinds[field.name], text)
            _validate(field, value)
        except ValueError as error:
            shown = "***" if _is_secret(kinds[field.name]) else text
            _refuse(program, f"{source} {field.default if text is None else shown}: {error}")
        values[field.name] = value
    settings = config(**values)
    if given.print_config:
        shown_values = {name: _show_json(value) for name, value in values.items()}
        print(msgspec.json.format(msgspec.json.encode(shown_values), indent=2).decode())
        raise SystemExit(0)
    return settings


def _is_secret(kind: Any) -> bool:
    return kind is Secret or any(map(_is_secret, typing.get_args(kind)))


def _metavar(kind: Any) -> str:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _metavar(next(arg for arg in args if arg is not type(None)))
    if origin is typing.Literal:
        return "{" + ",".join(map(str, args)) + "}"
    if origin is tuple:
        return f"{_metavar(args[0])},…"
    return {int: "N", float: "X", Size: "SIZE", Path: "PATH", bool: "BOOL"}.get(kind, "TEXT")


def _show(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _show_json(value: Any) -> Any:
    if isinstance(value, Secret):
        return "***"
    if isinstance(value, Path | Size):
        return str(value)
    return list(map(_show_json, value)) if isinstance(value, tuple) else value


def cache_dir() -> Path:
    """Where what can be made again is kept: PAGEKEEPER_CACHE, or `pagekeeper` in the user's cache folder."""
    if given := os.environ.get("PAGEKEEPER_CACHE"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pagekeeper"


def default_run_dir() -> Path:
    """Where the sockets of this user's processes are: a directory only they can enter."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "pagekeeper" if base else Path(f"/tmp/pagekeeper-{os.geteuid()}")
