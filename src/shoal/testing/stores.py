"""Tests that every store of checkpoints must pass.

    class TestMine(StoreConformance):
        @pytest.fixture
        def place(self):
            return Place(open=lambda: MyStore(...), damage=overwrite)

A new store gives that one fixture and inherits the tests. They are about what a store promises: a
checkpoint appears whole or not at all, whichever rank dies when; bytes come back as they were
written, or the reader says so. No trainer and no tensor is needed. Cost: some milliseconds a test.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

import pytest

from shoal.checkpoint.manifest import MANIFEST
from shoal.errors import BadCheckpoint
from shoal.storage.store import SEAL, Draft, Store

NAME, OTHER = "step-00000020", "step-00000040"
FILE, SECOND = "rank-00000.safetensors", "rank-00001.safetensors"
PART = "part-00000.json"
CONTENT = bytes(range(256)) * 5


class StoreLocation(NamedTuple):
    """Where the store under test keeps things."""

    open: Callable[[], Store]  # again, as another process would; drafts count as abandoned at once
    damage: Callable[[str, str, bytes | None], None]  # overwrite a file, or remove it


def fill(draft: Draft, content: bytes = CONTENT) -> None:
    """Write what rank 0 of a run does."""
    draft.write(FILE, [content[:100], memoryview(content)[100:]])
    draft.write(PART, [b"{}"])
    draft.write(MANIFEST, [b"manifest of " + content[:8]])
    draft.write(SEAL, [b"seal of " + content[:8]])


def save(store: Store, name: str = NAME, token: str = "a1", content: bytes = CONTENT) -> None:
    draft = store.create_draft(name, token)
    fill(draft, content)
    draft.commit(drop=[PART])


def content_of(store: Store, name: str = NAME, file: str = FILE) -> bytes:
    reader = store.open(name, file)
    return bytes(reader.read(0, reader.num_bytes))


class StoreConformance:
    """Inherit, and give `place`."""

    @pytest.fixture
    def place(self) -> StoreLocation:
        raise NotImplementedError("say how the store is opened and damaged")

    @pytest.fixture
    def store(self, place: StoreLocation) -> Store:
        return place.open()

    def test_an_empty_store_has_no_names(self, store: Store) -> None:
        store.sweep()
        assert store.names() == []

    def test_what_was_committed_is_there_whole(self, store: Store, place: StoreLocation) -> None:
        save(store)
        for each in (store, place.open()):
            assert each.names() == [NAME]
            assert each.files(NAME) == {FILE, MANIFEST, SEAL}
            assert content_of(each) == CONTENT
            assert content_of(each, file=SEAL) == b"seal of " + CONTENT[:8]

    def test_nothing_appears_before_the_commit(self, store: Store, place: StoreLocation) -> None:
        draft = store.create_draft(NAME, "a1")
        assert place.open().names() == []
        fill(draft)
        assert place.open().names() == []
        draft.commit(drop=[PART])
        assert place.open().names() == [NAME]

    def test_names_come_in_order(self, store: Store) -> None:
        for name in (OTHER, NAME, "step-00000100"):
            save(store, name)
        assert store.names() == [NAME, OTHER, "step-00000100"]

    def test_ranges_are_read(self, store: Store) -> None:
        save(store)
        reader = store.open(NAME, FILE)
        assert reader.num_bytes == len(CONTENT)
        for start, length in [(0, 8), (8, 100), (300, 500), (0, 0), (9, 1), (len(CONTENT), 0)]:
            assert reader.read(start, length) == CONTENT[start : start + length]
            assert not reader.read(start, length).readonly or not length

    @pytest.mark.parametrize("span", [(0, len(CONTENT) + 1), (len(CONTENT), 1), (-1, 1), (5, -1)])
    def test_a_read_outside_of_the_file_is_refused(
        self, store: Store, span: tuple[int, int]
    ) -> None:
        save(store)
        with pytest.raises(BadCheckpoint, match=FILE):
            store.open(NAME, FILE).read(*span)

    def test_a_truncated_file_is_seen(self, store: Store, place: StoreLocation) -> None:
        save(store)
        place.damage(NAME, FILE, CONTENT[:-1])
        reader = place.open().open(NAME, FILE)
        assert reader.num_bytes == len(CONTENT) - 1
        with pytest.raises(BadCheckpoint, match=FILE):
            reader.read(0, len(CONTENT))

    def test_a_missing_file_is_named(self, store: Store, place: StoreLocation) -> None:
        save(store)
        place.damage(NAME, FILE, None)
        with pytest.raises(BadCheckpoint, match=f"{FILE} is missing"):
            place.open().open(NAME, FILE)
        with pytest.raises(BadCheckpoint, match="is missing"):
            store.open(OTHER, FILE)
        with pytest.raises(FileNotFoundError):
            store.files(OTHER)

    def test_others_join_by_the_token(self, store: Store, place: StoreLocation) -> None:
        first = store.create_draft(NAME, "a1")
        second = place.open().join_draft(NAME, "a1")
        assert first.read("part-00001.json") is None
        second.write(SECOND, [b"second"])
        second.write("part-00001.json", [b"[1]"])
        assert first.read("part-00001.json") == b"[1]"
        fill(first)
        first.commit(drop=[PART, "part-00001.json"])
        assert place.open().files(NAME) == {FILE, SECOND, MANIFEST, SEAL}
        assert content_of(store, file=SECOND) == b"second"

    def test_an_empty_file_is_a_file(self, store: Store) -> None:
        draft = store.create_draft(NAME, "a1")
        draft.write(SECOND, [])
        fill(draft)
        draft.commit(drop=[PART])
        assert store.open(NAME, SECOND).num_bytes == 0

    def test_a_discarded_draft_is_gone_for_all(self, store: Store, place: StoreLocation) -> None:
        first = store.create_draft(NAME, "a1")
        second = place.open().join_draft(NAME, "a1")
        fill(first)
        second.discard()
        second.discard()  # never raises
        with pytest.raises(OSError):
            first.read("part-00001.json")
        with pytest.raises(OSError):
            first.write(SECOND, [b"late"])
        with pytest.raises(OSError):
            first.commit(drop=[PART])
        assert place.open().names() == []

    def test_a_join_without_a_beginning_fails(self, store: Store) -> None:
        with pytest.raises(OSError):
            store.join_draft(NAME, "a1").write(FILE, [CONTENT])
        assert store.names() == []

    def test_a_sweep_removes_drafts_and_nothing_else(
        self, store: Store, place: StoreLocation
    ) -> None:
        save(store)
        fill(store.create_draft(OTHER, "a2"))
        place.open().sweep()
        assert store.names() == [NAME]
        assert content_of(store) == CONTENT
        with pytest.raises(OSError):
            store.join_draft(OTHER, "a2").read(PART)

    def test_one_of_the_same_name_is_replaced(self, store: Store, place: StoreLocation) -> None:
        """Until then the old one is there whole, or none is."""
        save(store)
        place.damage(NAME, FILE, b"bad")
        place.damage(NAME, "stray", b"of the old one")
        draft = store.create_draft(NAME, "a2")
        fill(draft, CONTENT[::-1])
        if place.open().names():
            assert content_of(place.open()) == b"bad"
        draft.commit(drop=[PART])
        assert place.open().names() == [NAME]
        assert place.open().files(NAME) == {FILE, MANIFEST, SEAL}
        assert content_of(store) == CONTENT[::-1]
        store.sweep()
        assert store.names() == [NAME]

    def test_a_beginning_sees_nothing_of_an_older_draft(
        self, store: Store, place: StoreLocation
    ) -> None:
        fill(store.create_draft(NAME, "a1"))
        assert place.open().create_draft(NAME, "a2").read(PART) is None

    def test_of_two_writers_of_one_name_the_later_stays(
        self, store: Store, place: StoreLocation
    ) -> None:
        first = store.create_draft(NAME, "a1")
        first.write(FILE, [CONTENT])
        second = place.open().create_draft(NAME, "a2")
        fill(second, CONTENT[::-1])
        try:
            first.write(MANIFEST, [b"the first's"])
            first.write(SEAL, [b"the first's"])
            first.write(PART, [b""])
            first.commit(drop=[PART])
        except OSError:
            first.discard()  # which must leave the second alone
        second.commit(drop=[PART])
        assert place.open().names() == [NAME]
        assert content_of(store) == CONTENT[::-1]
        assert content_of(store, file=MANIFEST) == b"manifest of " + CONTENT[::-1][:8]

    def test_two_names_are_written_at_once(self, store: Store, place: StoreLocation) -> None:
        stores = {NAME: store, OTHER: place.open()}
        threads = [
            threading.Thread(target=save, args=(stores[name], name, "a1", name.encode() * 50))
            for name in stores
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.names() == [NAME, OTHER]
        for name in stores:
            assert content_of(store, name) == name.encode() * 50

    def test_what_was_removed_is_gone(self, store: Store, place: StoreLocation) -> None:
        save(store)
        save(store, OTHER)
        store.remove(NAME)
        for each in (store, place.open()):
            assert each.names() == [OTHER]
            with pytest.raises(BadCheckpoint, match="is missing"):
                each.open(NAME, FILE)
        with pytest.raises(FileNotFoundError):
            store.remove(NAME)
