"""The file in the run directory that tells where a process serves, for launchers and people.

It is a convenience: a disk that is full or read-only costs the file and not the server.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger(__name__)


@contextlib.contextmanager
def announced(path: Path, **facts: Any) -> Iterator[None]:
    """Keep `path`, a JSON object of `facts` and our `pid`, while the body runs.

    It is there whole or not at all. A file of a process before us is replaced; one of a process after us
    is left alone. What goes wrong is a warning in the log.
    """
    _write(path, msgspec.json.encode({**facts, "pid": os.getpid()}))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if _pid_in(path) == os.getpid():
                path.unlink()


def _write(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.write_bytes(content)
        draft.replace(path)
    except OSError as error:
        log.warning("%s cannot be written: %s; going on without it", path, error.strerror or error)
        for stale in (draft, path):  # what an earlier process left there is wrong now
            with contextlib.suppress(OSError):
                stale.unlink()


def _pid_in(path: Path) -> int:
    """The process that wrote the file; 0 when it does not say."""
    try:
        found = msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError:
        return 0
    pid = found.get("pid") if isinstance(found, dict) else None
    return pid if isinstance(pid, int) else 0
