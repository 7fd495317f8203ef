"""What a step brought for gateways: tokens in columns where a token is all there is to say, else deltas."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from msgspec import Struct

from executor.plan import Ids, Lanes
from wire.generate import Delta, Tokens


class News(Struct):
    """All with the gateway it is for."""

    deltas: list[tuple[bytes, Delta]] = []
    tokens: list[tuple[bytes, Tokens]] = []
    count: int = 0  # tokens in both

    def __bool__(self) -> bool:
        return self.count > 0

    def __iter__(self) -> Iterator[tuple[bytes, Delta]]:
        """One token after the other."""
        for peer, tokens in self.tokens:
            for delta in tokens.deltas():
                yield peer, delta
        yield from self.deltas

    def add(self, peer: bytes, delta: Delta) -> None:
        self.deltas.append((peer, delta))
        self.count += 1

    def add_lanes(self, lanes: Lanes, tokens: Ids, without: Sequence[int]) -> None:
        """The tokens of lanes, but for those at these places."""
        members = lanes.members
        peers, ids, choices = members.peers, members.ids, members.choices
        if not without and peers.count(peers[0]) == len(peers):
            self.tokens.append((peers[0], Tokens(ids, choices, tokens.tobytes())))
        else:
            numbers, gone = array("Q", ids), set(without)
            places: dict[bytes, list[int]] = {}
            for place, peer in enumerate(peers):
                if place not in gone:
                    places.setdefault(peer, []).append(place)
            self.tokens += [
                (
                    peer,
                    Tokens(
                        array("Q", [numbers[place] for place in some]).tobytes(),
                        bytes([choices[place] for place in some]),
                        array("I", [tokens[place] for place in some]).tobytes(),
                    ),
                )
                for peer, some in places.items()
            ]
        self.count += len(tokens) - len(without)
