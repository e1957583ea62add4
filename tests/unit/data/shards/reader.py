"""A reader of shards written from docs/reference/shards.md alone; Shoal is not imported."""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import xxhash
import zstandard


class Set:
    def __init__(self, path: Path):
        content = (path / "index.json").read_bytes()
        digest = hashlib.sha256(content).hexdigest()
        assert (path / "index.sha256").read_text() == f"{digest}  index.json\n"
        self.path, self.index = path, json.loads(content)
        assert (self.index["format"], self.index["version"]) == ("shoal-shards", 1)

    def sample(self, number: int) -> Any:
        for place, shard in enumerate(self.index["shards"]):
            if number < shard["num_samples"]:
                return self._sample(place, shard, number)
            number -= shard["num_samples"]
        raise IndexError

    def _sample(self, place: int, shard: dict, number: int) -> Any:
        content = (self.path / f"shard-{place:05d}.bin").read_bytes()
        layout, size = self.index["layout"], shard["data_bytes"]
        table = content[size:]
        assert xxhash.xxh3_128_hexdigest(table) == shard["hash"]
        words = np.frombuffer(table[-size % 8 :], "<u8").tolist()
        blocks = shard["num_blocks"]
        hashes, words = words[:blocks], words[blocks:]
        stored = None
        if self.index["compression"]:
            stored, words = words[: blocks + 1], words[blocks + 1 :]
        if layout["kind"] == "packed":
            raw, offsets = words[: blocks + 1], words[blocks + 1 :]
            start, stop = offsets[number], offsets[number + 1]
            block = max(b for b in range(blocks) if raw[b] <= start)
        else:
            assert not words
            length, per_block = layout["row_bytes"], layout["block_rows"]
            last = shard["num_samples"] * length
            raw = [min(b * per_block * length, last) for b in range(blocks + 1)]
            start, stop = number * length, (number + 1) * length
            block = number // per_block
        where = raw if stored is None else stored
        found = content[where[block] : where[block + 1]]
        assert xxhash.xxh3_64_intdigest(found) == hashes[block]
        if stored is not None:
            found = zstandard.ZstdDecompressor().decompress(found)
        assert len(found) == raw[block + 1] - raw[block]
        mine = found[start - raw[block] : stop - raw[block]]
        return unpacked(mine) if layout["kind"] == "packed" else of_row(layout, mine)


def of_row(layout: dict, row: bytes) -> Any:
    def value(tree: Any) -> Any:
        if isinstance(tree, int):
            leaf = layout["leaves"][tree]
            made = array(leaf["dtype"], leaf["shape"], row[leaf["start"] :])
            return made if leaf["kind"] in ("tensor", "array") else made.item()
        ((kind, parts),) = tree.items()
        if kind == "dict":
            return {key: value(part) for key, part in parts}
        return [value(part) for part in parts]

    return value(layout["tree"])


def unpacked(sample: bytes) -> Any:
    length = int.from_bytes(sample[:4], "little")
    arrays = sample[-(-(4 + length) // 64) * 64 :]

    def value(head: Any) -> Any:
        if not isinstance(head, list):
            return head
        kind, *rest = head
        if kind == "dict":
            return {value(key): value(part) for key, part in zip(rest[::2], rest[1::2])}
        if kind in ("tuple", "list"):
            return [value(part) for part in rest]
        dtype, shape, offset = rest
        return array(dtype, shape, arrays[offset:])

    return value(msgspec.msgpack.decode(sample[4 : 4 + length]))


def array(dtype: str, shape: list[int], content: bytes) -> np.ndarray:
    count = int(np.prod(shape))
    return np.frombuffer(content, np.dtype(dtype).newbyteorder("<"), count).reshape(shape)
