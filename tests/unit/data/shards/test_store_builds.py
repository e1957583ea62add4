"""Sets built behind a URL: what an interrupted build leaves there, and what is never touched."""

from pathlib import Path
from typing import Any

import pytest

from shoal.data.shard_files import drafts, fetching
from shoal.data.shard_files.format import INDEX, SEAL, BadShards
from shoal.data.shard_files.locations import open_location, read_index
from shoal.data.shard_files.reading import shards
from shoal.data.shard_files.verifying import find_faults
from shoal.errors import UsageError
from shoal.storage.object_client import ObjectClient
from tests.unit.data.shards.made import files, make
from tests.unit.data.shards.stores import URL, check, hasty, objects

__all__ = ["hasty"]


def test_an_interrupted_build_goes_on_there(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("rows", tmp_path / "wanted")
    real, left = ObjectClient.put, [7]

    def put(self: ObjectClient, path: str, content: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        real(self, path, content)

    with monkeypatch.context() as patched:
        patched.setattr(ObjectClient, "put", put)
        with pytest.raises(KeyboardInterrupt):
            make("rows", URL)
    with pytest.raises(BadShards):
        shards(URL, tmp_path / "copies")
    written: list[str] = []

    def noted(self: ObjectClient, path: str, content: bytes) -> None:
        written.append(path)
        real(self, path, content)

    monkeypatch.setattr(ObjectClient, "put", noted)
    make("rows", URL)
    assert "shard-00000.bin" not in written and written[-1] == SEAL
    assert objects(memory) == files(tmp_path / "wanted")
    with pytest.raises(UsageError, match="holds a set already"):
        make("rows", URL)
    make("packed", URL, force=True)
    check(shards(URL, tmp_path / "copies"), "packed")


@pytest.mark.parametrize("force", [False, True])
def test_what_is_there_is_not_removed(memory: Any, force: bool) -> None:
    theirs = {"shard-000000.tar": b"a", "shard-list.json": b"b", INDEX: b"c", "build.json": b"{}"}
    for name, written in theirs.items():
        memory.pipe_file(f"/sets/out/{name}", written)
    with pytest.raises(UsageError, match=r"is no set of shards. Build into another place"):
        make("rows", URL, force=force)
    assert objects(memory) == theirs


def test_a_set_is_replaced_and_nothing_else(tmp_path: Path, memory: Any) -> None:
    make("packed", URL, shard_bytes=300)
    memory.pipe_file("/sets/out/shard-000000.tar", b"a")
    make("rows", URL, force=True)
    make("rows", tmp_path / "wanted")
    assert objects(memory) == files(tmp_path / "wanted") | {"shard-000000.tar": b"a"}


def test_stopped_before_every_request(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there afterwards is a whole set or none, and the next build ends with the same."""
    make("rows", tmp_path / "wanted")
    for number in range(100):
        make("packed", URL, force=True)
        left = [number]

        def stops(act: Any, left: list[int] = left) -> Any:
            def act_or_stop(*arguments: Any) -> None:
                left[0] -= 1
                if left[0] < 0:
                    raise KeyboardInterrupt
                act(*arguments)

            return act_or_stop

        is_stopped = False
        with monkeypatch.context() as patched:
            for name in ("put", "delete"):
                patched.setattr(ObjectClient, name, stops(getattr(ObjectClient, name)))
            try:
                make("rows", URL, force=True)
            except KeyboardInterrupt:
                is_stopped = True
        if SEAL in objects(memory):
            place = open_location(URL)
            assert not list(find_faults(place, read_index(place))), (
                f"stopped before request {number}"
            )
        make("rows", URL, force=True)
        assert objects(memory) == files(tmp_path / "wanted")
        if not is_stopped:
            assert number > 10
            return
    pytest.fail("it never ended")


def test_a_large_shard_goes_up_in_parts(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts, "UPLOAD_BYTES", 300)
    monkeypatch.setattr(fetching, "PART_BYTES", 100)
    make("rows", URL)
    check(shards(URL, tmp_path / "copies"), "rows")
