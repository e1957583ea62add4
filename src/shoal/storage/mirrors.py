"""Mirrors: checkpoints in several stores at once, as one store.

    mirror://[/disk/runs/a,s3://bucket/runs/a]         every store must have what is written
    mirror://2[/disk/a,s3://bucket/a,hdfs://nn/a]      two of them are enough
    mirror://[/disk,s3://bucket]/runs/a                a path behind the bracket is for each

A write goes to all; a store that fails is left out of this checkpoint, with a warning, as long as
enough remain. Ranks write to one draft, and each may lose another store. Each writes last the note
that the commit drops, so the commit passes over every store that lacks one of these: none ever
shows half a checkpoint. A read takes the first store; one that is away, or whose bytes do not fit
their hashes (`checkpoint/verify.py` looks), is passed over for this checkpoint. To be sure of the
newest, as many stores must answer a listing as a write may have missed, and one more.

A store that was away is caught up by `shoal checkpoint convert --missing`. Cost: a writer holds
its file in memory, and sends it once to each store, one after the other.
"""

import errno
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import NamedTuple, TypeVar

from shoal.errors import BadCheckpoint, UsageError
from shoal.logs import log
from shoal.storage.object_client import MIRROR, StoreError, redact_password
from shoal.storage.store import Draft, FileReader, Store

T = TypeVar("T")


class MirrorNames(NamedTuple):
    """The places of a mirror, and how many of them must have what is written."""

    places: tuple[str, ...]
    quorum: int


def parse_mirror(text: str) -> MirrorNames | None:
    """The places that a name lists; None if it is no mirror's."""
    if not text.startswith(MIRROR):
        return None
    number, opened, rest = text.removeprefix(MIRROR).partition("[")
    listed, closed, behind = rest.partition("]")
    places = tuple(f"{place.strip()}{behind}" for place in listed.split(",") if place.strip())
    shown = redact_password(text)
    if not (opened and closed) or (behind and not behind.startswith("/")) or len(places) < 2:
        raise UsageError(
            f"{shown} is no mirror. Write {MIRROR}[A,B], or {MIRROR}[A,B]/path, where A and B are "
            "absolute paths or URLs."
        )
    if not (number == "" or number.isdigit()) or not 1 <= int(number or 1) <= len(places):
        raise UsageError(
            f"{shown}: {number!r} of {len(places)} stores cannot be. The number before [ says how "
            "many must have what is written; without one, all."
        )
    for place in places:
        if place.startswith(MIRROR) or not ("://" in place or PurePath(place).is_absolute()):
            raise UsageError(
                f"{shown}: {redact_password(place)!r} is neither an absolute path nor a URL."
            )
    if len(set(places)) < len(places):
        raise UsageError(f"{shown} names a store twice, and a mirror is of several.")
    return MirrorNames(places, int(number or len(places)))


class MirroredStore:
    """Several stores as one; `quorum` of them must have what is written."""

    def __init__(self, stores: Sequence[Store], quorum: int):
        self._stores, self._quorum = list(stores), quorum
        self._copies: dict[str, list[Store]] = {}  # of a checkpoint, those that may be read still

    def __str__(self) -> str:
        return f"{MIRROR}[{','.join(map(str, self._stores))}]"

    def names(self) -> list[str]:
        answers = self._answers(lambda store: store.names(), "listed")
        needed = len(self._stores) - self._quorum + 1
        if len(answers) < needed:
            raise StoreError(
                errno.EIO,
                f"{self}: {len(answers)} of {len(self._stores)} stores answer, and {needed} are "
                "needed to know the newest checkpoint. Wait for the others, or name a store by "
                "itself to go on from what it has.",
            )
        return sorted({name for names in answers for name in names})

    def files(self, name: str) -> set[str]:
        return self._from_a_copy(name, lambda store: store.files(name))

    def open(self, name: str, file: str) -> FileReader:
        return self._from_a_copy(name, lambda store: store.open(name, file))

    def fall_over(self, name: str) -> bool:
        copies = self._copies.setdefault(name, list(self._stores))
        if len(copies) < 2:
            return False
        log.warning("%s of %s is not used; it is read from %s", name, copies[0], copies[1])
        self._copies[name] = copies[1:]
        return True

    def create_draft(self, name: str, token: str) -> "MirroredDraft":
        draft = self.join_draft(name, token)
        try:
            draft.each(lambda number, _: self._stores[number].create_draft(name, token))
        except OSError:
            draft.discard()
            raise
        return draft

    def join_draft(self, name: str, token: str) -> "MirroredDraft":
        self._copies.pop(name, None)
        drafts = [store.join_draft(name, token) for store in self._stores]
        return MirroredDraft(drafts, [str(store) for store in self._stores], self._quorum)

    def sweep(self) -> None:
        self._answers(lambda store: store.sweep(), "swept")

    def remove(self, name: str) -> None:
        self._copies.pop(name, None)

        def remove(store: Store) -> bool:
            try:
                store.remove(name)
            except FileNotFoundError:
                return False
            return True

        if not any(self._answers(remove, "written")):
            raise FileNotFoundError(errno.ENOENT, f"{self} has no {name}")

    def _answers(self, ask: Callable[[Store], T], what: str) -> list[T]:
        """Of each store that answers."""
        found: list[T] = []
        for store in self._stores:
            try:
                found.append(ask(store))
            except OSError as error:
                log.warning("%s cannot be %s: %s", store, what, error)
        return found

    def _from_a_copy(self, name: str, read: Callable[[Store], T]) -> T:
        errors: list[BadCheckpoint | OSError] = []
        while True:
            copies = self._copies.setdefault(name, list(self._stores))
            try:
                return read(copies[0])
            except (BadCheckpoint, OSError) as error:
                errors.append(error)
            if len(copies) == 1:
                break
            self._copies[name] = copies[1:]
        del self._copies[name]
        # Where a store was not reached, it is not known that there is nothing.
        raise next((error for error in errors if isinstance(error, StoreError)), errors[0])


class MirroredDraft:
    """A checkpoint that is written to several stores."""

    def __init__(self, drafts: Sequence[Draft], places: Sequence[str], quorum: int):
        self._drafts, self._places, self._quorum = dict(enumerate(drafts)), places, quorum

    def each(self, act: Callable[[int, Draft], object]) -> None:
        """Do it in all stores; one where it fails is left out, while enough remain."""
        for number, draft in list(self._drafts.items()):
            try:
                act(number, draft)
            except OSError as error:
                self._leave_out(number, error)

    def _leave_out(self, number: int, error: OSError) -> None:
        if len(self._drafts) <= self._quorum:
            raise error  # each time: nothing may be written to fewer
        del self._drafts[number]
        log.warning(
            "%s is left out of a checkpoint, which %d other stores get: %s. Catch it up later with "
            "shoal checkpoint convert --missing",
            self._places[number],
            len(self._drafts),
            error,
        )

    def write(self, file: str, parts: Iterable[memoryview | bytes]) -> None:
        whole = [bytes(part) for part in parts]  # each store reads it from its beginning
        self.each(lambda _, draft: draft.write(file, whole))

    def read(self, file: str) -> bytes | None:
        """What any store has: a writer may have lost the others. Leaves none out: the draft may
        not have been created yet."""
        found: list[bytes | None] = []
        errors: list[OSError] = []
        for draft in self._drafts.values():
            try:
                found.append(draft.read(file))
            except OSError as error:
                errors.append(error)
        if len(found) < self._quorum:
            raise errors[0]
        return next((content for content in found if content is not None), None)

    def commit(self, drop: Iterable[str]) -> None:
        doomed = list(drop)
        for number, draft in list(self._drafts.items()):
            if not self._is_whole(draft, doomed):
                self._drafts.pop(number).discard()
        if len(self._drafts) < self._quorum:
            raise OSError(
                errno.EIO,
                f"{len(self._drafts)} of {len(self._places)} stores have all files of the "
                f"checkpoint, and {self._quorum} must",
            )
        self.each(lambda _, draft: draft.commit(doomed))

    def _is_whole(self, draft: Draft, notes: Iterable[str]) -> bool:
        """Whether all writers came to their notes, in this store."""
        try:
            return all(draft.read(note) is not None for note in notes)
        except OSError:
            return False

    def discard(self) -> None:
        for draft in self._drafts.values():
            draft.discard()
