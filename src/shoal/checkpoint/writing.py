"""What all writers of a checkpoint do alike: runs, imports and copies.

A file is its header and its chunks, hashed as they go by. The last act checks the manifest as a
reader would, signs it if there is a key, seals it and commits.
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
from shoal.checkpoint.chunks import Held, Placed, header
from shoal.checkpoint.finding import Where, split_url
from shoal.checkpoint.manifest import Chunk, File, Manifest, Tensor
from shoal.checkpoint.signing import SIGNATURE, sign, signing_key
from shoal.errors import UsageError
from shoal.storage.object_store import local_path, open_store
from shoal.storage.remote import without_password
from shoal.storage.store import SEAL, Directory, Draft, Store
from shoal.system.processes import WORK


class Written(NamedTuple):
    """A file, and the tensors of which it has chunks."""

    file: File
    tensors: tuple[Tensor, ...]


def write_chunks(
    draft: Draft,
    number: int,
    placed: Sequence[Placed],
    contents: Iterable[Iterable[memoryview]],
) -> Written:
    """Write file `number`; `contents` are the parts of each chunk, in the order of `placed`."""
    head, name = header(placed), f"rank-{number:05d}.safetensors"
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
    chunks: dict[str, tuple[Held, list[Chunk]]] = {}
    for one, digest in zip(placed, hashes, strict=True):
        box, (_, found) = one.held.box, chunks.setdefault(one.held.name, (one.held, []))
        if box.numel:
            found.append(Chunk(box.offset, box.shape, number, len(head) + one.start, digest))
    size = len(head) + (placed[-1].stop if placed else 0)
    return Written(
        File(name, size, len(head), xxhash.xxh3_128_hexdigest(head)),
        tuple(Tensor(h.name, h.dtype, h.whole, tuple(found)) for h, found in chunks.values()),
    )


def joined(parts: Iterable[Iterable[Tensor]]) -> tuple[Tensor, ...]:
    """Tensors of which several files have chunks, by name."""
    found: dict[str, Tensor] = {}
    for tensor in chain.from_iterable(parts):
        known = found.get(tensor.name)
        chunks = (known.chunks if known else ()) + tensor.chunks
        found[tensor.name] = msgspec.structs.replace(tensor, chunks=chunks)
    return tuple(found[name] for name in sorted(found))


def commit(draft: Draft, manifest: Manifest, drop: Iterable[str] = ()) -> int:
    """Make a checkpoint appear whose files are written. Returns its bytes."""
    content = manifests.encode(manifest)
    manifests.decode(content, manifests.seal(content))  # never commit what no one would load
    draft.write(manifests.MANIFEST, [content])
    if (key := signing_key()) is not None:
        draft.write(SIGNATURE, [sign(content, key)])
    draft.write(SEAL, [manifests.seal(content)])
    draft.commit(drop=drop)
    return len(content) + sum(file.num_bytes for file in manifest.files)


class Place(NamedTuple):
    """Where a checkpoint can be made: nothing of that name is in the store."""

    store: Store
    name: str

    def __str__(self) -> str:
        return f"{self.store}/{self.name}"


def free_place(where: Where) -> Place:
    """A place by its path or URL, at which nothing may be."""
    signing_key()  # one that is wrong is refused before anything is written
    path, shown = local_path(where), without_password(str(where))
    store: Store
    if path is not None:
        whole = Path(os.path.abspath(path))
        store, name, is_there = Directory(whole.parent), whole.name, os.path.lexists(path)
    else:
        parent, name = split_url(str(where))
        store = open_store(parent)
        is_there = _is_in(store, name)
    if is_there:
        raise UsageError(f"{shown} is there already. Choose another place, or remove it first.")
    if name.startswith("."):
        raise UsageError(f"{shown}: a name that begins with a dot is a draft's. Choose another.")
    return Place(store, name)


@contextmanager
def new_draft(place: Place) -> Iterator[Draft]:
    """The draft of a new checkpoint, which the caller commits."""
    try:
        draft = place.store.begin(place.name, f"{os.getpid():x}-{os.urandom(6).hex()}")
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
