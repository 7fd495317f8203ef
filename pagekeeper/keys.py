"""API keys as the launcher needs them: whether the gateway will ask for one, and one to ask it with.

The gateway reads and checks them itself; this only finds them where it will: `--api-keys`, `--api-key-file`
and their environment twins, the launcher's and the gateway's own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from wire.settings import Secret


@dataclass(frozen=True, slots=True)
class Keys:
    """What is known of the gateway's keys."""

    needed: bool
    one: str  # a key in plain text; empty when there is none, or hashes alone


def find(
    given: Secret | None, file: Path | None = None, environ: Mapping[str, str] | None = None
) -> Keys:
    """Keys of the server that runs with these settings.

    Args:
        given: keys separated by commas; None: `GATEWAY_API_KEYS`.
        file: of lines `KEY [TENANT]`; None: `GATEWAY_API_KEY_FILE`.
        environ: default `os.environ`.
    """
    environ = os.environ if environ is None else environ
    texts = (given or environ.get("GATEWAY_API_KEYS", "")).split(",")
    path = file or environ.get("GATEWAY_API_KEY_FILE")
    keys = [text.strip() for text in texts if text.strip()]
    if path:
        keys += _in_file(Path(path))
    plain = (key for key in keys if not key.startswith("sha256:"))
    return Keys(needed=bool(keys or path), one=next(plain, ""))


def _in_file(path: Path) -> list[str]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeError):
        return []  # the gateway says what is wrong with it
    words = [line.split() for line in lines]
    return [found[0] for found in words if found and not found[0].startswith("#")]
