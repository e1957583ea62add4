"""Read and verify a checkpoint without torch.

A `VerifiedCheckpoint` has a sealed, consistent manifest, files of the right lengths, and no other
files. A chunk is hashed before its bytes are returned, and again each time it is fetched. `verify`
reads every byte; hashing releases the GIL, so it uses as many threads as it is given.
Read next: `load.py`, which fills tensors.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import NamedTuple, TypeVar

import msgspec
import xxhash

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.chunks import PlacedChunk, TensorRegion
from shoal.checkpoint.manifest import MANIFEST, MOST_MANIFEST_BYTES, Chunk, FileEntry, TensorEntry
from shoal.checkpoint.retention import CheckpointSummary
from shoal.checkpoint.signing import SIGNATURE, check_signature, signing_key, unsigned_error
from shoal.errors import BadCheckpoint, UnusableCheckpoint
from shoal.storage.decoding import PARSE_ERRORS
from shoal.storage.object_client import StoreError
from shoal.storage.store import SEAL, FileReader, Store
from shoal.system.processes import WORK

T = TypeVar("T")
MOST_HEADER_BYTES = 100_000_000  # readers of safetensors refuse more
MOST_SEAL_BYTES = 1024
LENGTH_BYTES = 8  # before a header: its length


class _HeaderEntry(msgspec.Struct, frozen=True):
    """A chunk in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class VerifiedCheckpoint:
    """A checkpoint with a checked manifest. `plain` is the optimizer's state that is no tensor.

    `key_of` returns the key that it must be signed with, by default the environment's.
    """

    def __init__(self, store: Store, name: str, key_of: Callable[[], bytes | None] = signing_key):
        self.name, self._store, self._key_of = name, store, key_of
        self._verified: set[tuple[int, int]] = set()
        self._lock, self._num_copies = threading.Lock(), 0
        while True:
            try:
                self._look()
                return
            except (BadCheckpoint, StoreError):
                if not store.fall_over(name):
                    raise

    def _look(self) -> None:
        """Read what tells of it, and open its files; nothing of them is verified yet."""
        store, name = self._store, self.name
        content = _read_small(store, name, MANIFEST, MOST_MANIFEST_BYTES)
        sealed = _read_small(store, name, SEAL, MOST_SEAL_BYTES)
        key = self._key_of()
        files = _list_files(store, name)
        if key is not None:
            if SIGNATURE not in files:
                raise unsigned_error()
            check_signature(content, _read_small(store, name, SIGNATURE, MOST_SEAL_BYTES), key)
        self.manifest = manifests.decode(content, sealed)
        self.seal = manifests.digest(content)
        self.plain = self.manifest.plain
        known = {file.name for file in self.manifest.files} | {MANIFEST, SEAL, SIGNATURE}
        if others := files - known:
            raise BadCheckpoint(f"{min(others)} does not belong to it.")
        self._files = [_open(store, name, file.name) for file in self.manifest.files]
        for reader, file in zip(self._files, self.manifest.files, strict=True):
            _read_header(reader, file)
        self._tensors = {tensor.name: tensor for tensor in self.manifest.tensors}
        self._verified.clear()
        of_files = sum(file.num_bytes for file in self.manifest.files)
        self.num_bytes = len(content) + len(sealed) + of_files

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def tensor(self, name: str) -> TensorEntry:
        """A tensor's entry in the manifest."""
        return self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def _from_a_copy(self, read: Callable[[], T]) -> T:
        """What `read` gives, from the first copy of a mirror that is sound and can be reached."""
        while True:
            number = self._num_copies
            try:
                return read()
            except (BadCheckpoint, StoreError):
                with self._lock:  # another thread may have found it out
                    if number == self._num_copies:
                        if not self._store.fall_over(self.name):
                            raise
                        self._num_copies += 1
                        seal = self.seal
                        self._look()
                        if self.seal != seal:
                            raise

    def read_chunk(self, tensor: TensorEntry, chunk: Chunk) -> memoryview:
        """The verified bytes of a chunk."""
        return self._from_a_copy(lambda: self._read_chunk(tensor, chunk))

    def _read_chunk(self, tensor: TensorEntry, chunk: Chunk) -> memoryview:
        reader, at = self._files[chunk.file], (chunk.file, chunk.start)
        content = reader.read(chunk.start, tensor.num_bytes(chunk))
        WORK.done += 1
        if not (reader.is_stable and at in self._verified):
            if xxhash.xxh3_128_hexdigest(content) != chunk.hash:
                raise BadCheckpoint(
                    f"{self.manifest.files[chunk.file].name}: the bytes of {tensor.name} from "
                    f"{chunk.start} are not those that were written."
                )
            self._verified.add(at)
        return content

    def read_file(self, number: int) -> Iterator[memoryview]:
        """All bytes of a file in turn, verified."""
        yield self._header(number)
        for tensor, chunk in self._chunks[number]:
            yield self.read_chunk(tensor, chunk)

    def verify(self, num_threads: int = 1) -> None:
        """Read every byte; raise BadCheckpoint for the first fault."""
        for fault in self.faults(num_threads):
            raise BadCheckpoint(fault)

    def faults(self, num_threads: int = 1) -> Iterator[str]:
        """Read every byte; yield the faults, in the order of the files."""
        yield from self.header_faults()
        chunks = [pair for of_file in self._chunks for pair in of_file]
        if num_threads == 1:
            yield from filter(None, map(self._fault, chunks))
            return
        with ThreadPoolExecutor(num_threads, thread_name_prefix="shoal-verify") as threads:
            yield from filter(None, threads.map(self._fault, chunks))

    def _fault(self, chunk: tuple[TensorEntry, Chunk]) -> str:
        try:
            self.read_chunk(*chunk)
        except BadCheckpoint as bad:
            return str(bad)
        return ""

    def header_faults(self) -> Iterator[str]:
        """Yield the files whose header does not describe the chunks of the manifest."""
        listed: list[dict[str, _HeaderEntry]] = [{} for _ in self._files]
        for tensor, chunk in self.manifest.chunks():
            start = chunk.start - self.manifest.files[chunk.file].header_bytes
            held = TensorRegion(tensor.name, tensor.dtype, tensor.shape, chunk.box)
            placed = PlacedChunk(held, start, start + tensor.num_bytes(chunk))
            entry = _HeaderEntry(tensor.dtype, chunk.shape, (placed.start, placed.stop))
            listed[chunk.file][placed.key] = entry
        for number, (file, entries) in enumerate(zip(self.manifest.files, listed)):
            if _parse_header(self._header(number)[LENGTH_BYTES:]) != entries:
                yield f"{file.name}: its header does not describe what {MANIFEST} lists."

    def _header(self, number: int) -> memoryview:
        """The verified bytes of a file's header; the file must have its length."""
        return self._from_a_copy(
            lambda: _read_header(self._files[number], self.manifest.files[number])
        )

    @cached_property
    def _chunks(self) -> list[list[tuple[TensorEntry, Chunk]]]:
        """The chunks of each file, in order."""
        chunks: list[list[tuple[TensorEntry, Chunk]]] = [[] for _ in self.manifest.files]
        for tensor, chunk in self.manifest.chunks():
            chunks[chunk.file].append((tensor, chunk))
        return [sorted(some, key=lambda pair: pair[1].start) for some in chunks]


class Inspection(NamedTuple):
    """Summaries of sound checkpoints, and what is wrong with the others."""

    known: list[CheckpointSummary]
    bad: dict[str, str]


def inspect_checkpoints(store: Store, names: Iterable[str]) -> Inspection:
    """Check seals, names and lengths of checkpoints, without reading every byte."""
    found = Inspection([], {})
    for name in names:
        try:
            progress = VerifiedCheckpoint(store, name).manifest.progress
        except BadCheckpoint as problem:
            found.bad[name] = str(problem)
        else:
            found.known.append(
                CheckpointSummary(name, progress.step, progress.metrics, progress.tags)
            )
    return found


def _parse_header(header: memoryview) -> dict[str, _HeaderEntry] | None:
    """The entries of a header that are not empty; None if it cannot be read."""
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        made = {
            key: msgspec.json.decode(entry, type=_HeaderEntry) for key, entry in entries.items()
        }
    except PARSE_ERRORS:
        return None
    return {key: entry for key, entry in made.items() if 0 not in entry.shape}


def _open(store: Store, name: str, file: str) -> FileReader:
    try:
        return store.open(name, file)
    except StoreError:
        raise  # the store cannot be reached, so the checkpoint is not known to be bad
    except OSError as error:
        raise UnusableCheckpoint(f"{file} cannot be read: {error.strerror}.") from None


def _read_small(store: Store, name: str, file: str, most: int) -> bytes:
    reader = _open(store, name, file)
    if reader.num_bytes > most:
        raise BadCheckpoint(f"{file} has {reader.num_bytes} bytes; {most} is the most.")
    return bytes(reader.read(0, reader.num_bytes))


def _list_files(store: Store, name: str) -> set[str]:
    try:
        return store.files(name)
    except StoreError:
        raise
    except OSError as error:
        raise UnusableCheckpoint(f"{name} cannot be listed: {error.strerror}.") from None


def _read_header(reader: FileReader, file: FileEntry) -> memoryview:
    if reader.num_bytes != file.num_bytes:
        raise BadCheckpoint(
            f"{file.name} has {reader.num_bytes} bytes; {file.num_bytes} were written."
        )
    if not LENGTH_BYTES <= file.header_bytes <= MOST_HEADER_BYTES:
        raise BadCheckpoint(
            f"{file.name}: a header of {file.header_bytes} bytes cannot be; it has from "
            f"{LENGTH_BYTES} to {MOST_HEADER_BYTES}."
        )
    header = reader.read(0, file.header_bytes)
    if xxhash.xxh3_128_hexdigest(header) != file.header_hash:
        raise BadCheckpoint(f"{file.name}: the header is not the one that was written.")
    length = LENGTH_BYTES + int.from_bytes(header[:LENGTH_BYTES], "little")
    if length != file.header_bytes:
        raise BadCheckpoint(
            f"{file.name}: the header says that it has {length} bytes; it has {file.header_bytes}."
        )
    return header
