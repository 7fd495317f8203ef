"""Become another program that cannot outlive the launcher: `python leash.py PARENT_PID NICE COMMAND…`.

The kernel kills a process that asked for it when its parent dies (prctl(2), PR_SET_PDEATHSIG), even a parent
killed with -9 that can clean up nothing. The wish survives exec, so this file makes it and then becomes the
command. It runs alone, without the package, so that it costs some milliseconds only.

Linux only; elsewhere children notice nothing when the launcher is killed with -9 (every other end is handled
by the launcher itself).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; end now if that has happened already.

    Args:
        parent: process id of the launcher.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit("the launcher is gone")


def set_priority(nice: int, group: Path = Path("/proc/self/autogroup")) -> None:
    """Add to this process's niceness, and give its session the same.

    Where the kernel schedules sessions against each other (sched_autogroup, sched(7)), niceness counts only
    inside one, and each process of ours leads its own.
    """
    value = os.nice(nice)
    for _ in range(5):
        try:
            group.write_text(str(value))
        except BlockingIOError:
            time.sleep(0.1)  # one change in a tenth of a second is allowed
        except OSError:
            return  # no such scheduling here, or not for us to say
        else:
            return


def main(argv: list[str]) -> None:
    """Tie this process to its parent, set its priority, and exec the command."""
    parent, nice, *command = argv
    die_with(int(parent))
    if int(nice):
        set_priority(int(nice))
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
