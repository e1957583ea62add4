"""Who writes what of a checkpoint. Pure."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shoal.parallel.boxes import Box

WORTH_CUTTING = 64 << 10  # bytes; below, a part costs more in the manifest than it spreads


class Held(NamedTuple):
    """A box of a logical tensor that a rank holds."""

    name: str
    dtype: str
    whole: tuple[int, ...]
    box: Box


def deal(held: Sequence[Iterable[Held]], item_bytes: dict[str, int]) -> list[list[Held]]:
    """Who writes what, so that each logical byte is written once and all have alike to do.

    `held` lists for each rank what it holds. A box that several hold is cut between them along its
    first dim if it is large, or given to the one with the least to write.
    """
    holders: dict[Held, list[int]] = {}
    for rank, items in enumerate(held):
        for item in items:
            holders.setdefault(item, []).append(rank)
    shares: list[list[Held]] = [[] for _ in held]
    load = [0] * len(held)

    def give(rank: int, item: Held) -> None:
        shares[rank].append(item)
        load[rank] += item.box.numel * item_bytes[item.dtype]

    for item, ranks in sorted(holders.items()):
        box, size = item.box, item.box.numel * item_bytes[item.dtype]
        if size < WORTH_CUTTING * len(ranks) or not box.shape or box.shape[0] < len(ranks):
            give(min(ranks, key=load.__getitem__), item)
            continue
        for i, rank in enumerate(ranks):
            start, stop = (box.shape[0] * j // len(ranks) for j in (i, i + 1))
            give(rank, item._replace(box=box.cut(0, start, stop)))
    return shares
