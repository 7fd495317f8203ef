"""Who this memd is: one per run directory, an epoch that rises with every start, a random boot id.

The epoch is a number in a file. When the file cannot be trusted or written, memd starts all the same with a
random epoch far above any counted one: executors compare for equality, together with the boot id, so a
restart is noticed even if a later epoch should be lower.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger(__name__)

EPOCH_FILE = "memd.epoch"
LOCK_FILE = "memd.lock"
_HIGH = 1 << 52  # random epochs start here; counted ones never come near
_MOST = (1 << 53) - 1  # what the wire carries


class AlreadyRunning(Exception):
    """Another memd serves this run directory."""


@dataclass(frozen=True, slots=True)
class Identity:
    """One start of memd."""

    boot_id: str  # 32 hex digits
    epoch: int
    key: bytes = field(repr=False)  # of the prefix hashes; 32 bytes, never written anywhere


class RunLock:
    """The exclusive right to a run directory, held until `release` or the end of the process."""

    def __init__(self, run_dir: Path) -> None:
        """Take it.

        Raises:
            AlreadyRunning: someone has it.
        """
        path = run_dir / LOCK_FILE
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            raise AlreadyRunning(
                f"another memd (process {holder or 'unknown'}) serves {run_dir}: stop it first, "
                "or choose another --run-dir"
            ) from None
        # Who has it is for the message above only: a full disk is no reason not to start.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._descriptor)


def next_epoch(directory: Path) -> int:
    """One more than the last start's epoch, written to disk before it is returned; 1 at the first start.

    A file that is damaged or cannot be written costs a warning and gives a random epoch of at least 2**52.
    """
    path = directory / EPOCH_FILE
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        epoch = _read(path) + 1
        _write(path, epoch)
        return epoch
    except (OSError, ValueError) as error:
        epoch = _HIGH + secrets.randbelow(_HIGH >> 1)
        log.warning("epoch file %s: %s; starting with a random epoch=%d", path, error, epoch)
    try:
        _write(
            path, epoch
        )  # a damaged file is replaced, so that the next start counts on from here
    except OSError:
        log.warning("epoch file %s cannot be written: every start will have a random epoch", path)
    return epoch


def identify(directory: Path) -> Identity:
    """A new identity, its epoch counted in `directory`."""
    return Identity(
        boot_id=secrets.token_hex(16),
        epoch=next_epoch(directory),
        key=secrets.token_bytes(32),
    )


def _read(path: Path) -> int:
    try:
        text = path.read_text("ascii")
    except FileNotFoundError:
        return 0
    except UnicodeDecodeError:
        raise ValueError("is not a number") from None
    if not text.strip().isdecimal() or not 0 < int(text) < _MOST:
        raise ValueError("is not a number of starts")
    return int(text)


def _write(path: Path, epoch: int) -> None:
    """Replace the file in one move, on disk when this returns: a crash leaves the old or the new number."""
    fresh = path.with_name(f"{path.name}.new")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, f"{epoch}\n".encode())
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(fresh, path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
