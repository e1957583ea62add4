"""A rank's part of a checkpoint: which chunks it writes, and the safetensors file they lie in.

The file is an ordinary one: any reader of safetensors can open it, and finds each chunk under the
tensor's name, with its box in brackets where it is not the whole.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import msgspec

from shoal.checkpoint.dealing import Held
from shoal.checkpoint.manifest import ALIGNMENT, ITEM_BYTES
from shoal.parallel.boxes import pieces

MOST_CHUNK_BYTES = 16 << 20  # a reader verifies whole chunks, however little it needs of one


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


def place(share: Iterable[Held]) -> list[Placed]:
    """Chunks one after the other, those of the largest elements first, so that all are aligned."""
    chunks = [
        item._replace(box=box)
        for item in sorted(share, key=lambda item: -ITEM_BYTES[item.dtype])
        for box in pieces(item.box, MOST_CHUNK_BYTES // ITEM_BYTES[item.dtype])
    ]
    placed, at = [], 0
    for chunk in chunks:
        stop = at + math.prod(chunk.box.shape) * ITEM_BYTES[chunk.dtype]
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
