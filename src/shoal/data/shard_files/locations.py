"""Where a set of shards lies: a directory, a URL whose shards are fetched when they are needed, or
a mirror of several places, of which the first that has a shard sound and in reach gives it.

All give the small files and, for each shard, the path of a local file of the right length; the
reader checks its content. A shard that is missing or has another length is `BadShards`; one
that is not reached is another UsageError. Next: `fetching.py` for the local copies.
"""

import os
import stat
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias
from urllib.parse import unquote, urlsplit

from shoal.data.shard_files import format as formats
from shoal.data.shard_files.fetching import CACHE_BYTES, ShardCopies, run_within
from shoal.data.shard_files.format import INDEX, MOST_INDEX_BYTES, SEAL, BadShards, Index, NoShards
from shoal.data.validate import path_of, require_whole
from shoal.errors import UsageError
from shoal.logs import log
from shoal.storage.mirrors import parse_mirror
from shoal.storage.object_client import MIRROR, ObjectClient, RetryPolicy
from shoal.storage.run_dir import cache_directory

PATIENCE = RetryPolicy(num_tries=4, first_pause_s=0.2, most_pause_s=5.0)
_SEAL_BYTES = 1024


class LocalShard(NamedTuple):
    """A shard's local file, and shards whose files had to go for it."""

    path: Path
    gone: tuple[int, ...] = ()


class ShardDirectory:
    """A set in a directory."""

    keeps = True  # no local file ever goes

    def __init__(self, path: Path):
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def small(self, file: str, most_bytes: int) -> bytes | None:
        """All of a small file; None if there is none."""
        try:
            with open(self.path / file, "rb", opener=_open_at_once) as opened:
                if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                    raise BadShards(f"{file} is not a file.")
                return opened.read(most_bytes + 1)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise BadShards(f"{self.path / file} cannot be read: {error.strerror}.") from None

    def names(self) -> set[str]:
        try:
            return set(os.listdir(self.path))
        except OSError as error:
            raise BadShards(f"{self.path} cannot be listed: {error.strerror}.") from None

    def local(self, index: Index, number: int, needed: Collection[int]) -> LocalShard:
        """A file with the bytes of a shard. Those of the shards `needed` stay."""
        path = self.path / formats.shard_name(number)
        try:
            found = os.stat(path)
        except FileNotFoundError:
            raise BadShards(f"{path.name} is missing.") from None
        except OSError as error:
            raise UsageError(
                f"{path} cannot be opened: {error.strerror}. Mend that, and start again."
            ) from None
        if not stat.S_ISREG(found.st_mode):
            raise BadShards(f"{path.name} is not a file.")
        wanted = index.num_bytes(index.shards[number])
        if found.st_size != wanted:
            raise BadShards(f"{path.name} has {found.st_size} bytes; {wanted} were written.")
        return LocalShard(path)

    def keep(self, index: Index, number: int, is_used: bool) -> bool:
        """Whether the local file is still there; one that is used goes later than others."""
        return True

    def drop(self, index: Index, number: int) -> bool:
        """Remove a local copy that is damaged; False if the file is the only one there is."""
        return False


class ShardBucket:
    """A set at a URL; its shards are copied into a local directory."""

    keeps = False

    def __init__(self, url: str, copies: ShardCopies):
        self.remote = ObjectClient(url, {}, PATIENCE)
        self.copies = copies

    def __str__(self) -> str:
        return str(self.remote)

    def small(self, file: str, most_bytes: int) -> bytes | None:
        size = run_within(f"look at {self}/{file}", lambda: self.remote.size(file))
        if size is None:
            return None
        if size > most_bytes:
            return bytes(most_bytes + 1)
        return run_within(f"read {self}/{file}", lambda: self.remote.get(file))

    def names(self) -> set[str]:
        return set(run_within(f"list {self}", lambda: self.remote.find("")))

    def local(
        self,
        index: Index,
        number: int,
        needed: Collection[int],
        cancelled: threading.Event | None = None,
    ) -> LocalShard:
        kept = {index.shards[other].hash for other in needed}
        path, gone = self.copies.copy(self.remote, index, number, kept, cancelled)
        doomed = [other for other, shard in enumerate(index.shards) if gone and shard.hash in gone]
        return LocalShard(path, tuple(doomed))

    def keep(self, index: Index, number: int, is_used: bool) -> bool:
        return self.copies.keep(index, number, is_used)

    def drop(self, index: Index, number: int) -> bool:
        self.copies.drop(index, number)
        return True


class ShardMirror:
    """A set in several places."""

    def __init__(self, places: Sequence[ShardDirectory | ShardBucket], quorum: int):
        self.places, self.quorum = list(places), quorum
        self.keeps = all(place.keeps for place in places)
        buckets = [place for place in places if isinstance(place, ShardBucket)]
        # What is fetched ahead; of a mirror with a directory that is mostly there already.
        self.copies = buckets[0].copies if len(buckets) == len(places) else None
        self._passed: dict[int, int] = {}  # of a shard, how many places are passed over

    def __str__(self) -> str:
        return f"{MIRROR}[{','.join(map(str, self.places))}]"

    def read_index(self) -> Index:
        """Of the first place that has one; places that have another set are not read."""
        found: list[tuple[ShardDirectory | ShardBucket, Index]] = []
        errors: list[UsageError] = []
        away = []
        for place in self.places:
            try:
                found.append((place, read_index(place)))
            except UsageError as error:
                errors.append(error)
                if not isinstance(error, NoShards | BadShards):
                    away.append(place)
        if not found:
            raise next((e for e in errors if not isinstance(e, NoShards | BadShards)), errors[0])
        index = found[0][1]
        same = [place for place, other in found if other.digest == index.digest]
        if len(same) < len(self.places):
            log.warning("of %s, %d of %d places hold the set", self, len(same), len(self.places))
        self.places = [*same, *away]  # bytes are hashed, so one that comes back may be asked
        return index

    def names(self) -> set[str]:
        found: set[str] = set()
        errors: list[UsageError] = []
        for place in self.places:
            try:
                found |= place.names()
            except UsageError as error:
                errors.append(error)
        if len(errors) == len(self.places):
            raise errors[0]
        return found

    def local(
        self,
        index: Index,
        number: int,
        needed: Collection[int],
        cancelled: threading.Event | None = None,
    ) -> LocalShard:
        errors: list[UsageError] = []
        for at in range(self._passed.get(number, 0), len(self.places)):
            place = self.places[at]
            try:
                if isinstance(place, ShardBucket):
                    return place.local(index, number, needed, cancelled)
                return place.local(index, number, needed)
            except UsageError as error:
                errors.append(error)
                if at + 1 < len(self.places):
                    self._pass_over(number, at, error)
        self._passed.pop(number, None)
        raise errors[0]

    def keep(self, index: Index, number: int, is_used: bool) -> bool:
        return self.places[self._passed.get(number, 0)].keep(index, number, is_used)

    def drop(self, index: Index, number: int) -> bool:
        """Take a shard from the next place, or from the last one once more."""
        at = self._passed.get(number, 0)
        again = self.places[at].drop(index, number)
        if at + 1 == len(self.places):
            return again
        self._pass_over(number, at, "its bytes are not those that were written.")
        return True

    def _pass_over(self, number: int, at: int, why: object) -> None:
        self._passed[number] = at + 1
        name = formats.shard_name(number)
        log.warning("%s of %s is read from %s: %s", name, self.places[at], self.places[at + 1], why)


def _open_at_once(path: str, flags: int) -> int:
    """Without blocking: opening a named pipe would wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)


ShardLocation: TypeAlias = ShardDirectory | ShardBucket | ShardMirror


def open_location(
    where: str | Path, cache_dir: str | Path | None = None, cache_bytes: int | None = None
) -> ShardLocation:
    """The directory or the URL; nothing is looked at yet."""
    text = path_of(where, "a set of shards")
    if (mirror := parse_mirror(text)) is not None:
        options = cache_dir, cache_bytes
        places = [
            open_location(place, *(options if is_remote(place) else ())) for place in mirror.places
        ]
        return ShardMirror([p for p in places if not isinstance(p, ShardMirror)], mirror.quorum)
    separator = "://" in text
    is_local = isinstance(where, Path) or not is_remote(text)
    if is_local and (cache_dir is not None or cache_bytes is not None):
        raise UsageError(
            f"shards({text!r}) lies in a directory and is read there, so cache_dir and cache_bytes "
            "have no effect: they are for sets behind a URL. Leave them out."
        )
    if is_local:
        return ShardDirectory(Path(unquote(urlsplit(text).path) if separator else text))
    directory = cache_directory() / "shards" if cache_dir is None else cache_dir
    most_bytes = CACHE_BYTES if cache_bytes is None else cache_bytes
    require_whole(most_bytes, "shards(cache_bytes=...)")
    return ShardBucket(text, ShardCopies(Path(path_of(directory, "cache_dir")), most_bytes))


def is_remote(text: str) -> bool:
    scheme, separator, _ = text.partition("://")
    return bool(separator) and scheme not in ("file", "local")


def read_index(place: ShardLocation) -> Index:
    """The index of a set that is sealed."""
    if isinstance(place, ShardMirror):
        return place.read_index()
    sealed, content = place.small(SEAL, _SEAL_BYTES), place.small(INDEX, MOST_INDEX_BYTES)
    if sealed is None or content is None:
        missing = f"{SEAL if sealed is None else INDEX} is missing"
        kind = NoShards if sealed is None and content is None else BadShards
        raise kind(
            f"{place} holds no set of shards: {missing}. A set is written by `shoal data build`, "
            "and appears when it is whole."
        )
    try:
        if len(content) > MOST_INDEX_BYTES:
            raise BadShards(f"{INDEX} has more than {MOST_INDEX_BYTES} bytes, which is the most.")
        return formats.decode(content, sealed)
    except BadShards as bad:
        raise BadShards(f"{place}: {bad}") from None
