"""Requests that hold no blocks: who is first, whether there is room for more, whether asking is worth it."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from executor.accept import Bounds
from executor.request import Group
from wire.errors import Code, Refused
from wire.memory import Refusal

# A refused admission is repeated when memory has come free, or after this many steps anyway.
RETRY_STEPS = 16


class Queue:
    """Waiting groups in (priority, arrival) order, bounded in requests and in prompt tokens."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._groups: list[Group] = []
        self.tokens = 0  # of their prompts
        self.sequences = 0
        self._refused: tuple[Group, int] | None = (
            None  # who, and blocks available when to ask again
        )
        self._held_back = 0  # steps since then

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups)

    @property
    def first(self) -> Group:
        return self._groups[0]

    def check_space(self, prompt: int) -> None:
        """Whether a request of `prompt` tokens may join.

        Raises:
            Refused: OVERLOADED.
        """
        if len(self._groups) >= self._bounds.waiting:
            raise Refused(
                Code.OVERLOADED,
                f"{len(self._groups)} requests are waiting, the limit is {self._bounds.waiting} "
                "(--max-waiting): try again later",
            )
        if self._groups and self.tokens + prompt > self._bounds.waiting_tokens:
            raise Refused(
                Code.OVERLOADED,
                f"{self.tokens} prompt tokens are waiting and this request brings {prompt}, the "
                f"limit is {self._bounds.waiting_tokens} (--max-waiting-tokens): try again later",
            )

    def add(self, group: Group) -> None:
        insort(self._groups, group, key=lambda g: g.order)
        self.tokens += len(group.prompt)
        self.sequences += len(group.live)

    def remove(self, group: Group) -> None:
        self._groups.remove(group)
        self.tokens -= len(group.prompt)
        self.sequences -= len(group.live)

    def overdue(self, now: float) -> list[Group]:
        """Those whose deadline has passed before they ever started."""
        return [
            group
            for group in self._groups
            if group.deadline is not None and now >= group.deadline and not group.restarted
        ]

    def worth_asking(self, available: int) -> bool:
        """Whether the first, if it was refused, could fare better now that so many blocks can be had."""
        if self._refused is None or self._refused[0] is not self.first:
            return True
        self._held_back += 1
        return self._held_back >= RETRY_STEPS or available >= self._refused[1]

    def note(self, group: Group, refusal: Refusal | None, available: int) -> None:
        """Remember how an admission went: `refusal` is None when it was granted."""
        if refusal is not None:
            self._refused = (group, available + max(1, refusal.need - refusal.available))
            self._held_back = 0
        elif self._refused is not None and self._refused[0] is group:
            self._refused = None

    def lacking(self, group: Group, available: int) -> int:
        """Blocks that must come free before a refused group can come in; 0 when not known."""
        if self._refused is None or self._refused[0] is not group:
            return 0
        return max(0, self._refused[1] - available)

    def forget_refusal(self) -> None:
        self._refused = None


class Habits:
    """What prompts that begin alike found in the prefix index lately.

    memd tells the hit only in its answer, but the token budget of a step must be shared out before. A guess
    that is too high costs a newcomer a step, one that is too low leaves budget unused; neither does harm.
    """

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._hits: dict[tuple[str, bytes], int] = {}

    def guess(self, group: Group, block_size: int) -> int:
        """Tokens of this group's prompt that are probably cached."""
        return self._hits.get(self._key(group, block_size), 0)

    def learn(self, group: Group, block_size: int, hit: int) -> None:
        key = self._key(group, block_size)
        self._hits.pop(key, None)
        self._hits[key] = hit
        if len(self._hits) > self._most:
            del self._hits[next(iter(self._hits))]

    @staticmethod
    def _key(group: Group, block_size: int) -> tuple[str, bytes]:
        return group.tenant, group.packed[: 4 * block_size]
