"""The blocks of one shard: checked before their first byte is believed, inflated if need be.

A block is looked at as a whole once, and that it is sound is remembered for the life of the
process: a file that is changed later is not noticed (shards are written once and never changed).
Needs no torch. Next: `reading.py` for samples, `verifying.py` for all blocks of a set.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from shoal.data.shard_files.format import (
    BadShards,
    Index,
    decode_table,
    samples_of_block,
    shard_name,
)
from shoal.data.shard_files.region import map_file
from shoal.errors import require
from shoal.system.processes import PerProcess

KEPT_BYTES = 32 << 20  # of inflated blocks, in each set that is open


class OpenShard:
    """A shard whose table is sound. `data` are the bytes before the table."""

    def __init__(self, index: Index, number: int, data: memoryview, table: bytes | memoryview):
        self.number, self.name = number, shard_name(number)
        self.table = decode_table(index, number, table)
        self._index, self._data = index, data
        self._is_sound = bytearray(index.shards[number].num_blocks)

    def stored(self, block: int) -> memoryview:
        """A block's bytes as they lie in the file, if they are those that were written."""
        start, stop = self.table.stored[block : block + 2].tolist()
        content = self._data[start:stop]
        if not self._is_sound[block]:
            if xxhash.xxh3_64_intdigest(content) != int(self.table.hashes[block]):
                raise BadShards(self._fault(block, start, stop))
            self._is_sound[block] = 1
        return content

    def inflated(self, block: int) -> bytes:
        """A block's bytes as they were before compression."""
        start, stop = self.table.raw[block : block + 2].tolist()
        return inflate(self.stored(block), stop - start, self.name)

    def faults(self) -> Iterator[str]:
        """What is wrong with it, block by block."""
        for block in range(len(self._is_sound)):
            try:
                self.stored(block)
            except BadShards as bad:
                yield str(bad)

    def _fault(self, block: int, start: int, stop: int) -> str:
        first, last = samples_of_block(self._index, self.number, self.table, block)
        samples = f"sample {first}" if last == first + 1 else f"samples {first} to {last - 1}"
        return (
            f"{self.name}: the bytes {start} to {stop - 1}, which are {samples}, are not those "
            "that were written."
        )


class InflatedBlocks:
    """The inflated blocks of a set that were used last, within a limit."""

    def __init__(self, most_bytes: int = KEPT_BYTES):
        self._most_bytes, self._num_bytes = most_bytes, 0
        self._kept: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self._locked = PerProcess(threading.RLock).get

    def block(self, shard: OpenShard, block: int) -> bytes:
        key = (shard.number, block)
        with self._locked():
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        content = shard.inflated(block)
        with self._locked():
            if key not in self._kept:
                self._kept[key] = content
                self._num_bytes += len(content)
            while self._num_bytes > self._most_bytes and len(self._kept) > 1:
                self._num_bytes -= len(self._kept.popitem(last=False)[1])
        return content


def split_shard(index: Index, number: int, content: memoryview) -> tuple[memoryview, memoryview]:
    """The data and the table of a shard."""
    data_bytes = index.shards[number].data_bytes
    return content[:data_bytes], content[data_bytes:]


def open_shard(index: Index, number: int, path: Path) -> OpenShard:
    """The shard in a file of the right length."""
    return OpenShard(index, number, *split_shard(index, number, map_file(path)))


def inflate(content: memoryview, num_bytes: int, name: str) -> bytes:
    zstd: Any = require("zstandard", "zstd")
    try:
        if zstd.frame_content_size(content) != num_bytes:
            raise BadShards(f"{name}: a block does not inflate to the {num_bytes} bytes it should.")
        return bytes(zstd.ZstdDecompressor().decompress(content, max_output_size=num_bytes))
    except zstd.ZstdError as error:
        raise BadShards(f"{name}: a block cannot be inflated: {error}.") from None


def deflate(content: bytes | bytearray | memoryview) -> bytes:
    zstd: Any = require("zstandard", "zstd")
    return bytes(zstd.ZstdCompressor(level=3).compress(content))
