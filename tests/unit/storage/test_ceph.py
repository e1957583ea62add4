"""Checkpoints, shards and data files on a real Ceph (16): its S3 gateway, and a mounted CephFS."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

import shoal
from shoal.data.readers.records import SourceLost
from shoal.errors import UsageError
from shoal.storage.object_client import ObjectClient, RetryPolicy, StoreError
from shoal.storage.store import DirectoryStore
from shoal.testing.sources import Case, SourceConformance
from shoal.testing.stores import StoreConformance, StoreLocation
from tests.support.ceph import Ceph, start_ceph
from tests.support.store_servers import S3_KEY, S3_SECRET
from tests.unit.storage.test_real_stores import HASTY, ROWS, TABLE, location, put_table

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def ceph() -> Iterator[Ceph]:
    with start_ceph(filesystem=True) as started:
        yield started


def bucket(patched: pytest.MonkeyPatch, ceph: Ceph) -> str:
    pytest.importorskip("s3fs", reason="needs the extra s3")
    for name, value in {
        "AWS_ACCESS_KEY_ID": S3_KEY,
        "AWS_SECRET_ACCESS_KEY": S3_SECRET,
        "AWS_ENDPOINT_URL_S3": ceph.gateway.url,
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        patched.setenv(name, value)
    client = ObjectClient("s3://shoal-tests", {}, RetryPolicy(30, 0.2, 1.0))
    client._request("make", "", lambda system, path: system.mkdir(path))
    return "s3://shoal-tests"


@pytest.fixture(scope="module")
def s3(ceph: Ceph) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patched:
        yield bucket(patched, ceph)


@pytest.fixture(scope="module")
def mounted(ceph: Ceph) -> Iterator[Path]:
    with ExitStack() as held:
        yield held.enter_context(ceph.mounted())


class TestCephStore(StoreConformance):
    @pytest.fixture
    def place(self, s3: str, tmp_path: Path) -> StoreLocation:
        return location(s3, tmp_path)


class TestCephRows(SourceConformance):
    @pytest.fixture
    def case(self, s3: str) -> Case:
        url = put_table(s3)
        return Case(lambda: shoal.data.csv(url), ROWS)


class TestMountedStore(StoreConformance):
    @pytest.fixture
    def place(self, mounted: Path, tmp_path: Path) -> StoreLocation:
        where = mounted / "stores" / tmp_path.name
        where.mkdir(parents=True)

        def damage(name: str, file: str, content: bytes | None) -> None:
            if content is None:
                (where / name / file).unlink()
            else:
                (where / name / file).write_bytes(content)

        return StoreLocation(lambda: DirectoryStore(where), damage)


class TestMountedRows(SourceConformance):
    @pytest.fixture
    def case(self, mounted: Path) -> Case:
        (mounted / "t.csv").write_bytes(TABLE)
        return Case(lambda: shoal.data.csv(mounted / "t.csv"), ROWS)


@pytest.mark.parametrize("kind", ["s3", "mounted"])
def test_shards_live_there(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    values = torch.arange(100.0).reshape(50, 2)
    where = f"{request.getfixturevalue(kind)}/sets/{tmp_path.name}"
    shoal.data.build(shoal.data.tensors(values, values), where, shard_bytes=200)
    copies = {"cache_dir": tmp_path / "copies"} if kind == "s3" else {}
    found = shoal.data.shards(where, **copies)
    assert len(found) == 50 and found.take(np.arange(50))[0].equal(values)


@pytest.mark.parametrize("kind", ["s3", "mounted"])
def test_a_file_that_changes_is_lost(request: pytest.FixtureRequest, kind: str) -> None:
    where = request.getfixturevalue(kind)

    def put(content: bytes) -> None:
        if kind == "s3":
            ObjectClient(where, {}, HASTY).put("changing.csv", content)
        else:
            (where / "changing.csv").write_bytes(content)

    put(TABLE)
    rows = shoal.data.csv(f"{where}/changing.csv")
    assert rows[0] == ROWS[0]
    put(TABLE + b"5,v\n")
    with pytest.raises(SourceLost, match="changed after it was opened"):
        rows[1]


def test_wrong_keys_are_refused_at_once(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    url = put_table(s3)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    with pytest.raises(UsageError, match=r"t\.csv.*Check the credentials") as caught:
        shoal.data.csv(url)
    assert "hunter2" not in str(caught.value)


def test_the_gateway_goes_away_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    with start_ceph() as ceph:
        where = bucket(monkeypatch, ceph)
        rows = shoal.data.csv(put_table(where))
        ceph.gateway.stop()
        with pytest.raises(StoreError, match=r"cannot look at .*It was tried 2 times"):
            ObjectClient(where, {}, HASTY).size("data/t.csv")
        with ThreadPoolExecutor(1) as threads:
            answer = threads.submit(lambda: rows[2])
            ceph.gateway.start()
            assert answer.result(120) == ROWS[2]
