"""Which chunks each rank writes, and the layout of the safetensors file that holds them.

Each byte of a logical tensor is assigned to one of the ranks that hold it, so that all ranks write
about equally much. The file is ordinary safetensors: a chunk has its tensor's name, with its box in
brackets if it is not the whole tensor. Read next: `commit.py`, `save.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from shoal.checkpoint.manifest import ALIGNMENT, ITEM_BYTES
from shoal.parallel.boxes import Box, split_box
from shoal.storage.store import MOST_CHUNK_BYTES

MIN_SPLIT_BYTES = 64 << 10  # of a rank; smaller parts cost more in the manifest than they save


class TensorRegion(NamedTuple):
    """A box of a logical tensor, such as a rank holds."""

    name: str
    dtype: str
    whole: tuple[int, ...]
    box: Box

    @property
    def num_bytes(self) -> int:
        return self.box.numel * ITEM_BYTES[self.dtype]


class PlacedChunk(NamedTuple):
    """A chunk, and its range of bytes in the file's data."""

    region: TensorRegion
    start: int  # from the end of the header
    stop: int

    @property
    def key(self) -> str:
        box = self.region.box
        if box.shape == self.region.whole:
            return self.region.name
        spans = (f"{start}:{start + length}" for start, length in zip(box.offset, box.shape))
        return f"{self.region.name}[{','.join(spans)}]"


def assign_writers(held: Sequence[Iterable[TensorRegion]]) -> list[list[TensorRegion]]:
    """Assign each logical byte to one rank, so that all ranks write about equally much.

    `held` lists what each rank holds. A large box that several ranks hold is cut between them
    along its first dim; a small one goes to the rank with the least to write.
    """
    holders: dict[TensorRegion, list[int]] = {}
    for rank, items in enumerate(held):
        for item in items:
            holders.setdefault(item, []).append(rank)
    shares: list[list[TensorRegion]] = [[] for _ in held]
    load = [0] * len(held)

    def give(rank: int, item: TensorRegion) -> None:
        shares[rank].append(item)
        load[rank] += item.num_bytes

    for item, ranks in sorted(holders.items()):
        rows = item.box.shape[0] if item.box.shape else 0
        if item.num_bytes < MIN_SPLIT_BYTES * len(ranks) or rows < len(ranks):
            give(min(ranks, key=load.__getitem__), item)
            continue
        for i, rank in enumerate(ranks):
            start, stop = (rows * j // len(ranks) for j in (i, i + 1))
            give(rank, item._replace(box=item.box.cut(0, start, stop)))
    return shares


def lay_out_file(share: Iterable[TensorRegion]) -> list[PlacedChunk]:
    """Put chunks one after the other, the largest element types first, so that all are aligned."""
    chunks = [
        item._replace(box=box)
        for item in sorted(share, key=lambda item: -ITEM_BYTES[item.dtype])
        for box in split_box(item.box, MOST_CHUNK_BYTES // ITEM_BYTES[item.dtype])
    ]
    placed, at = [], 0
    for chunk in chunks:
        stop = at + chunk.num_bytes
        placed.append(PlacedChunk(chunk, at, stop))
        at = stop
    return placed


def encode_header(placed: Iterable[PlacedChunk]) -> bytes:
    """The bytes before the data: the length of the JSON header, and the header."""
    entries = {
        chunk.key: {
            "dtype": chunk.region.dtype,
            "shape": chunk.region.box.shape,
            "data_offsets": (chunk.start, chunk.stop),
        }
        for chunk in placed
    }
    return pack_header(entries)


def pack_header(entries: Mapping[str, Any]) -> bytes:
    """Encode the header of a safetensors file, padded so that the data is aligned."""
    text = msgspec.json.encode(entries)
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
