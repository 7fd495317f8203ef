"""The buddy allocator contiguous systems are taken to use (Knowlton, 1965): regions are powers of two."""

from __future__ import annotations


class Buddy:
    """Contiguous regions of one pool of slots.

    A pool that is no power of two is cut into powers of two, largest first, so that every region still starts
    at a multiple of its own size: 15,700 slots are 8192 + 4096 + 2048 + 1024 + 256 + 64 + 16 + 4.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"a pool of {slots} slots: it needs at least 1")
        self.slots = slots
        self.granted = 0  # slots in granted regions, what rounding added included
        self._free: list[set[int]] = [set() for _ in range(slots.bit_length())]  # starts, by order
        self._taken: dict[int, int] = {}  # start -> order
        start = 0
        for order in reversed(range(slots.bit_length())):
            if slots >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    def allocate(self, slots: int) -> int | None:
        """Start of a region of at least `slots` (1 or more), or None if no free one is large enough.

        The smallest free region that is large enough is halved until it fits; the lowest start wins.
        """
        order = (slots - 1).bit_length()
        larger = range(order, len(self._free))
        found = next((at for at in larger if self._free[at]), None)
        if found is None:
            return None
        start = min(self._free[found])
        self._free[found].remove(start)
        while found > order:
            found -= 1
            self._free[found].add(start + (1 << found))
        self._taken[start] = order
        self.granted += 1 << order
        return start

    def free(self, start: int) -> None:
        """Give a region back, and join it with its buddy for as long as that is free too.

        Raises:
            KeyError: no granted region starts there.
        """
        order = self._taken.pop(start)
        self.granted -= 1 << order
        while (buddy := start ^ (1 << order)) in self._free[order]:
            self._free[order].remove(buddy)
            start = min(start, buddy)
            order += 1
        self._free[order].add(start)

    def free_regions(self) -> list[tuple[int, int]]:
        """(start, slots) of every free region, by start."""
        return sorted((start, 1 << order) for order, at in enumerate(self._free) for start in at)
