"""A reader of checkpoints that knows nothing of Shoal: docs/reference/checkpoint.md is enough."""

import hashlib
import json
import re
import stat
import struct
from pathlib import Path
from typing import Any

import numpy
import xxhash

PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
TYPES = {
    **dict.fromkeys(["U8", "F8_E4M3", "F8_E5M2"], "u1"),
    **dict.fromkeys(["U16", "BF16"], "<u2"),
    **{f"U{bits}": f"<u{bits // 8}" for bits in (32, 64)},
    **{f"I{bits}": f"<i{bits // 8}" for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
    "BOOL": "?",
    "C64": "<c8",
}


def need(is_so: bool, what: str) -> None:
    if not is_so:
        raise ValueError(what)


def read(directory: Path) -> tuple[dict[str, Any], dict[str, numpy.ndarray]]:
    """The manifest and all tensors; BF16 and 8-bit floats as bits."""
    text = (directory / "manifest.json").read_bytes()
    seal = f"{hashlib.sha256(text).hexdigest()}  manifest.json\n".encode()
    need((directory / "manifest.sha256").read_bytes() == seal, "seal")
    manifest = json.loads(text)
    need((manifest["format"], manifest["version"]) == ("shoal-checkpoint", 1), "version")
    names = [file["name"] for file in manifest["files"]]
    need(all(map(PLAIN.fullmatch, names)) and len(set(names)) == len(names), "names")
    listed = {*names, "manifest.json", "manifest.sha256"}
    need({path.name for path in directory.iterdir()} == listed, "files")
    contents, spans = [], []
    for file in manifest["files"]:
        need(stat.S_ISREG((directory / file["name"]).lstat().st_mode), file["name"])
        content = (directory / file["name"]).read_bytes()
        need(len(content) == file["num_bytes"], file["name"])
        header = content[: file["header_bytes"]]
        need(xxhash.xxh3_128_hexdigest(header) == file["header_hash"], file["name"])
        need(struct.unpack("<Q", header[:8])[0] == len(header) - 8, file["name"])
        contents.append(content)
        spans.append([(0, len(header))])
    tensors: dict[str, numpy.ndarray] = {}
    for tensor in manifest["tensors"]:
        need(tensor["name"] not in tensors, tensor["name"])
        made = numpy.zeros(tensor["shape"], TYPES[tensor["dtype"]])
        covered = numpy.zeros(tensor["shape"], int)
        for chunk in tensor["chunks"]:
            start, count = chunk["start"], int(numpy.prod(chunk["shape"], dtype=int))
            spans[chunk["file"]].append((start, start + count * made.itemsize))
            content = contents[chunk["file"]][start : start + count * made.itemsize]
            need(xxhash.xxh3_128_hexdigest(content) == chunk["hash"], tensor["name"])
            values = numpy.frombuffer(content, made.dtype).reshape(chunk["shape"])
            box = tuple(slice(o, o + n) for o, n in zip(chunk["offset"], chunk["shape"]))
            made[box] = values
            covered[box] += 1
        need(bool((covered == 1).all()), tensor["name"])
        tensors[tensor["name"]] = made
    for file, content, used in zip(names, contents, map(sorted, spans)):
        ends = [0, *(stop for _, stop in used)]
        need([*(start for start, _ in used), len(content)] == ends, file)
    return manifest, tensors
