"""One launcher per run directory, by a file lock that the kernel drops with the process."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

LOCK_FILE = "pagekeeper.lock"


class AlreadyRunning(Exception):
    """Another launcher holds the directory.

    Attributes:
        pid: its process id, 0 when it has not written it yet.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(f"held by process {pid}")
        self.pid = pid


class RunLock:
    """Holds a run directory; a context manager. The file holds the owner's process id.

    Raises:
        AlreadyRunning: someone else holds it.
    """

    def __init__(self, run_dir: Path) -> None:
        self.path = run_dir / LOCK_FILE
        while True:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._file)
                raise AlreadyRunning(_read_pid(self.path)) from None
            if self._is_current():
                break
            os.close(self._file)  # its last owner removed the file after we opened it
        os.ftruncate(self._file, 0)
        os.write(self._file, f"{os.getpid()}\n".encode())

    def _is_current(self) -> bool:
        try:
            return os.stat(self.path).st_ino == os.fstat(self._file).st_ino
        except FileNotFoundError:
            return False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._file)


def owner(run_dir: Path) -> int:
    """Process id of the launcher that holds `run_dir`; 0 when none does."""
    path = run_dir / LOCK_FILE
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_pid(path)
    finally:
        os.close(file)
    return 0


def _read_pid(path: Path) -> int:
    try:
        return int(path.read_text().strip() or 0)
    except (OSError, ValueError):
        return 0
