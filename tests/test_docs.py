"""docs/operations.md lists every setting as the code has it; `python -m tests.test_docs` writes it anew."""

from __future__ import annotations

import dataclasses
import importlib
import re
import typing
from pathlib import Path

import pytest

from wire.settings import _metavar, default_run_dir, flag_name

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operations.md"
CONFIGS = {
    "pagekeeper up": ("pagekeeper.config", "UpConfig", "PAGEKEEPER"),
    "gateway": ("gateway.config", "GatewayConfig", "GATEWAY"),
    "executor": ("executor.config", "Config", "EXECUTOR"),
    "memd": ("memd.config", "Config", "MEMD"),
}


def table(program: str) -> str:
    """The settings of one program as a markdown table."""
    module, name, prefix = CONFIGS[program]
    config = getattr(importlib.import_module(module), name)
    kinds = typing.get_type_hints(config)
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(config):
        default = "" if field.default in (None, (), "") else f"`{_shown(field.default)}`"
        kind = "" if kinds[field.name] is bool else f" {_metavar(kinds[field.name])}"
        flag = f"`{flag_name(field.name)}{kind}`".replace("|", "\\|")
        rows.append(f"| {flag} | {default} | {field.metadata['help']} |")
    return "\n".join([f"Environment twins: `{prefix}_…`.", "", *rows])


def _shown(default: object) -> str:
    if default == default_run_dir():
        return "$XDG_RUNTIME_DIR/pagekeeper"
    return ",".join(map(str, default)) if isinstance(default, tuple) else str(default)


def _section(program: str) -> re.Pattern[str]:
    return re.compile(rf"(?<=<!-- settings of {program} -->\n).*?(?=\n<!-- end -->)", re.DOTALL)


@pytest.mark.parametrize("program", CONFIGS)
def test_every_setting_is_listed_with_its_default_and_meaning(program: str) -> None:
    found = _section(program).search(PAGE.read_text())
    assert found is not None
    assert found.group() == table(program), "run: python -m tests.test_docs"


def main() -> None:
    """Bring the page up to date."""
    text = PAGE.read_text()
    for program in CONFIGS:
        rows = table(program)
        text = _section(program).sub(rows.replace("\\", r"\\"), text, count=1)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
