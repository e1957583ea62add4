"""Stores: one suite for all, and what is special about objects behind a network.

S3 is moto's server on loopback (`tests/unit/conftest.py`).
"""

import os
import socket
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from shoal.checkpoint.load import CheckpointReader
from shoal.checkpoint.manifest import MANIFEST, Origin, Progress
from shoal.checkpoint.save import Saver
from shoal.comm.collectives import Group
from shoal.parallel.layout import whole_slice
from shoal.storage.object_client import RetryPolicy, StoreError
from shoal.storage.object_store import ObjectStore, open_store
from shoal.storage.store import SEAL, DirectoryStore
from shoal.testing.stores import (
    CONTENT,
    FILE,
    NAME,
    OTHER,
    PART,
    StoreConformance,
    StoreLocation,
    content_of,
    fill,
    save,
)
from tests.support.gates import Gate

BLOCK_BYTES = 5 << 20  # the least that S3 takes
HASTY = RetryPolicy(num_tries=4, first_pause_s=0.01, most_pause_s=0.05)
MEMORY = "memory://stores"


def s3(s3_options: dict[str, Any], **more: Any) -> ObjectStore:
    settings = {"block_bytes": BLOCK_BYTES, "abandoned_s": 0.0, "patience": HASTY} | more
    return ObjectStore("s3://bucket/run/checkpoints", s3_options, **settings)


def damage_at(root: str, system: Any) -> Any:
    def damage(name: str, file: str, content: bytes | None) -> None:
        if content is None:
            system.rm_file(f"{root}/{name}/{file}")
        else:
            system.pipe_file(f"{root}/{name}/{file}", content)

    return damage


class TestDirectory(StoreConformance):
    @pytest.fixture
    def place(self, tmp_path: Path) -> StoreLocation:
        def damage(name: str, file: str, content: bytes | None) -> None:
            path = tmp_path / "checkpoints" / name / file
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content)

        return StoreLocation(lambda: DirectoryStore(tmp_path / "checkpoints"), damage)


class TestMemory(StoreConformance):
    @pytest.fixture
    def place(self, memory: Any) -> StoreLocation:
        return StoreLocation(
            lambda: ObjectStore(MEMORY, block_bytes=256, abandoned_s=0.0),
            damage_at("/stores", memory),
        )


class TestS3(StoreConformance):
    @pytest.fixture
    def place(self, s3_options: dict[str, Any]) -> StoreLocation:
        system = fsspec.filesystem("s3", use_listings_cache=False, **s3_options)
        return StoreLocation(lambda: s3(s3_options), damage_at("bucket/run/checkpoints", system))


def test_a_large_file_goes_up_in_parts(s3_options: dict[str, Any], gate: Gate) -> None:
    content = os.urandom(2 * BLOCK_BYTES + 12345)
    parts = [content[start : start + 3_000_000] for start in range(0, len(content), 3_000_000)]
    store = s3(s3_options)
    draft = store.create_draft(NAME, "a1")
    draft.write(FILE, iter(parts))
    uploads = [line for line in gate.requests if b"partNumber=" in line]
    assert len(uploads) >= 2
    draft.write(MANIFEST, [b"manifest"])
    draft.write(SEAL, [b"seal"])
    draft.commit(drop=[])
    reader = store.open(NAME, FILE)
    assert reader.num_bytes == len(content)
    reader.read(0, 8)
    assert reader.read(100, len(content) - 100) == content[100:]


@pytest.fixture(params=[1, 5], ids=["we-insist", "s3fs-insists"])
def insistence(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """How often s3fs itself tries."""
    monkeypatch.setattr("s3fs.S3FileSystem.retries", request.param)


@pytest.mark.usefixtures("insistence")
def test_a_lost_connection_is_tried_again(s3_options: dict[str, Any], gate: Gate) -> None:
    store = s3(s3_options)
    draft = store.create_draft(NAME, "a1")
    fill(draft)
    gate.num_resets = 2
    draft.commit(drop=[PART])
    assert gate.num_resets == 0
    gate.num_resets = 2
    assert store.names() == [NAME]
    gate.num_resets = 2
    assert content_of(store) == CONTENT
    assert gate.num_resets == 0


@pytest.mark.usefixtures("insistence")
def test_an_upload_that_breaks_off_is_sent_again(s3_options: dict[str, Any], gate: Gate) -> None:
    content = os.urandom(2 * BLOCK_BYTES)
    draft = s3(s3_options).create_draft(NAME, "a1")
    gate.num_resets, gate.num_bytes = 2, 30_000  # in the middle of a part
    draft.write(FILE, [content])
    assert gate.num_resets == 0
    assert content_of(s3(s3_options)) == content
    system = fsspec.filesystem("s3", **s3_options)
    assert not system.list_multipart_uploads("bucket"), "what broke off was not given up"


def test_a_server_that_stays_away_is_an_error(s3_options: dict[str, Any], gate: Gate) -> None:
    store = s3(s3_options, patience=HASTY._replace(num_tries=2))
    draft = store.create_draft(NAME, "a1")
    fill(draft)
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    away = s3(
        s3_options | {"endpoint_url": f"http://127.0.0.1:{port}"},
        patience=HASTY._replace(num_tries=2),
    )
    with pytest.raises(StoreError, match=r"cannot list s3://bucket.*tried 2 times") as raised:
        away.names()
    assert isinstance(raised.value, OSError) and raised.value.strerror
    lost = away.join_draft(NAME, "a1")
    lost.discard()  # never raises
    with pytest.raises(StoreError):
        lost.read(PART)
    assert store.names() == []


def test_a_missing_bucket_is_named(s3_options: dict[str, Any]) -> None:
    store = ObjectStore("s3://no-such-bucket/run", s3_options, patience=HASTY)
    assert store.names() == []
    with pytest.raises(StoreError, match=r"s3://no-such-bucket/run .* Create the bucket"):
        store.create_draft(NAME, "a1")


@pytest.mark.usefixtures("s3_environment")
def test_the_environment_says_where() -> None:
    save(open_store("s3://bucket/elsewhere"))
    assert open_store("s3://bucket/elsewhere/").names() == [NAME]


def test_a_fork_makes_its_own_connections(s3_options: dict[str, Any]) -> None:
    """Ranks are forks of a process that may have looked into the store."""
    store = s3(s3_options)
    save(store)
    child = os.fork()
    if not child:
        code = 1
        try:
            save(store, OTHER)
            code = 0 if content_of(store) == CONTENT else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert store.names() == [NAME, OTHER]


def test_a_checkpoint_is_saved_and_loaded_over_s3(
    s3_options: dict[str, Any], tmp_path: Path
) -> None:
    check_round_trip(s3(s3_options))
    system = fsspec.filesystem("s3", use_listings_cache=False, **s3_options)
    system.get("bucket/run/checkpoints/", str(tmp_path / "copied"), recursive=True)
    CheckpointReader(DirectoryStore(tmp_path / "copied"), NAME).verify()


def test_a_checkpoint_is_saved_and_loaded_in_memory(memory: Any) -> None:
    check_round_trip(ObjectStore(MEMORY, block_bytes=1 << 20))


def check_round_trip(store: ObjectStore) -> None:
    tensors = {
        "model.a": [whole_slice(torch.randn(1500, 1000))],
        "model.b": [whole_slice(torch.arange(5))],
        "model.e": [whole_slice(torch.empty(0, 3))],
        "model.h": [whole_slice(torch.randn(7).bfloat16())],
    }
    ended: list[Any] = []
    saver = Saver(store, ended.append)
    about = (Progress(20, 240, 2, 0), Origin("r", {}, "data=1", 1, 120, {}))
    assert saver.save(Group(), NAME, tensors, {"plain": [1]}, about) == ""
    saver.finish(Group())
    assert [saved.problem for saved in ended] == [""]
    assert store.names() == [NAME]
    opened = CheckpointReader(store, NAME)
    opened.verify()
    for name, (part,) in tensors.items():
        assert torch.equal(opened.whole(name), part.tensor)
