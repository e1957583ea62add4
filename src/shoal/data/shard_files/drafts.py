"""A set of shards being built: invisible until it is whole, and resumed if cut short.

In a directory a draft is a hidden directory beside the target, which takes its name in one rename
after every byte was made durable. Behind a URL, which has no rename, shards are written where they
stay and the seal last: without a seal there is no set, and a set that is replaced goes when the
build begins. Either is found again by the next build, by its note; nothing that has no name of ours
is ever removed. One process builds a set at a time; a directory is locked, for a URL that is
up to you.
"""

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from shoal.data.shard_files.blocks import open_shard
from shoal.data.shard_files.fetching import PATIENCE_S, read_range, run_within
from shoal.data.shard_files.format import (
    FORMAT,
    INDEX,
    SEAL,
    BadShards,
    Index,
    decode_table,
    seal,
    shard_name,
    table_bytes,
)
from shoal.data.shard_files.locations import ShardBucket, ShardDirectory, ShardLocation, ShardMirror
from shoal.errors import UsageError
from shoal.storage.decoding import FormatHeader, try_decode_json
from shoal.storage.files import try_lock
from shoal.storage.object_client import ObjectClient
from shoal.storage.store import DirectoryStore

UPLOAD_BYTES = 32 << 20
SLOWEST_BYTES_PER_S = 100_000  # an upload that is slower is given up
NOTE = "build.json"  # the settings of an unfinished build
_TOKEN = "build"
_OURS = re.compile(r"shard-\d{5,}\.(bin|json)")


class FolderDraft:
    """A draft on a disk. `write` makes a file appear whole, or not at all."""

    def __init__(self, place: ShardDirectory):
        target = Path(os.path.abspath(place.path))
        self._target, self._lock = target, -1
        self._draft = DirectoryStore(target.parent).join_draft(target.name, _TOKEN)
        self.path = self._draft.path

    def refuse_others(self, force: bool) -> None:
        """Refuse to replace what is there: a set without `force`, anything else always."""
        if not os.path.lexists(self._target):
            return
        try:
            names = set(os.listdir(self._target))
        except NotADirectoryError:
            names = {""}
        except OSError as error:
            raise UsageError(f"{self._target} cannot be listed: {error.strerror}.") from None
        if names and not {INDEX, SEAL} & names:
            raise UsageError(_foreign(self._target))
        if names and not force:
            raise UsageError(_taken(self._target))
        others = sorted(name for name in names - {INDEX, SEAL} if not _OURS.fullmatch(name))
        if others:
            raise UsageError(
                f"{self._target} holds {others[0]} beside its set, which --force would remove with "
                "it. Move that elsewhere first, or build into another place."
            )

    def begin(self) -> None:
        """Resume a draft, or begin one; refuses if another process has it."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        if not try_lock(self._lock):
            os.close(self._lock)
            self._lock = -1
            raise UsageError(
                f"{self._target} is being built by another process. Wait for it, or choose "
                "another directory."
            )
        for name in os.listdir(self.path):
            if name.endswith(".part"):  # of a build that was killed
                os.unlink(self.path / name)

    def write(self, file: str, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        try:
            self._draft.write(file, (memoryview(part) for part in parts))
        except BaseException:
            with suppress(OSError):
                os.unlink(self.path / f"{file}.part")
            raise

    def read(self, file: str) -> bytes | None:
        return self._draft.read(file)

    def is_sound(self, index: Index, number: int) -> bool:
        """Whether a shard that an earlier process wrote is there and what it should be."""
        try:
            path = ShardDirectory(self.path).local(index, number, ()).path
            return not any(open_shard(index, number, path).faults())
        except (UsageError, OSError):
            return False

    def clear(self) -> None:
        """Remove all that was written so far."""
        for name in os.listdir(self.path):
            os.unlink(self.path / name)

    def commit(self, index: bytes, notes: Iterable[str]) -> None:
        """Let the set appear, without the notes of its build."""
        self.write(INDEX, [index])
        self.write(SEAL, [seal(index)])
        self._draft.commit([NOTE, *notes])

    def close(self, discard: bool) -> None:
        if discard:
            self._draft.discard()
        if self._lock >= 0:
            os.close(self._lock)


class BucketDraft:
    """A draft in an object store, where the note stays until the seal is there."""

    def __init__(self, place: ShardBucket):
        self._remote: ObjectClient = place.remote

    def __str__(self) -> str:
        return str(self._remote)

    def refuse_others(self, force: bool) -> None:
        found = self._found()
        if SEAL in found:
            if not force:
                raise UsageError(_taken(self))
        elif found and not _is_note(self.read(NOTE)):
            raise UsageError(_foreign(self))

    def begin(self) -> None:
        if self._size(SEAL) is not None:
            # First a note that fits no build: should this one end now, the next clears the rest.
            self.write(NOTE, [msgspec.json.encode(FormatHeader(FORMAT))])
            self.clear()

    def write(self, file: str, parts: Iterable[bytes | bytearray | memoryview]) -> None:
        views = [memoryview(bytes(part)) for part in parts if len(part)]
        size = sum(map(len, views))
        what, seconds = f"write {self}/{file}", PATIENCE_S + size / SLOWEST_BYTES_PER_S
        if size <= UPLOAD_BYTES:
            run_within(what, lambda: self._remote.put(file, b"".join(views)), seconds)
        else:
            run_within(what, lambda: self._remote.upload(file, views, UPLOAD_BYTES), seconds)

    def read(self, file: str) -> bytes | None:
        return run_within(f"read {self}/{file}", lambda: self._remote.get(file))

    def _size(self, file: str) -> int | None:
        return run_within(f"look at {self}/{file}", lambda: self._remote.size(file))

    def is_sound(self, index: Index, number: int) -> bool:
        """By its length and its table: to look at every byte would be to fetch them all."""
        shard, name = index.shards[number], shard_name(number)
        if self._size(name) != index.num_bytes(shard):
            return False
        end = shard.data_bytes + table_bytes(index, shard)
        try:
            decode_table(index, number, read_range(self._remote, name, shard.data_bytes, end))
        except BadShards:
            return False
        return True

    def clear(self) -> None:
        """Remove a set or a draft, save for the note by which it is known."""
        found = self._found()
        if SEAL in found:
            self._delete([SEAL])  # first: no reader ever finds half of a set
        self._delete([name for name in found if name == INDEX or _OURS.fullmatch(name)])

    def _found(self) -> list[str]:
        return run_within(f"list {self}", lambda: self._remote.find(""))

    def _delete(self, names: list[str]) -> None:
        run_within(f"remove objects of {self}", lambda: self._remote.delete(names))

    def commit(self, index: bytes, notes: Iterable[str]) -> None:
        """The seal is what makes the set appear. Notes go before it: none may be found in a set."""
        self.write(INDEX, [index])
        self._delete(list(notes))
        self.write(SEAL, [seal(index)])
        with suppress(OSError, UsageError):  # it would mean nothing
            self._delete([NOTE])

    def close(self, discard: bool) -> None:
        if discard:
            with suppress(OSError, UsageError):
                self.clear()
                self._delete([NOTE])


def draft_at(place: ShardLocation) -> FolderDraft | BucketDraft:
    assert not isinstance(place, ShardMirror), "a set is built in one place, and copied to others"
    return FolderDraft(place) if isinstance(place, ShardDirectory) else BucketDraft(place)


def _taken(place: object) -> str:
    return f"{place} holds a set already. Build into another place, or replace it with --force."


def _foreign(place: object) -> str:
    return (
        f"{place} exists and is no set of shards. Build into another place; --force replaces "
        "nothing but a set."
    )


def _is_note(content: bytes | None) -> bool:
    """Whether this is the note of a build, and not a foreign file."""
    kind = try_decode_json(content or b"", FormatHeader)
    return kind is not None and kind.format == FORMAT
