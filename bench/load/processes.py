"""The processes of a server on this machine, and how their memory and CPU time go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from bench.load.client import ServerProblem

MIB = 1 << 20


@dataclass(slots=True)
class Watched:
    """One process and what was seen of it.

    Attributes:
        at: seconds of each sample; rss: bytes then; cpu: seconds of CPU time used by then.
    """

    name: str
    process: psutil.Process
    at: list[float] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    gone: bool = False

    def sample(self, now: float) -> None:
        """Look once; a process that has ended is `gone`."""
        try:
            with self.process.oneshot():
                rss, times = self.process.memory_info().rss, self.process.cpu_times()
        except psutil.NoSuchProcess:
            self.gone = True
            return
        self.at.append(now)
        self.rss.append(rss)
        self.cpu.append(times.user + times.system)


def behind(port: int) -> list[psutil.Process]:
    """All processes of the server that listens on `port`: the launcher's family, or the listener's.

    Raises:
        ServerProblem: nothing on this machine listens there that may be looked at.
    """
    listeners = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    } - {None}
    if not listeners:
        raise ServerProblem(
            f"no process that may be looked at listens on port {port} of this machine; "
            "run this as the server's user, beside it"
        )
    root = psutil.Process(min(listeners))
    parent = root.parent()
    if parent is not None and "pagekeeper" in " ".join(parent.cmdline()):
        root = parent
    return [root, *root.children(recursive=True)]


def name_of(command: Sequence[str]) -> str:
    """What a process is, in a word: the module or the program it runs."""
    if "-m" in command[:-1]:
        return command[list(command).index("-m") + 1]
    script = next((part for part in command[1:] if not part.startswith("-")), "")
    name = script if command and "python" in command[0] and script else (command or ["?"])[0]
    return name.rpartition("/")[2]


def slope(at: Sequence[float], values: Sequence[float]) -> float:
    """Change of `values` per second, by least squares; NaN for fewer than two instants."""
    if len(at) < 2:
        return math.nan
    middle = math.fsum(at) / len(at)
    spread = math.fsum((x - middle) ** 2 for x in at)
    return math.fsum((x - middle) * y for x, y in zip(at, values, strict=True)) / spread
