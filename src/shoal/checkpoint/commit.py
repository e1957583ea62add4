"""What all writers of a checkpoint share: runs, imports and copies.

A file is its header and its chunks, hashed as they are written. `commit_checkpoint` checks the
manifest as a reader would, signs it if there is a key, seals it and commits the draft.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec
import xxhash

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.chunks import PlacedChunk, TensorRegion, encode_header
from shoal.checkpoint.find import PathOrUrl, split_url
from shoal.checkpoint.manifest import Chunk, FileEntry, Manifest, TensorEntry
from shoal.checkpoint.signing import SIGNATURE, sign, signing_key
from shoal.errors import UsageError
from shoal.storage.object_client import redact_password
from shoal.storage.object_store import local_path, open_store
from shoal.storage.store import SEAL, DirectoryStore, Draft, Store
from shoal.system.processes import WORK


class WrittenFile(NamedTuple):
    """A file, and the entries of the tensors whose chunks it holds."""

    file: FileEntry
    tensors: tuple[TensorEntry, ...]


def write_chunks(
    draft: Draft,
    number: int,
    placed: Sequence[PlacedChunk],
    contents: Iterable[Iterable[memoryview]],
) -> WrittenFile:
    """Write file `number`; `contents` yields the bytes of each chunk, in the order of `placed`."""
    head, name = encode_header(placed), f"rank-{number:05d}.safetensors"
    hashes: list[str] = []

    def hashed() -> Iterator[memoryview]:
        for parts in contents:
            digest = xxhash.xxh3_128()
            for part in parts:
                digest.update(part)
                yield part
                WORK.done += 1
            hashes.append(digest.hexdigest())

    draft.write(name, chain([head], hashed()))
    chunks: dict[str, tuple[TensorRegion, list[Chunk]]] = {}
    for one, digest in zip(placed, hashes, strict=True):
        box, (_, found) = one.region.box, chunks.setdefault(one.region.name, (one.region, []))
        if box.numel:
            found.append(Chunk(box.offset, box.shape, number, len(head) + one.start, digest))
    size = len(head) + (placed[-1].stop if placed else 0)
    return WrittenFile(
        FileEntry(name, size, len(head), xxhash.xxh3_128_hexdigest(head)),
        tuple(TensorEntry(h.name, h.dtype, h.whole, tuple(found)) for h, found in chunks.values()),
    )


def merge_tensors(parts: Iterable[Iterable[TensorEntry]]) -> tuple[TensorEntry, ...]:
    """Merge the chunks that several files hold of a tensor; sorted by name."""
    found: dict[str, TensorEntry] = {}
    for tensor in chain.from_iterable(parts):
        known = found.get(tensor.name)
        chunks = (known.chunks if known else ()) + tensor.chunks
        found[tensor.name] = msgspec.structs.replace(tensor, chunks=chunks)
    return tuple(found[name] for name in sorted(found))


def commit_checkpoint(draft: Draft, manifest: Manifest, drop: Iterable[str] = ()) -> int:
    """Commit a checkpoint whose files are written. Returns its bytes."""
    content = manifests.encode(manifest)
    manifests.decode(content, manifests.seal(content))  # never commit what no reader accepts
    draft.write(manifests.MANIFEST, [content])
    if (key := signing_key()) is not None:
        draft.write(SIGNATURE, [sign(content, key)])
    draft.write(SEAL, [manifests.seal(content)])
    draft.commit(drop=drop)
    return len(content) + sum(file.num_bytes for file in manifest.files)


class CheckpointTarget(NamedTuple):
    """A store, and a name in it that is free for a new checkpoint."""

    store: Store
    name: str

    def __str__(self) -> str:
        return f"{self.store}/{self.name}"


def new_target(where: PathOrUrl) -> CheckpointTarget:
    """The target at a path or URL; refuses one that exists."""
    signing_key()  # refuse a bad key before anything is written
    path, shown = local_path(where), redact_password(str(where))
    store: Store
    if path is not None:
        whole = Path(os.path.abspath(path))
        store, name, is_there = DirectoryStore(whole.parent), whole.name, os.path.lexists(path)
    else:
        parent, name = split_url(str(where))
        store = open_store(parent)
        is_there = _is_in(store, name)
    if is_there:
        raise UsageError(f"{shown} is there already. Choose another place, or remove it first.")
    if name.startswith("."):
        raise UsageError(f"{shown}: a name that begins with a dot is a draft's. Choose another.")
    return CheckpointTarget(store, name)


@contextmanager
def open_draft(place: CheckpointTarget) -> Iterator[Draft]:
    """The draft of a new checkpoint. The caller commits it; an error discards it."""
    try:
        draft = place.store.create_draft(place.name, f"{os.getpid():x}-{os.urandom(6).hex()}")
        try:
            yield draft
        except BaseException:
            draft.discard()
            raise
    except UsageError:
        raise
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"{place} cannot be written: {why}. Nothing was left there.") from error


def _is_in(store: Store, name: str) -> bool:
    try:
        return bool(store.files(name))
    except FileNotFoundError:
        return False
