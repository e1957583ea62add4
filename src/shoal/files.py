"""Files that appear whole or not at all, whoever is killed when.

They are written under another name beside their place and moved there in one act, so readers see
the file that was there before or the new one. Not for files that are added to, nor for checkpoints,
whose files appear together (`checkpoint/storage.py`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path, mark: str = "partial") -> Iterator[Path]:
    """A path to write to; what is there takes the place of `path` if all goes well.

    The name is always the same, so that what a killed writer left is written over. Where several
    may write at once, each gives a `mark` of its own.
    """
    unfinished = path.with_name(f"{path.name}.{mark}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that any number of processes may write at once; its directory must be there.

    On the disk before it has its name: after a loss of power, too, it is whole.
    """
    with replacing(path, os.urandom(6).hex()) as unfinished, open(unfinished, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
