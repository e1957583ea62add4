"""Checkpoints, shards and data files on real stores: HDFS by two protocols, S3 of SeaweedFS."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.data.readers.records import SourceLost
from shoal.errors import UsageError
from shoal.storage import object_client
from shoal.storage.object_client import ObjectClient, RetryPolicy, StoreError
from shoal.storage.object_store import ObjectStore
from shoal.testing.sources import Case, SourceConformance, in_fork
from shoal.testing.stores import StoreConformance, StoreLocation
from tests.support.servers import Server
from tests.support.store_servers import S3_KEY, S3_SECRET, Hdfs, start_hdfs, start_seaweedfs

HASTY = RetryPolicy(num_tries=2, first_pause_s=0.01, most_pause_s=0.05)
TABLE = b"a,b\n1,x\n2,y\n3,z\n4,w\n"
ROWS = [{"a": "1", "b": "x"}, {"a": "2", "b": "y"}, {"a": "3", "b": "z"}, {"a": "4", "b": "w"}]
pytestmark = [pytest.mark.full, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def hdfs() -> Iterator[Hdfs]:
    pytest.importorskip("hdfs_native", reason="needs the extra hdfs")
    with start_hdfs() as started:
        yield started


@pytest.fixture(scope="module")
def weed() -> Iterator[Server]:
    pytest.importorskip("s3fs", reason="needs the extra s3")
    with start_seaweedfs() as server:
        yield server


@pytest.fixture(scope="module")
def s3(weed: Server) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {
            "AWS_ACCESS_KEY_ID": S3_KEY,
            "AWS_SECRET_ACCESS_KEY": S3_SECRET,
            "AWS_ENDPOINT_URL_S3": weed.url,
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patched.setenv(name, value)
        client = ObjectClient("s3://shoal-tests", {}, RetryPolicy(30, 0.2, 1.0))
        client._request("make", "", lambda system, path: system.mkdir(path))
        yield "s3://shoal-tests"


def location(url: str, tmp_path: Path) -> StoreLocation:
    where = f"{url}/stores/{tmp_path.name}"

    def damage(name: str, file: str, content: bytes | None) -> None:
        client = ObjectClient(where, {}, HASTY)
        if content is None:
            client.delete([f"{name}/{file}"])
        else:
            client.put(f"{name}/{file}", content)

    return StoreLocation(lambda: ObjectStore(where, abandoned_s=-5.0), damage)


def put_table(url: str) -> str:
    ObjectClient(url, {}, HASTY).put("data/t.csv", TABLE)
    return f"{url}/data/t.csv"


class TestHdfsStore(StoreConformance):
    @pytest.fixture
    def place(self, hdfs: Hdfs, tmp_path: Path) -> StoreLocation:
        return location(hdfs.url, tmp_path)


class TestWebHdfsStore(StoreConformance):
    @pytest.fixture
    def place(self, hdfs: Hdfs, tmp_path: Path) -> StoreLocation:
        return location(hdfs.web_url, tmp_path)


class TestSeaweedStore(StoreConformance):
    @pytest.fixture
    def place(self, s3: str, tmp_path: Path) -> StoreLocation:
        return location(s3, tmp_path)


class TestHdfsRows(SourceConformance):
    @pytest.fixture
    def case(self, hdfs: Hdfs) -> Case:
        url = put_table(hdfs.url)
        return Case(lambda: shoal.data.csv(url), ROWS)


class TestWebHdfsRows(SourceConformance):
    @pytest.fixture
    def case(self, hdfs: Hdfs) -> Case:
        url = put_table(hdfs.web_url)
        return Case(lambda: shoal.data.csv(url), ROWS)


class TestSeaweedRows(SourceConformance):
    @pytest.fixture
    def case(self, s3: str) -> Case:
        url = put_table(s3)
        return Case(lambda: shoal.data.csv(url), ROWS)


@pytest.fixture(params=["hdfs", "webhdfs", "s3"])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "s3":
        return request.getfixturevalue("s3")
    found: Hdfs = request.getfixturevalue("hdfs")
    return found.url if request.param == "hdfs" else found.web_url


def test_shards_live_there(url: str, tmp_path: Path) -> None:
    values = torch.arange(100.0).reshape(50, 2)
    data = shoal.data.tensors(values, values)
    where = f"{url}/sets/{tmp_path.name}"
    shoal.data.build(data, where, shard_bytes=200)
    found = shoal.data.shards(where, cache_dir=tmp_path / "copies")
    assert len(found) == 50
    assert found.take(np.arange(50))[0].equal(data.inputs)


def test_a_file_that_changes_is_lost(url: str) -> None:
    client = ObjectClient(url, {}, HASTY)
    client.put("data/changing.csv", TABLE)
    rows = shoal.data.csv(f"{url}/data/changing.csv")
    assert rows[0] == ROWS[0]
    client.put("data/changing.csv", TABLE + b"5,v\n")
    with pytest.raises(SourceLost, match="changed after it was opened"):
        rows[1]
    client.put("data/changing.csv", TABLE[:8])  # so that it ends before the record
    with pytest.raises(SourceLost, match="changed after it was opened"):
        rows[3]
    with pytest.raises(UsageError, match="does not exist"):
        shoal.data.csv(f"{url}/data/none.csv")


def test_a_store_that_hangs_ends_the_wait(
    weed: Server, s3: str, hdfs: Hdfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though each back end repeats by itself, or waits for ever."""
    monkeypatch.setattr(pytest.importorskip("s3fs").S3FileSystem, "read_timeout", 0.5)
    for url, hung in ((s3, [weed]), (hdfs.web_url, hdfs.data_nodes)):
        rows = shoal.data.csv(put_table(url))
        monkeypatch.setattr(object_client, "_LIMIT_S", (3.0, 60.0))
        _hasty(rows)
        for each in hung:
            each.pause()
        with pytest.raises(SourceLost, match=r"cannot read .*t\.csv.* It was tried 2 times"):
            rows[0]
        for each in hung:
            each.resume()
        assert rows[1] == ROWS[1]


def test_wrong_keys_of_s3_are_refused_at_once(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = put_table(s3)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    with pytest.raises(UsageError, match=r"t\.csv.*Check the credentials") as caught:
        shoal.data.csv(url)
    assert "hunter2" not in str(caught.value)


def test_a_name_node_without_data_nodes() -> None:
    """Reading and writing end with the file's name, and go on when a data node is back."""
    pytest.importorskip("hdfs_native", reason="needs the extra hdfs")
    with start_hdfs() as hdfs:
        urls = [hdfs.web_url, hdfs.url]
        opened = []
        for url in urls:
            ObjectClient(url, {}, HASTY).put("alone/t.csv", TABLE)
            opened.append(_hasty(shoal.data.csv(f"{url}/alone/t.csv")))
        for node in hdfs.data_nodes:
            node.stop()
        for url, rows in zip(urls, opened, strict=True):
            with pytest.raises(StoreError, match=r"cannot write .*alone/new"):
                ObjectClient(url, {}, HASTY).put("alone/new", b"content")
            with pytest.raises(SourceLost, match=r"cannot read .*alone/t\.csv"):
                rows[0]
        for node in hdfs.data_nodes:
            node.start()
        for url in urls:
            assert shoal.data.csv(f"{url}/alone/t.csv")[1] == ROWS[1]


def _hasty(rows: Any) -> Any:
    """Asked twice, and not six times, for what is away."""
    rows.files._web._patience = HASTY
    rows.files._web._remotes.get().clear()
    return rows


def test_a_name_node_that_is_away() -> None:
    """A question ends in time; hdfs-native goes on to look for it, in a thread of that process."""
    pytest.importorskip("hdfs_native", reason="needs the extra hdfs")

    def ask(url: str) -> None:
        with pytest.raises(StoreError, match=r"cannot look at .*It was tried 1 times"):
            ObjectClient(url, {}, RetryPolicy(num_tries=1)).size("a")

    ask("webhdfs://127.0.0.1:1")
    in_fork(lambda: ask("hdfs://127.0.0.1:1"))
