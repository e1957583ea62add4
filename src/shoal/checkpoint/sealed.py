"""Reading a checkpoint without torch: what it says of itself, and whether its bytes are its own.

A `Sealed` checkpoint has a manifest that is sealed and consistent, and files that are there, whole
in length and alone. A chunk's bytes are hashed before anyone is given them, again each time that
they are fetched. `verify` looks at every byte; hashing lets other threads run, so it uses as many
cores as it is given. `load.py` fills tensors from it.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import NamedTuple

import msgspec
import xxhash

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.chunks import Held, Placed
from shoal.checkpoint.manifest import MANIFEST, MOST_MANIFEST_BYTES, Chunk, File, Tensor
from shoal.checkpoint.retention import Known
from shoal.checkpoint.signing import SIGNATURE, check, signing_key, unsigned
from shoal.errors import BadCheckpoint, MayBeGood
from shoal.storage.decoding import UNREADABLE
from shoal.storage.remote import StoreError
from shoal.storage.store import SEAL, Reader, Store
from shoal.system.processes import WORK

MOST_HEADER_BYTES = 100_000_000  # readers of safetensors refuse more
MOST_SEAL_BYTES = 1024
LENGTH_BYTES = 8  # before a header: its length


class _Entry(msgspec.Struct, frozen=True):
    """What the header of a safetensors file says of a chunk."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Sealed:
    """A checkpoint that can be verified. `plain` is what its optimizer keeps beside tensors.

    `key_of` gives the key that it must be signed with, by default the environment's.
    """

    def __init__(self, store: Store, name: str, key_of: Callable[[], bytes | None] = signing_key):
        self.name = name
        content = _small(store, name, MANIFEST, MOST_MANIFEST_BYTES)
        sealed = _small(store, name, SEAL, MOST_SEAL_BYTES)
        key = key_of()
        files = _listed(store, name)
        if key is not None:
            if SIGNATURE not in files:
                raise unsigned()
            check(content, _small(store, name, SIGNATURE, MOST_SEAL_BYTES), key)
        self.manifest = manifests.decode(content, sealed)
        self.seal = manifests.digest(content)
        self.plain = self.manifest.plain
        known = {file.name for file in self.manifest.files} | {MANIFEST, SEAL, SIGNATURE}
        if others := files - known:
            raise BadCheckpoint(f"{min(others)} does not belong to it.")
        self._files = [_open(store, name, file.name) for file in self.manifest.files]
        for number in range(len(self._files)):
            self._header(number)
        self._tensors = {tensor.name: tensor for tensor in self.manifest.tensors}
        self._verified: set[tuple[int, int]] = set()
        of_files = sum(file.num_bytes for file in self.manifest.files)
        self.num_bytes = len(content) + len(sealed) + of_files

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def tensor(self, name: str) -> Tensor:
        """What the manifest says of a tensor."""
        return self._tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def content(self, tensor: Tensor, chunk: Chunk) -> memoryview:
        """The bytes of a chunk, if they are those that were written."""
        reader, at = self._files[chunk.file], (chunk.file, chunk.start)
        content = reader.read(chunk.start, tensor.num_bytes(chunk))
        WORK.done += 1
        if not (reader.keeps and at in self._verified):
            if xxhash.xxh3_128_hexdigest(content) != chunk.hash:
                raise BadCheckpoint(
                    f"{self.manifest.files[chunk.file].name}: the bytes of {tensor.name} from "
                    f"{chunk.start} are not those that were written."
                )
            self._verified.add(at)
        return content

    def bytes_of_file(self, number: int) -> Iterator[memoryview]:
        """All bytes of a file in turn, each looked at before it is given."""
        yield self._header(number)
        for tensor, chunk in self._chunks[number]:
            yield self.content(tensor, chunk)

    def verify(self, num_threads: int = 1) -> None:
        """Look at every byte, and raise for the first that is wrong."""
        for fault in self.faults(num_threads):
            raise BadCheckpoint(fault)

    def faults(self, num_threads: int = 1) -> Iterator[str]:
        """Look at every byte, and say what is wrong, in the order of the files."""
        yield from self.faults_of_headers()
        chunks = [pair for of_file in self._chunks for pair in of_file]
        if num_threads == 1:
            yield from filter(None, map(self._fault, chunks))
            return
        with ThreadPoolExecutor(num_threads, thread_name_prefix="shoal-verify") as threads:
            yield from filter(None, threads.map(self._fault, chunks))

    def _fault(self, chunk: tuple[Tensor, Chunk]) -> str:
        try:
            self.content(*chunk)
        except BadCheckpoint as bad:
            return str(bad)
        return ""

    def faults_of_headers(self) -> Iterator[str]:
        """Every header describes what the manifest lists, so that all readers see the same."""
        listed: list[dict[str, _Entry]] = [{} for _ in self._files]
        for tensor, chunk in self.manifest.chunks():
            start = chunk.start - self.manifest.files[chunk.file].header_bytes
            held = Held(tensor.name, tensor.dtype, tensor.shape, chunk.box)
            placed = Placed(held, start, start + tensor.num_bytes(chunk))
            entry = _Entry(tensor.dtype, chunk.shape, (placed.start, placed.stop))
            listed[chunk.file][placed.key] = entry
        for number, (file, entries) in enumerate(zip(self.manifest.files, listed)):
            if _described(self._header(number)[LENGTH_BYTES:]) != entries:
                yield f"{file.name}: its header does not describe what {MANIFEST} lists."

    def _header(self, number: int) -> memoryview:
        """The bytes of a file's header, if the file has its length and they are those written."""
        return _sound_header(self._files[number], self.manifest.files[number])

    @cached_property
    def _chunks(self) -> list[list[tuple[Tensor, Chunk]]]:
        """Those of each file, in their order there."""
        chunks: list[list[tuple[Tensor, Chunk]]] = [[] for _ in self.manifest.files]
        for tensor, chunk in self.manifest.chunks():
            chunks[chunk.file].append((tensor, chunk))
        return [sorted(some, key=lambda pair: pair[1].start) for some in chunks]


class Judged(NamedTuple):
    """What retention goes by, of checkpoints that are sound; and what is wrong with the others."""

    known: list[Known]
    bad: dict[str, str]


def known_of(store: Store, names: Iterable[str]) -> Judged:
    """Look at seals, names and lengths of checkpoints, not at every byte."""
    judged = Judged([], {})
    for name in names:
        try:
            progress = Sealed(store, name).manifest.progress
        except BadCheckpoint as problem:
            judged.bad[name] = str(problem)
        else:
            judged.known.append(Known(name, progress.step, progress.metrics))
    return judged


def _described(header: memoryview) -> dict[str, _Entry] | None:
    """What a header says of chunks that have bytes; None if it cannot be read."""
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        made = {key: msgspec.json.decode(entry, type=_Entry) for key, entry in entries.items()}
    except UNREADABLE:
        return None
    return {key: entry for key, entry in made.items() if 0 not in entry.shape}


def _open(store: Store, name: str, file: str) -> Reader:
    try:
        return store.open(name, file)
    except StoreError:
        raise  # of a store that cannot be reached nobody knows whether it holds a bad one
    except OSError as error:
        raise MayBeGood(f"{file} cannot be read: {error.strerror}.") from None


def _small(store: Store, name: str, file: str, most: int) -> bytes:
    reader = _open(store, name, file)
    if reader.num_bytes > most:
        raise BadCheckpoint(f"{file} has {reader.num_bytes} bytes; {most} is the most.")
    return bytes(reader.read(0, reader.num_bytes))


def _listed(store: Store, name: str) -> set[str]:
    try:
        return store.files(name)
    except StoreError:
        raise
    except OSError as error:
        raise MayBeGood(f"{name} cannot be listed: {error.strerror}.") from None


def _sound_header(reader: Reader, file: File) -> memoryview:
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
