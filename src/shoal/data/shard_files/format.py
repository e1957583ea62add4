"""What a set of shards says of itself: the index, and the table at the end of each shard.

`index.json` tells how samples are laid out and lists the shards; `index.sha256` seals it. A shard
is a row of blocks and then a table with the XXH3-64 of each block; the index has the XXH3-128 of
each table. So every byte of a set hangs on the seal, and a reader that looks at one sample has to
hash one block of some 64 KiB: 8 bytes of table a block, 5 us at its first use, none after it.

Two layouts. `rows`: all samples have leaves of one shape and type, so each is a row of the same
length and a batch is one gather. `packed`: a sample is whatever `data/packing.py` makes of it, and
is found through offsets. Blocks of either may be compressed, one by one. Needs no torch; described
for readers in other languages in docs/reference/shards.md. Next: `reading.py`, `writing.py`.
"""

import hashlib
import math
import re
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.storage.decoding import SealedFile

FORMAT, VERSION = "shoal-shards", 1
INDEX, SEAL = "index.json", "index.sha256"
BLOCK_BYTES = 64 << 10  # what the kernel maps at a time, and little to read for one sample
MOST_INDEX_BYTES = 256 << 20
MOST_DEPTH = 32
COMPRESSIONS = ("zstd",)
ITEM_BYTES = {
    **dict.fromkeys(["bool", "uint8", "int8"], 1),
    **dict.fromkeys(["uint16", "int16", "float16", "bfloat16"], 2),
    **dict.fromkeys(["uint32", "int32", "float32"], 4),
    **dict.fromkeys(["uint64", "int64", "float64", "complex64"], 8),
}
_OF_NUMBERS = {"int": "int64", "float": "float64", "bool": "bool"}
_HASH = re.compile(r"[0-9a-f]{32}")
_WORD = 8

Words = NDArray[np.uint64]


class BadShards(UsageError):
    """A set of shards is not whole, not sound, or not what it says it is."""


class NoShards(BadShards):
    """There is no set of shards at all."""


class Leaf(msgspec.Struct, frozen=True):
    """A tensor, array or number of every sample, and where in a row its bytes begin."""

    kind: str  # tensor, array, int, float or bool
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class RowLayout(msgspec.Struct, frozen=True, tag_field="kind", tag="rows"):
    """Every sample is a row of the same length."""

    row_bytes: int
    block_rows: int
    shard_rows: int  # in every shard but the last
    tree: Any  # a leaf's number, or {"tuple": [...]}, {"list": [...]}, {"dict": [[key, ...], ...]}
    leaves: tuple[Leaf, ...]


class PackedLayout(msgspec.Struct, frozen=True, tag_field="kind", tag="packed"):
    """Every sample has a header of its own."""


class ShardInfo(msgspec.Struct, frozen=True):
    """A file; its place in the list is its number and gives its name."""

    num_samples: int
    num_blocks: int
    data_bytes: int  # the table follows them
    hash: str  # of the table


class Index(msgspec.Struct, frozen=True, dict=True):
    """All of `index.json`."""

    format: str
    version: int
    num_samples: int
    layout: RowLayout | PackedLayout
    compression: str | None
    shards: tuple[ShardInfo, ...]
    origin: dict[str, str]  # what it was built from, and by which version

    def num_bytes(self, shard: ShardInfo) -> int:
        """The length of a shard's file."""
        return shard.data_bytes + table_bytes(self, shard)

    @cached_property
    def digest(self) -> str:
        """Stands for every byte of the set. Of an index that was read, it is what was sealed."""
        return hashlib.sha256(encode(self)).hexdigest()


class ShardTable(NamedTuple):
    """Where things are in a shard. Raw bytes are those before compression."""

    hashes: Words  # of each block as it is stored
    stored: Words  # where each block begins in the file; then where the last ends
    raw: Words  # the same for the blocks as they were before compression
    offsets: Words | None  # where each packed sample begins among the raw bytes; then the end


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.bin"


def encode(index: Index) -> bytes:
    return msgspec.json.encode(index) + b"\n"


_SEALED = SealedFile(INDEX, SEAL, FORMAT, VERSION, BadShards)
seal = _SEALED.seal


def decode(content: bytes, sealed: bytes) -> Index:
    """An index that is what was sealed, and consistent."""
    index = _SEALED.decode(content, sealed, Index)
    _check(index)
    # Not of what we would write: there may be fields that we do not know.
    msgspec.structs.force_setattr(index, "digest", hashlib.sha256(content).hexdigest())
    return index


def table_bytes(index: Index, shard: ShardInfo) -> int:
    """How long the table of a shard is, with the zeros that come before it."""
    words = shard.num_blocks
    if index.compression is not None:
        words += shard.num_blocks + 1
    if isinstance(index.layout, PackedLayout):
        words += shard.num_blocks + 1 + shard.num_samples + 1
    return -shard.data_bytes % _WORD + words * _WORD


def encode_table(data_bytes: int, table: ShardTable, is_compressed: bool) -> bytes:
    """Zeros up to a multiple of 8, then the arrays that a reader cannot work out."""
    arrays = [table.hashes]
    if is_compressed:
        arrays.append(table.stored)
    if table.offsets is not None:
        arrays += [table.raw, table.offsets]
    content = b"".join(array.astype("<u8").tobytes() for array in arrays)
    return bytes(-data_bytes % _WORD) + content


def table_hash(content: bytes | memoryview) -> str:
    return xxhash.xxh3_128_hexdigest(content)


def decode_table(index: Index, number: int, content: bytes | memoryview) -> ShardTable:
    """The table of a shard, if it is the one that the index was written with, and consistent."""
    shard, name = index.shards[number], shard_name(number)
    if len(content) != table_bytes(index, shard) or table_hash(content) != shard.hash:
        raise BadShards(f"{name}: its table is not the one that was written.")
    words = np.frombuffer(content, "<u8", offset=-shard.data_bytes % _WORD)
    hashes, words = words[: shard.num_blocks], words[shard.num_blocks :]
    stored, offsets = None, None
    if index.compression is not None:
        stored, words = words[: shard.num_blocks + 1], words[shard.num_blocks + 1 :]
    if isinstance(index.layout, PackedLayout):
        raw, offsets = words[: shard.num_blocks + 1], words[shard.num_blocks + 1 :]
    else:
        firsts = np.arange(shard.num_blocks + 1, dtype=np.uint64) * index.layout.block_rows
        raw = np.minimum(firsts, shard.num_samples).astype(np.uint64) * index.layout.row_bytes
    table = ShardTable(hashes, raw if stored is None else stored, raw, offsets)
    if not _is_consistent(table, shard):
        raise BadShards(f"{name}: its table does not fit its {shard.data_bytes} bytes.")
    return table


def _is_consistent(table: ShardTable, shard: ShardInfo) -> bool:
    if table.stored[-1] != shard.data_bytes or not _ascends(table.stored):
        return False
    if not _ascends(table.raw):
        return False
    if table.offsets is None:
        return True
    if table.offsets[-1] != table.raw[-1] or not _ascends(table.offsets):
        return False
    at = np.searchsorted(table.offsets, table.raw)  # a block holds whole samples
    return bool(np.array_equal(table.offsets[at], table.raw))


def _ascends(words: Words) -> bool:
    return bool(words[0] == 0 and (words[1:] > words[:-1]).all())


def _check(index: Index) -> None:
    if index.compression is not None and index.compression not in COMPRESSIONS:
        raise BadShards(f"{INDEX}: the compression {index.compression!r} is not known.")
    for number, shard in enumerate(index.shards):
        fits = 1 <= shard.num_blocks <= min(shard.num_samples, shard.data_bytes)
        is_large = max(shard.num_samples, shard.data_bytes) >= 2**48
        if not fits or is_large or not _HASH.fullmatch(shard.hash):
            raise BadShards(
                f"{INDEX}: {shard_name(number)} is said to have {shard.num_samples} samples in "
                f"{shard.num_blocks} blocks of {shard.data_bytes} bytes, and the hash "
                f"{shard.hash!r}, which cannot be."
            )
    num_samples = sum(shard.num_samples for shard in index.shards)
    if num_samples != index.num_samples or not index.shards:
        raise BadShards(
            f"{INDEX} is said to have {index.num_samples} samples; its shards have {num_samples}."
        )
    if isinstance(index.layout, RowLayout):
        _check_rows(index, index.layout)


def _check_rows(index: Index, rows: RowLayout) -> None:
    sizes = (rows.row_bytes, rows.block_rows, rows.shard_rows)
    if min(sizes) < 1 or max(sizes) >= 2**48 or rows.row_bytes % _WORD:
        raise BadShards(f"{INDEX}: rows of {rows.row_bytes} bytes cannot be.")
    if rows.shard_rows % rows.block_rows:
        raise BadShards(f"{INDEX}: blocks of {rows.block_rows} rows do not fill a shard.")
    for leaf in rows.leaves:
        _check_leaf(leaf, rows.row_bytes)
    if sorted(_numbers(rows.tree)) != list(range(len(rows.leaves))):
        raise BadShards(f"{INDEX}: the tree of a sample does not name each leaf once.")
    for number, shard in enumerate(index.shards):
        is_last = number == len(index.shards) - 1
        wanted = min(shard.num_samples, rows.shard_rows) if is_last else rows.shard_rows
        num_blocks = -(-shard.num_samples // rows.block_rows)
        raw_bytes = shard.num_samples * rows.row_bytes
        is_raw = index.compression is None
        if (
            shard.num_samples != wanted
            or shard.num_blocks != num_blocks
            or (is_raw and shard.data_bytes != raw_bytes)
        ):
            raise BadShards(f"{INDEX}: {shard_name(number)} does not hold the rows that it should.")


def _check_leaf(leaf: Leaf, row_bytes: int) -> None:
    number = _OF_NUMBERS.get(leaf.kind)
    if leaf.dtype not in ITEM_BYTES or leaf.kind not in ("tensor", "array", *_OF_NUMBERS):
        raise BadShards(f"{INDEX}: a leaf is a {leaf.kind} of {leaf.dtype}, which is not known.")
    if number is not None and (leaf.dtype != number or leaf.shape):
        raise BadShards(f"{INDEX}: a leaf is a {leaf.kind} of {leaf.dtype}, which cannot be.")
    if any(size < 0 for size in leaf.shape) or leaf.start < 0 or leaf.start % _WORD:
        raise BadShards(f"{INDEX}: a leaf of shape {list(leaf.shape)} at {leaf.start} cannot be.")
    if leaf.start + leaf.num_bytes > row_bytes:
        raise BadShards(
            f"{INDEX}: a leaf ends at byte {leaf.start + leaf.num_bytes} of rows of {row_bytes}."
        )


def _numbers(tree: Any, depth: int = 0) -> list[int]:
    """The leaves that a tree names."""
    if type(tree) is int:
        return [tree]
    match tree:
        case {"tuple": [*parts]} | {"list": [*parts]} if len(tree) == 1 and depth < MOST_DEPTH:
            return [number for part in parts for number in _numbers(part, depth + 1)]
        case {"dict": [*pairs]} if len(tree) == 1 and depth < MOST_DEPTH:
            if all(isinstance(p, list) and len(p) == 2 and type(p[0]) in (str, int) for p in pairs):
                return [number for _, part in pairs for number in _numbers(part, depth + 1)]
    raise BadShards(f"{INDEX}: the tree of a sample holds what no sample does.")


def first_samples(index: Index) -> list[int]:
    """The number of each shard's first sample; then how many there are."""
    firsts = [0]
    for shard in index.shards:
        firsts.append(firsts[-1] + shard.num_samples)
    return firsts


def samples_of_block(index: Index, number: int, table: ShardTable, block: int) -> tuple[int, int]:
    """The first sample of a block, and the first of the next one, counted through the set."""
    first = first_samples(index)[number]
    if table.offsets is None:
        assert isinstance(index.layout, RowLayout)
        edges = (np.arange(block, block + 2) * index.layout.block_rows).tolist()
        edges = [min(edge, index.shards[number].num_samples) for edge in edges]
    else:
        edges = np.searchsorted(table.offsets, table.raw[block : block + 2]).tolist()
    return first + edges[0], first + edges[1]
