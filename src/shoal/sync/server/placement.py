"""Which server holds what. Pure, so every worker and server knows it without asking.

Keys (`layout.py`) are given to servers so that all hold about the same number of bytes: largest
first, to the least laden. When servers come or go keys stay where they are, but for those that lost
their holder and those that must move for balance.

Bytes moved: what a server that is gone held, or a newcomer's fair share. Read next: `clock.py`.
"""

from collections.abc import Sequence


def place_keys(
    sizes: Sequence[int], servers: Sequence[int], before: Sequence[int | None] | None = None
) -> list[int]:
    """The server that holds each key, given by its bytes.

    No server holds more than the mean and the largest key. With `before`, where keys were (None for
    a new one): a key whose holder is still there stays with it unless balance needs a move.
    """
    if not servers or len(set(servers)) < len(servers):
        raise ValueError(
            f"Keys cannot be on servers {list(servers)}. Start one at least, each with a number of "
            "its own."
        )
    assert before is None or len(before) == len(sizes)
    loads = dict.fromkeys(sorted(servers), 0)
    kept = [old if old in loads else None for old in before or [None] * len(sizes)]
    holders: list[int] = [-1] * len(sizes)
    for key, old in enumerate(kept):
        if old is not None:
            holders[key] = old
            loads[old] += sizes[key]
    for key in sorted(range(len(sizes)), key=lambda k: (-sizes[k], k)):
        if kept[key] is None:
            holders[key] = min(loads, key=loads.__getitem__)
            loads[holders[key]] += sizes[key]
    _balance(sizes, loads, kept, holders)
    return holders


def _balance(
    sizes: Sequence[int], loads: dict[int, int], kept: Sequence[int | None], holders: list[int]
) -> None:
    """Move keys from the most laden server to the least until they differ by a key at most.

    Any key is smaller than that difference, so each move brings loads closer and this ends.
    """
    largest = max(sizes, default=0)
    while True:
        low, high = min(loads, key=loads.__getitem__), max(loads, key=loads.__getitem__)
        gap = loads[high] - loads[low]
        if gap <= largest:
            return
        # Best one that has to be sent anyway.
        *_, key = min(
            (kept[key] == high, abs(2 * size - gap), key)
            for key, size in enumerate(sizes)
            if size and holders[key] == high
        )
        holders[key] = low
        loads[high] -= sizes[key]
        loads[low] += sizes[key]
