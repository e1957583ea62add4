"""A rank's part of a checkpoint: which chunks it writes, and the safetensors file they lie in.

Each logical byte is dealt to one of the ranks that hold it, so that all have alike to write. The
file is an ordinary one: any reader of safetensors can open it, and finds each chunk under the
tensor's name, with its box in brackets where it is not the whole.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from shoal.checkpoint.manifest import ALIGNMENT, ITEM_BYTES
from shoal.parallel.boxes import Box, pieces
from shoal.storage.store import MOST_CHUNK_BYTES

WORTH_CUTTING = 64 << 10  # bytes; below, a part costs more in the manifest than it spreads


class Held(NamedTuple):
    """A box of a logical tensor that a rank holds."""

    name: str
    dtype: str
    whole: tuple[int, ...]
    box: Box

    @property
    def num_bytes(self) -> int:
        return self.box.numel * ITEM_BYTES[self.dtype]


class Placed(NamedTuple):
    """A chunk and the bytes of the file's data that it takes."""

    held: Held
    start: int  # from the end of the header
    stop: int

    @property
    def key(self) -> str:
        box = self.held.box
        if box.shape == self.held.whole:
            return self.held.name
        spans = (f"{start}:{start + length}" for start, length in zip(box.offset, box.shape))
        return f"{self.held.name}[{','.join(spans)}]"


def deal(held: Sequence[Iterable[Held]]) -> list[list[Held]]:
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
        load[rank] += item.num_bytes

    for item, ranks in sorted(holders.items()):
        rows = item.box.shape[0] if item.box.shape else 0
        if item.num_bytes < WORTH_CUTTING * len(ranks) or rows < len(ranks):
            give(min(ranks, key=load.__getitem__), item)
            continue
        for i, rank in enumerate(ranks):
            start, stop = (rows * j // len(ranks) for j in (i, i + 1))
            give(rank, item._replace(box=item.box.cut(0, start, stop)))
    return shares


def place(share: Iterable[Held]) -> list[Placed]:
    """Chunks one after the other, those of the largest elements first, so that all are aligned."""
    chunks = [
        item._replace(box=box)
        for item in sorted(share, key=lambda item: -ITEM_BYTES[item.dtype])
        for box in pieces(item.box, MOST_CHUNK_BYTES // ITEM_BYTES[item.dtype])
    ]
    placed, at = [], 0
    for chunk in chunks:
        stop = at + chunk.num_bytes
        placed.append(Placed(chunk, at, stop))
        at = stop
    return placed


def header(placed: Iterable[Placed]) -> bytes:
    """What stands before the data: the length of the description, and the description."""
    entries = {
        chunk.key: {
            "dtype": chunk.held.dtype,
            "shape": chunk.held.box.shape,
            "data_offsets": (chunk.start, chunk.stop),
        }
        for chunk in placed
    }
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
