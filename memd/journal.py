"""What came in, in order: enough to build the same state again.

The core is a function of its inputs, so a journal that lost nothing replays to the same digest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from wire.memory import MemoryCodec

if TYPE_CHECKING:
    from memd.core import Memory

Kind = Literal["request", "tick", "pin", "unpin", "reset"]


class Entry(NamedTuple):
    """One input. `data` is an encoded request, or the arguments of an operator's action as text."""

    now: float
    kind: Kind
    data: bytes


class Journal:
    """A ring of the newest inputs, bounded in entries and in bytes.

    Args:
        size: most entries kept.
        most_bytes: most bytes of data kept.
    """

    def __init__(self, size: int, most_bytes: int = 64 << 20) -> None:
        self._entries: deque[Entry] = deque()
        self._size = size
        self._most_bytes = most_bytes
        self._bytes = 0
        self.total = 0  # entries ever added; the ring holds the last of them

    def add(self, now: float, kind: Kind, data: bytes) -> None:
        entries = self._entries
        entries.append(Entry(now, kind, data))
        self.total += 1
        self._bytes += len(data)
        while entries and (len(entries) > self._size or self._bytes > self._most_bytes):
            self._bytes -= len(entries.popleft().data)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries)

    @property
    def complete(self) -> bool:
        """Whether nothing was lost, so that it can be replayed."""
        return self.total == len(self._entries)


AnyMemory = TypeVar("AnyMemory", bound="Memory")


def replay(entries: Iterable[Entry], memory: AnyMemory) -> AnyMemory:
    """Feed a complete journal to a fresh memory with the same parameters; returns that memory."""
    decode = MemoryCodec().decode_request
    for entry in entries:
        match entry.kind:
            case "request":
                memory.handle(entry.now, decode(entry.data))
            case "tick":
                memory.tick(entry.now)
            case "reset":
                memory.reset_cache(entry.data.decode(), entry.now)
            case "pin" | "unpin":
                block, name = entry.data.decode().split(" ", 1)
                act = memory.pin if entry.kind == "pin" else memory.unpin
                act(name, int(block), entry.now)
    return memory
