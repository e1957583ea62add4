"""`pack` and `unpack`: one smaller file of what is stored, and back, bit for bit.

A checkpoint is verified before it is packed, and the pack is read back and hashed before it gets
its name, so a pack that is there is whole. How it is laid out: `formats/packed.py`. Not for files
that are compressed already, which stay as large as they are.

Cost: one pass over the source and one over the pack, memory of a few blocks.
"""

from pathlib import Path

import msgspec

from shoal.checkpoint.find import NoCheckpoint, find_checkpoints, open_newest
from shoal.checkpoint.verify import VerifiedCheckpoint
from shoal.errors import BadCheckpoint, UsageError, require
from shoal.formats import packed
from shoal.storage.object_client import redact_password
from shoal.storage.object_store import local_path
from shoal.storage.store import DirectoryStore
from shoal.world import cores

# What tells a directory of weights from any other, beside a checkpoint's own files.
_EXPORTS = ("*.safetensors", "*.pt2", "*.pt", "*.bin", "*.onnx", ".metadata")


class PackResult(msgspec.Struct, frozen=True):
    """What `shoal pack --json` prints, beside the exit code."""

    bytes_before: int
    bytes_after: int
    verified: bool  # read back, and every file has the hash that it had
    out: str
    note: str = ""  # which of several checkpoints was taken


def pack(source: str | Path, out: str | Path) -> PackResult:
    """Pack a checkpoint, the newest good one of a run, an export or a file of weights.

    `out` must not exist; it appears once its content was compared with the source's.
    """
    require("zstandard", extra="slim")
    path, note = _what_to_pack(_on_disk(source, "what is packed"))
    sizes = packed.write_pack(path, _on_disk(out, "a pack"))
    return PackResult(sizes.before, sizes.after, True, str(out), note)


def unpack(source: str | Path, out: str | Path) -> PackResult:
    """Write what a pack holds to `out`, which must not exist."""
    require("zstandard", extra="slim")
    path = _on_disk(source, "a pack")
    if not path.is_file():
        raise UsageError(f"There is no packed file {path}. Give one that `shoal pack` wrote.")
    sizes = packed.unpack(path, _on_disk(out, "what is unpacked"))
    return PackResult(sizes.before, sizes.after, True, str(out))


def _on_disk(where: str | Path, what: str) -> Path:
    path = local_path(where)
    if path is None:
        raise UsageError(
            f"{redact_password(str(where))} is no path, and {what} must be on a disk. Copy it: "
            "shoal checkpoint convert URL PATH."
        )
    return path


def _what_to_pack(path: Path) -> tuple[Path, str]:
    """The file or directory, of several checkpoints the newest good one, and a word on that."""
    if not path.exists():
        raise UsageError(f"There is no {path}. Give a run, a checkpoint, an export or a file.")
    if path.is_file():
        if packed.is_pack(path):
            raise UsageError(f"{path} is packed already. To get its content: --unpack.")
        return path, ""
    try:
        num_found = len(find_checkpoints(path).names)
    except NoCheckpoint:
        if not any(next(path.glob(pattern), None) for pattern in _EXPORTS):
            raise
        return path, ""
    chosen = open_newest(VerifiedCheckpoint, path, lambda opened: opened.verify(cores()))
    if num_found == 1:  # which was not judged yet
        try:
            chosen.opened.verify(cores())
        except BadCheckpoint as bad:
            raise BadCheckpoint(f"{chosen.place} is bad: {bad}") from None
    assert isinstance(chosen.store, DirectoryStore)
    return chosen.store.path / chosen.name, chosen.note
