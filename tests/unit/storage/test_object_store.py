"""What is special about checkpoints in an object store, on one in memory."""

import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.checkpoint.manifest import MANIFEST
from shoal.errors import BadCheckpoint, UsageError
from shoal.storage import object_client
from shoal.storage.object_client import ObjectClient, RetryPolicy, StoreError
from shoal.storage.object_store import ObjectStore, RangeCache, open_store
from shoal.storage.store import SEAL, DirectoryStore
from shoal.system.processes import PerProcess
from shoal.testing.stores import CONTENT, FILE, NAME, OTHER, PART, content_of, fill, save

HASTY = RetryPolicy(num_tries=4, first_pause_s=0.01, most_pause_s=0.05)
MEMORY = "memory://objects"


def test_a_young_draft_is_not_swept(memory: Any) -> None:
    store = ObjectStore(MEMORY, abandoned_s=3600)
    draft = store.create_draft(NAME, "a1")
    fill(draft)
    store.sweep()
    assert draft.read(PART) == b"{}"
    draft.commit(drop=[PART])
    assert store.names() == [NAME]


def test_webhdfs_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("requests", reason="needs the extra hdfs")
    monkeypatch.setattr(object_client, "_LIMIT_S", (0.1, 0.1))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = f"webhdfs://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(StoreError, match=r"cannot look at .*/a: .*imed out.*tried 2 times"):
            ObjectClient(where, {}, HASTY._replace(num_tries=2)).size("a")
    with pytest.raises(StoreError, match=r"\?\.\.\. \(Caused by") as caught:
        ObjectClient(where, {"token": "hunter2"}, RetryPolicy(num_tries=1)).size("a")
    assert "hunter2" not in str(caught.value)


def test_a_death_before_the_seal_leaves_no_checkpoint(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At whichever request the writer dies, what is listed is whole."""
    for deadline in range(40):
        store = ObjectStore(MEMORY, abandoned_s=0.0)
        save(store, OTHER, content=b"older" * 9)
        count = iter(range(deadline))

        def ask(
            self: ObjectClient, *rest: Any, count: Any = count, real: Any = ObjectClient._request
        ) -> Any:
            if next(count, None) is None:
                raise KeyboardInterrupt
            return real(self, *rest)

        died = False
        with monkeypatch.context() as patched:
            patched.setattr(ObjectClient, "_request", ask)
            try:
                save(store)
            except KeyboardInterrupt:
                died = True
        after = ObjectStore(MEMORY, abandoned_s=0.0)
        for name in after.names():
            assert content_of(after, name) == (CONTENT if name == NAME else b"older" * 9)
            assert after.files(name) == {FILE, MANIFEST, SEAL}
        after.sweep()
        assert OTHER in after.names()
        if not died:
            assert after.names() == [NAME, OTHER]
            return
        for name in after.names():
            after.remove(name)
    pytest.fail("a save takes more requests than it should")


def test_a_replacement_loses_its_seal_first(memory: Any) -> None:
    store = ObjectStore(MEMORY)
    save(store)
    store.create_draft(NAME, "a2")
    assert store.names() == []
    assert memory.find("/objects") == [f"/objects/{NAME}/.draft-a2"]


def test_a_commit_leaves_nothing_beside_the_files(memory: Any) -> None:
    save(ObjectStore(MEMORY))
    found = {path.removeprefix(f"/objects/{NAME}/") for path in memory.find("/objects")}
    assert found == {FILE, MANIFEST, SEAL}


def test_a_discard_leaves_what_another_began(memory: Any) -> None:
    store = ObjectStore(MEMORY)
    draft = store.create_draft(NAME, "a1")
    memory.pipe_file(f"/objects/{NAME}/.draft-a2", b"")  # begun at the same moment
    other = store.join_draft(NAME, "a2")
    other.write(FILE, [CONTENT])
    draft.discard()
    assert other.read(FILE) == CONTENT


def test_a_draft_that_goes_during_a_write_is_noticed(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = ObjectStore(MEMORY).create_draft(NAME, "a1")
    real = ObjectClient.put

    def put(self: ObjectClient, path: str, content: bytes) -> None:
        ObjectStore(MEMORY).join_draft(NAME, "a1").discard()
        real(self, path, content)

    monkeypatch.setattr(ObjectClient, "put", put)
    with pytest.raises(FileNotFoundError, match="discarded or taken over"):
        draft.write(FILE, [CONTENT])


def test_a_commit_without_a_seal_is_a_mistake(memory: Any) -> None:
    draft = ObjectStore(MEMORY).create_draft(NAME, "a1")
    with pytest.raises(ValueError, match="was not written"):
        draft.commit(drop=[])


def test_reads_go_through_few_ranges_within_a_limit(memory: Any) -> None:
    memory.pipe_file("/objects/x", CONTENT)
    remote = ObjectClient(MEMORY, {}, HASTY)
    asked: list[tuple[int, int]] = []
    real = remote.get_range

    def get_range(path: str, start: int, stop: int) -> bytes:
        asked.append((start, stop))
        return real(path, start, stop)

    remote.get_range = get_range  # type: ignore[method-assign]
    cache = RangeCache(remote, most_bytes=len(CONTENT))
    assert cache.read("x", (0, 8), len(CONTENT), ahead=False) == CONTENT[:8]
    for start in range(8, 1000, 50):
        assert cache.read("x", (start, start + 50), len(CONTENT), ahead=True)
    assert asked == [(0, 8), (8, len(CONTENT))]
    cache.read("x", (4, 100), len(CONTENT), ahead=False)
    assert sum(len(view) for view in cache._ranges.values()) <= len(CONTENT)


def test_a_look_at_a_header_fetches_no_more(memory: Any) -> None:
    store = ObjectStore(MEMORY)
    save(store)
    reader = store.open(NAME, FILE)
    reader.read(0, 8)
    assert [len(view) for view in store._cache._ranges.values()] == [8]
    reader.read(8, 1)
    assert [len(view) for view in store._cache._ranges.values()] == [8, len(CONTENT) - 8]


def test_a_file_that_shrinks_while_it_is_read_is_seen(memory: Any) -> None:
    store = ObjectStore(MEMORY)
    save(store)
    reader = store.open(NAME, FILE)
    memory.pipe_file(f"/objects/{NAME}/{FILE}", CONTENT[:10])
    with pytest.raises(BadCheckpoint, match="changed since it was opened"):
        reader.read(0, 100)


def test_a_file_that_vanishes_while_it_is_read_is_seen(memory: Any) -> None:
    store = ObjectStore(MEMORY)
    save(store)
    reader = store.open(NAME, FILE)
    memory.rm_file(f"/objects/{NAME}/{FILE}")
    with pytest.raises(BadCheckpoint, match=f"{FILE} is missing"):
        reader.read(0, 100)


def test_a_part_of_what_is_not_there_is_not_found(memory: Any) -> None:
    """Whose file it was, and what to call that, only who asks can say."""
    with pytest.raises(FileNotFoundError):
        ObjectClient(MEMORY, {}, HASTY).get_range("x", 0, 8)


class Flaky:
    """A back end that fails a number of times."""

    def __init__(self, error: Exception, failures: int):
        self.error, self.failures, self.calls = error, failures, 0

    def cat_file(self, path: str) -> bytes:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return b"here"


def ask(flaky: Flaky, monkeypatch: pytest.MonkeyPatch) -> bytes | None:
    remote = ObjectClient(MEMORY, {}, HASTY)
    monkeypatch.setattr(remote, "_back_end", PerProcess(lambda: (flaky, "")))
    return remote.get("x")


@pytest.mark.parametrize("error", [ConnectionResetError(104, "reset"), TimeoutError(), OSError(5)])
def test_what_may_pass_is_tried_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(Flaky(error, 3), monkeypatch) == b"here"
    with pytest.raises(StoreError, match=r"cannot read memory://objects/x: .* tried 4 times"):
        ask(Flaky(error, 4), monkeypatch)


@pytest.mark.parametrize("error", [PermissionError(13, "denied"), ValueError("no such option")])
def test_what_lasts_is_not_tried_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    flaky = Flaky(error, 1)
    with pytest.raises(StoreError, match="Check the credentials"):
        ask(flaky, monkeypatch)
    assert flaky.calls == 1


def test_a_place_chooses_its_store(tmp_path: Path) -> None:
    for where in (tmp_path, str(tmp_path), f"file://{tmp_path}", "runs/x"):
        store = open_store(where)
        assert isinstance(store, DirectoryStore)
        assert store.path == (Path("runs/x") if where == "runs/x" else tmp_path)
    assert isinstance(open_store(MEMORY), ObjectStore)


def test_a_password_is_not_shown() -> None:
    assert str(ObjectStore("memory://me:secret@host/x")) == "memory://host/x"


def test_a_back_end_that_takes_a_password_for_a_name_does_not_show_it(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, path: str, **_: Any) -> None:
        raise ConnectionError(f"no bucket of the name me:hunter/2{path}")

    monkeypatch.setattr(type(memory), "info", fail)
    with pytest.raises(StoreError, match=r"no bucket of the name me:\.\.\.") as caught:
        ObjectClient("memory://me:hunter%2F2@host/x", {}, HASTY).size("a")
    assert "hunter" not in str(caught.value)
    with pytest.raises(UsageError, match="The address s3://b/x was given with a password"):
        ObjectClient("s3://key:hunter2@b/x", {}, HASTY)


@pytest.mark.parametrize(
    "where, said",
    [
        ("memry://x", "memry:// is no store that fsspec knows. Did you mean 'memory'?"),
        ("simplecache::s3://bucket/x", "chain of URLs"),
    ],
)
def test_an_address_that_cannot_be_opened_is_refused(where: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        open_store(where)
    assert said in str(raised.value)


def test_a_back_end_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(UsageError, match=r"pip install 'shoal-ml\[s3\]'"):
        open_store("s3://bucket/x")
