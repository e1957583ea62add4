"""Which server holds what. Pure, so every worker and server knows it without asking.

Keys (`layout.py`) are given to servers so that all hold about the same number of bytes: largest
first, to the least laden. When servers come or go keys stay where they are, but for those that lost
a holder and those that must move for balance.

Bytes moved: what a server that is gone held, or a newcomer's fair share. Read next: `clock.py`.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import permutations


def place(
    sizes: Sequence[int],
    servers: Sequence[int],
    copies: int = 1,
    before: Sequence[tuple[int, ...]] | None = None,
) -> list[tuple[int, ...]]:
    """The servers that hold each key, given by its bytes; the first of them answers for it.

    No server holds more than the mean and the largest key, nor answers for more than that. With
    `before`, where keys were (an empty entry for a new one): a holder that is still there stays
    one unless balance needs a move, and the first of those left answers for the key.
    """
    if not 1 <= copies <= len(servers) or len(set(servers)) < len(servers):
        raise ValueError(
            f"{copies} copies cannot be on servers {list(servers)}. Each copy needs a server of "
            "its own; start more servers, or ask for fewer copies."
        )
    assert before is None or len(before) == len(sizes)
    board = _Board(sizes, servers)
    for key, old in enumerate(before or []):
        board.put(key, tuple(server for server in old if server in board.held)[:copies])
    kept = list(board.holders)
    for key in sorted(range(len(sizes)), key=lambda k: (-sizes[k], k)):
        chosen = list(kept[key])
        while len(chosen) < copies:
            chosen.append(board.roomiest(sizes[key], chosen))
        if not kept[key]:
            chosen.sort(key=lambda server: (board.answered[server], server))
        board.put(key, tuple(chosen))
    board.even_held(kept)
    board.even_answered()
    return board.holders


class _Board:
    """Where keys are, and the bytes that each server holds and answers for."""

    def __init__(self, sizes: Sequence[int], servers: Sequence[int]):
        self._sizes, self._largest = sizes, max(sizes, default=0)
        self.holders: list[tuple[int, ...]] = [()] * len(sizes)
        self.held = dict.fromkeys(sorted(servers), 0)
        self.answered = dict.fromkeys(sorted(servers), 0)
        self._shared: Counter[tuple[int, int]] = Counter()  # bytes that both servers of a pair hold

    def put(self, key: int, holders: tuple[int, ...]) -> None:
        for sign, servers in ((-1, self.holders[key]), (1, holders)):
            for server in servers:
                self.held[server] += sign * self._sizes[key]
            for server in servers[:1]:
                self.answered[server] += sign * self._sizes[key]
            for pair in permutations(servers, 2):
                self._shared[pair] += sign * self._sizes[key]
        self.holders[key] = holders

    def roomiest(self, size: int, chosen: Sequence[int]) -> int:
        """Where the next copy of a key goes, beside those that are chosen: to the least laden.

        Among servers that this leaves within a largest key of each other, to the one that shares
        least with the chosen: so if one is lost, all others take over some of what it held.
        """
        others = [server for server in self.held if server not in chosen]
        most = min(self.held.values()) + self._largest - size
        lightest = min(self.held[server] for server in others)
        return min(
            (server for server in others if self.held[server] <= max(most, lightest)),
            key=lambda s: (sum(self._shared[s, other] for other in chosen), self.held[s], s),
        )

    def even_held(self, kept: Sequence[tuple[int, ...]]) -> None:
        """Move copies from the most laden server to the least until they differ by a key at most.

        Any copy is smaller than that difference, so each move brings loads closer and this ends.
        """
        while True:
            low = min(self.held, key=self.held.__getitem__)
            high = max(self.held, key=self.held.__getitem__)
            if self.held[high] - self.held[low] <= self._largest:
                return
            key = self._best_move(high, low, kept)
            self.put(key, tuple(low if s == high else s for s in self.holders[key]))

    def _best_move(self, high: int, low: int, kept: Sequence[tuple[int, ...]]) -> int:
        """The key to move: best one that has to be sent anyway, then one that evens answers too."""
        gap = self.held[high] - self.held[low]
        moves_first = self.answered[high] > self.answered[low]
        return min(
            (high in kept[key], (holders[0] == high) != moves_first, abs(2 * size - gap), key)
            for key, (size, holders) in enumerate(zip(self._sizes, self.holders))
            if size and high in holders and low not in holders
        )[-1]

    def even_answered(self) -> None:
        """Let other holders answer until servers differ by a key at most; no bytes move."""
        while max(self.answered.values()) - min(self.answered.values()) > self._largest:
            gain, key, server = max(
                (
                    (size * (self.answered[holders[0]] - self.answered[server] - size), key, server)
                    for key, (size, holders) in enumerate(zip(self._sizes, self.holders))
                    for server in holders[1:]
                ),
                default=(0, 0, 0),
            )
            if gain <= 0:
                break
            self._promote(key, server)
        most = sum(self._sizes) // len(self.held) + self._largest
        for server in self.held:
            self._relieve(server, most, set())

    def _promote(self, key: int, server: int) -> None:
        self.put(key, (server, *(s for s in self.holders[key] if s != server)))

    def _relieve(self, server: int, most: int, asked: set[int]) -> bool:
        """Let others answer until a server does for `most` bytes; they may pass on in turn."""
        asked.add(server)
        for key, holders in enumerate(self.holders):
            if self.answered[server] <= most:
                break
            if holders[0] != server:
                continue
            for other in holders[1:]:
                if other not in asked or self.answered[other] + self._sizes[key] <= most:
                    self._promote(key, other)
                    if self.answered[other] <= most or self._relieve(other, most, asked):
                        break
                    self._promote(key, server)
        return self.answered[server] <= most
