"""The manifest of a checkpoint: every logical tensor, where its bytes are, and the run's state.

`manifest.json` lists the files, the tensors, and the chunks of each tensor: a box, the file, the
first byte, the XXH3-128 of the bytes. `manifest.sha256` seals it. A manifest is checked as a whole
before any file is read: boxes tile their tensors, chunks and headers tile their files, file names
stay inside the directory. So a manifest is complete and consistent, or refused; this needs no
torch. docs/reference/checkpoint.md describes the format for readers in other languages.
"""

import hashlib
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from shoal.errors import BadCheckpoint
from shoal.parallel.boxes import Box, tile
from shoal.storage.decoding import SealedFile
from shoal.storage.store import SEAL

FORMAT, VERSION = "shoal-checkpoint", 1
MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 256 << 20
ALIGNMENT = 8  # of every chunk's first byte, so that it can be used where it lies

# Names as in safetensors, with the bytes of one element.
ITEM_BYTES = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"], 1),
    **dict.fromkeys(["U16", "I16", "F16", "BF16"], 2),
    **dict.fromkeys(["U32", "I32", "F32"], 4),
    **dict.fromkeys(["U64", "I64", "F64", "C64"], 8),
}
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_HASH = re.compile(r"[0-9a-f]{32}")


class Chunk(msgspec.Struct, frozen=True):
    """A box of a tensor, in row-major order, and where its bytes are."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    file: int  # index in the list of files
    start: int
    hash: str

    @property
    def box(self) -> Box:
        return Box(self.offset, self.shape)


class TensorEntry(msgspec.Struct, frozen=True):
    """A logical tensor, whole, independent of the plan that saved it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    def num_bytes(self, chunk: Chunk) -> int:
        return chunk.box.numel * ITEM_BYTES[self.dtype]


class FileEntry(msgspec.Struct, frozen=True):
    """A safetensors file. Its header's bytes are hashed like a chunk."""

    name: str
    num_bytes: int
    header_bytes: int
    header_hash: str


class Progress(msgspec.Struct, frozen=True):
    """How far the run is: what it needs to resume, beside tensors and `plain`."""

    step: int
    samples: int  # consumed so far
    epoch: int  # of the next batch
    batch: int  # of that epoch, the next one
    metrics: dict[str, float] = {}  # the loss of the last step, and metrics measured after it
    loss_scale: dict[str, Any] = {}
    tags: list[str] = []  # that callbacks gave this checkpoint


class Origin(msgspec.Struct, frozen=True):
    """What was trained, how it was spread, and by which code."""

    recipe: str
    run: dict[str, Any]  # the plain fields of the Run
    plan: str
    num_pieces: int
    num_samples: int  # of the data
    versions: dict[str, str]
    parent: str | None = None  # the seal of the checkpoint that the run resumed from


class Manifest(msgspec.Struct, frozen=True):
    """All of `manifest.json`."""

    format: str
    version: int
    progress: Progress
    origin: Origin
    plain: dict[str, Any]  # numbers and text of the optimizer's state
    files: tuple[FileEntry, ...]
    tensors: tuple[TensorEntry, ...]

    def chunks(self) -> Iterator[tuple[TensorEntry, Chunk]]:
        return ((tensor, chunk) for tensor in self.tensors for chunk in tensor.chunks)


def encode(manifest: Manifest) -> bytes:
    return msgspec.json.encode(manifest) + b"\n"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


_SEALED = SealedFile(MANIFEST, SEAL, FORMAT, VERSION, BadCheckpoint)
seal = _SEALED.seal


def decode(content: bytes, sealed: bytes) -> Manifest:
    """Decode a manifest that matches its seal and is consistent."""
    manifest = _SEALED.decode(content, sealed, Manifest)
    _check(manifest)
    return manifest


def _check(manifest: Manifest) -> None:
    progress = manifest.progress
    if min(progress.step, progress.samples, progress.epoch, progress.batch) < 0:
        raise BadCheckpoint(f"It says that it is of step {progress.step}, which cannot be.")
    names = [file.name for file in manifest.files]
    for file in manifest.files:
        if not _PLAIN_NAME.fullmatch(file.name):
            raise BadCheckpoint(f"A file is named {file.name!r}, which is not a plain name.")
        if not _HASH.fullmatch(file.header_hash):
            raise BadCheckpoint(f"{file.name}: {file.header_hash!r} is not a hash.")
    _refuse_twice(names, "file")
    _refuse_twice([tensor.name for tensor in manifest.tensors], "tensor")
    used: list[list[tuple[int, int]]] = [
        [(0, file.header_bytes)] if file.header_bytes >= 0 else [] for file in manifest.files
    ]
    for tensor in manifest.tensors:
        _check_tensor(tensor, len(names))
        for chunk in tensor.chunks:
            used[chunk.file].append((chunk.start, chunk.start + tensor.num_bytes(chunk)))
    for file, spans in zip(manifest.files, used):
        _check_spans(file, sorted(spans))


def _check_tensor(tensor: TensorEntry, num_files: int) -> None:
    if tensor.dtype not in ITEM_BYTES:
        raise BadCheckpoint(f"{tensor.name} has the unknown type {tensor.dtype!r}.")
    if any(size < 0 for size in tensor.shape):
        raise BadCheckpoint(f"{tensor.name} has the impossible shape {list(tensor.shape)}.")
    for chunk in tensor.chunks:
        if not chunk.box.fits(tensor.shape):
            raise BadCheckpoint(
                f"{tensor.name}: the chunk at {list(chunk.offset)} of shape {list(chunk.shape)} "
                f"lies outside of {list(tensor.shape)}."
            )
        if not 0 <= chunk.file < num_files:
            raise BadCheckpoint(f"{tensor.name}: there is no file {chunk.file}.")
        if chunk.start % ITEM_BYTES[tensor.dtype]:
            raise BadCheckpoint(f"{tensor.name}: a chunk at byte {chunk.start} is not aligned.")
        if not _HASH.fullmatch(chunk.hash):
            raise BadCheckpoint(f"{tensor.name}: {chunk.hash!r} is not a hash.")
    if not tile([chunk.box for chunk in tensor.chunks], tensor.shape):
        raise BadCheckpoint(
            f"{tensor.name}: its chunks do not cover {list(tensor.shape)} exactly once."
        )


def _check_spans(file: FileEntry, spans: list[tuple[int, int]]) -> None:
    at = 0
    for start, stop in spans:
        if start != at:
            what = "belong to two chunks" if start < at else "belong to no chunk"
            raise BadCheckpoint(f"{file.name}: bytes from {min(start, at)} {what}.")
        at = stop
    if at != file.num_bytes:
        raise BadCheckpoint(f"{file.name}: its chunks end at byte {at}, not {file.num_bytes}.")


def _refuse_twice(names: list[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise BadCheckpoint(f"The {what} {name} is listed twice.")
        seen.add(name)
