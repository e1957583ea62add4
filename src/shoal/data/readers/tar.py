"""Samples in tar files, as WebDataset writes them, read in place.

Members of one stem make a sample: `a/0001.jpg` and `a/0001.cls` are {"__key__": "a/0001",
"jpg": ..., "cls": ...}, each the bytes of a member. The headers are read once, in one pass; after
that a member is one read away, in any order. Nothing is ever extracted, and a file that holds
anything but plain members and folders is refused: links, devices, sparse files, absolute paths,
"..", sizes beyond a limit.

Cost: 32 bytes a member and its key kept. A compressed file cannot be entered in its middle, so
.tar.gz is refused. Next: `headers.py`, which reads the headers.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from shoal.data.readers.files import Files, PathLike
from shoal.data.readers.headers import Member, members
from shoal.data.readers.records import Names, position
from shoal.errors import UsageError
from shoal.logs import log

KEY = "__key__"
MOST_BYTES = 256 << 20  # of one member
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}


class TarSamples:
    """Made by `tar`."""

    def __init__(self, files: Files, most_bytes: int):
        self.files = files
        keys: list[str] = []
        found: list[tuple[int, int, int, int]] = []  # file, offset, size, ending
        firsts = [0]
        endings: dict[str, int] = {}
        for number in range(len(files)):
            for key, parts in self._samples(number, most_bytes):
                keys.append(key)
                for ending, part in parts.items():
                    kind = endings.setdefault(ending, len(endings))
                    found.append((number, part.offset, part.num_bytes, kind))
                firsts.append(len(found))
        self.keys = Names(keys)
        self._members = np.array(found, dtype=np.int64).reshape(-1, 4)
        self._firsts = np.array(firsts, dtype=np.int64)
        self._endings = list(endings)

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> dict[str, Any]:
        at = position(index, len(self))
        sample: dict[str, Any] = {KEY: self.keys[at]}
        for row in self._members[self._firsts[at] : self._firsts[at + 1]]:
            number, offset, size, ending = (int(value) for value in row)
            sample[self._endings[ending]] = self.files.read(number, offset, offset + size)
        return sample

    def identity(self) -> str:
        return self.files.identity("tar")

    def _samples(self, number: int, most_bytes: int) -> Iterator[tuple[str, dict[str, Member]]]:
        """The samples of a file in the order in which their first members come."""
        name = self.files.names[number]
        _refuse_compressed(self.files, number)
        samples: dict[str, dict[str, Member]] = {}
        num_left_out = 0
        for member in members(self.files, number, most_bytes):
            key, ending = _stem(member.name)
            if not ending:
                num_left_out += 1
                continue
            parts = samples.setdefault(key, {})
            if ending in parts or ending == KEY:
                raise UsageError(
                    f"{name} holds {member.name} twice. A sample is the members of one stem, each "
                    "with an ending of its own."
                )
            parts[ending] = member
        if num_left_out:
            log.warning("%s: %d members have no ending and are left out", name, num_left_out)
        yield from samples.items()


def tar(
    paths: PathLike | Sequence[PathLike],
    *,
    most_bytes: int = MOST_BYTES,
    options: Mapping[str, Any] | None = None,
) -> TarSamples:
    """A source of the samples in one or several tar files, by path or URL, as dicts of bytes.

    A member of more than `most_bytes` is refused. `options` go to the back end of a URL.
    """
    return TarSamples(Files(paths, options), most_bytes)


def _stem(path: str) -> tuple[str, str]:
    """The key of a member and its ending: what follows the first dot of its name, if any."""
    folder, slash, name = path.rpartition("/")
    stem, _, ending = name.partition(".")
    return f"{folder}{slash}{stem}", ending.lower() if stem else ""


def _refuse_compressed(files: Files, number: int) -> None:
    start = files.read(number, 0, min(8, files.num_bytes(number)))
    for magic, kind in _COMPRESSED.items():
        if start.startswith(magic):
            raise UsageError(
                f"{files.names[number]} is compressed by {kind}. A member in the middle could only "
                "be read by unpacking all before it; decompress the file once, or make shards of "
                "it, which are compressed sample by sample."
            )
