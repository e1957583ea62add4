"""Cutting a stream of samples into blocks and shards, by their lengths alone.

A shard is written while it is cut: `ShardCutter.parts` gives block after block and then the table,
and takes samples only as it needs them, so that one block is in memory at a time. Where a block or
a shard ends depends on nothing but the settings and the lengths of samples before compression.
Next: `writing.py`.
"""

from collections.abc import Generator, Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from shoal.data.shard_files.blocks import deflate
from shoal.data.shard_files.encoding import EncodedSample
from shoal.data.shard_files.format import (
    BLOCK_BYTES,
    PackedLayout,
    RowLayout,
    ShardInfo,
    ShardTable,
    Words,
    encode_table,
    table_hash,
)


class BuildSettings(msgspec.Struct, frozen=True):
    """What must be the same for a build to resume."""

    format: str  # tells our note from a foreign file
    version: int
    num_samples: int
    identity: str
    probes: str  # a hash of some samples
    shard_bytes: int
    compression: str | None
    layout: RowLayout | PackedLayout


class FinishedShard(msgspec.Struct, frozen=True):
    """A shard of a draft, with what it was made of: samples `first` to `last` of the source."""

    shard: ShardInfo
    first: int
    last: int
    first_hash: str
    last_hash: str


class _ShardBlock(NamedTuple):
    """A block: its bytes as they are stored, and its samples' lengths before compression."""

    stored: bytes
    lengths: list[int]


class PeekableSamples:
    """Samples of which the next one can be looked at."""

    def __init__(self, samples: Generator[EncodedSample, None, None]):
        self._samples = samples
        self._next = next(samples, None)

    def has_more(self) -> bool:
        return self._next is not None

    def peek(self) -> EncodedSample:
        assert self._next is not None
        return self._next

    def take(self) -> EncodedSample:
        taken = self.peek()
        self._next = next(self._samples, None)
        return taken

    def close(self) -> None:
        self._samples.close()  # ends the workers


class ShardCutter:
    """One shard, taken from the samples while its parts are asked for."""

    def __init__(self, settings: BuildSettings, samples: PeekableSamples):
        self._settings, self._samples = settings, samples
        self._first: EncodedSample | None = None
        self._last: EncodedSample | None = None
        self._hashes: list[int] = []
        self._stored: list[int] = [0]
        self._raw: list[int] = [0]
        self._lengths: list[int] = []
        self._table = b""

    def parts(self) -> Iterator[bytes]:
        while not self._is_full():
            made = self._block()
            self._hashes.append(xxhash.xxh3_64_intdigest(made.stored))
            self._stored.append(self._stored[-1] + len(made.stored))
            self._raw.append(self._raw[-1] + sum(made.lengths))
            self._lengths += made.lengths
            yield made.stored
        is_packed = isinstance(self._settings.layout, PackedLayout)
        offsets = np.cumsum([0, *self._lengths], dtype=np.uint64) if is_packed else None
        table = ShardTable(_words(self._hashes), _words(self._stored), _words(self._raw), offsets)
        is_compressed = self._settings.compression is not None
        self._table = encode_table(self._stored[-1], table, is_compressed)
        yield self._table

    def finished(self) -> FinishedShard:
        shard = ShardInfo(
            len(self._lengths), len(self._hashes), self._stored[-1], table_hash(self._table)
        )
        first, last = self._first, self._last
        assert first is not None and last is not None
        hashes = (xxhash.xxh3_128_hexdigest(end.content) for end in (first, last))
        return FinishedShard(shard, first.number, last.number, *hashes)

    def _is_full(self) -> bool:
        if not self._samples.has_more():
            return True
        rows = self._settings.layout
        if isinstance(rows, RowLayout):
            return len(self._lengths) == rows.shard_rows
        following = self._raw[-1] + len(self._samples.peek().content)
        return bool(self._lengths) and following > self._settings.shard_bytes

    def _block(self) -> _ShardBlock:
        """Whole samples, of about BLOCK_BYTES together, and at least one."""
        contents: list[bytes | bytearray] = []
        num_bytes = 0
        while not self._ends_block(contents, num_bytes):
            self._last = fed = self._samples.take()
            self._first = self._first or fed
            contents.append(fed.content)
            num_bytes += len(fed.content)
        raw = b"".join(contents)
        stored = raw if self._settings.compression is None else deflate(raw)
        return _ShardBlock(stored, [len(content) for content in contents])

    def _ends_block(self, contents: list[bytes | bytearray], num_bytes: int) -> bool:
        if not self._samples.has_more():
            return True
        rows = self._settings.layout
        if isinstance(rows, RowLayout):
            return len(contents) == rows.block_rows
        most = min(BLOCK_BYTES, self._settings.shard_bytes)
        return bool(contents) and num_bytes + len(self._samples.peek().content) > most


def _words(numbers: list[int]) -> Words:
    return np.asarray(numbers, dtype=np.uint64)
