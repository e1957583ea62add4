"""Sets behind a URL: built there, copied as they are read, within limits and bounded in time.

S3 is moto's server on loopback, behind a gate that can break connections: real requests over real
sockets, through s3fs.
"""

import gc
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import fsspec.asyn
import numpy as np
import pytest

from shoal.checkpoint.remote import Patience, Remote, StoreError
from shoal.data.shard_files import drafts, fetching, places
from shoal.data.shard_files.format import SEAL, BadShards
from shoal.data.shard_files.places import open_place, read_index
from shoal.data.shard_files.reading import LostSample, shards
from shoal.data.shard_files.verifying import faults
from shoal.errors import RecipeError, UsageError
from shoal.testing.gates import Gate
from tests.unit.data.shards.made import KINDS, NUM, Small, files, make, same

HASTY = Patience(num_tries=4, first_pause_s=0.01, most_pause_s=0.05)
URL = "memory://sets/out"


@pytest.fixture
def memory() -> Iterator[Any]:
    system = fsspec.filesystem("memory")
    yield system
    with suppress(FileNotFoundError):
        system.rm("/sets", recursive=True)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "PATIENCE", HASTY)
    monkeypatch.setattr(places.Bucket.__init__, "__defaults__", (HASTY,))


def check(source: Any, kind: str) -> None:
    wanted = Small(kind)
    for number in np.random.default_rng(0).permutation(NUM):
        assert same(source[int(number)], wanted[int(number)])


@pytest.mark.parametrize("compress", [None, "zstd"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_set_is_built_and_read_there(
    tmp_path: Path, memory: Any, kind: str, compress: str | None
) -> None:
    make(kind, URL, compress)
    make(kind, tmp_path / "local", compress)
    found = {path.rpartition("/")[2]: memory.cat_file(path) for path in memory.find("/sets/out")}
    assert found == files(tmp_path / "local")
    source = shards(URL, tmp_path / "copies")
    check(source, kind)
    assert len(list((tmp_path / "copies").glob("*.bin"))) == len(source.index.shards)
    place = open_place(URL, None, 1)
    assert not list(faults(place, read_index(place), 2))
    # A second reader asks for nothing but the index.
    memory.rm_file("/sets/out/shard-00000.bin")
    check(shards(URL, tmp_path / "copies", strict=False), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_stay_within_a_limit(tmp_path: Path, memory: Any, kind: str) -> None:
    make(kind, URL)
    size = max(memory.size(path) for path in memory.find("/sets/out"))
    source = shards(URL, tmp_path / "copies", cache_bytes=2 * size)
    rng = np.random.default_rng(0)
    for number in rng.integers(0, NUM, 60):
        assert same(source[int(number)], Small(kind)[int(number)])
        copies = list((tmp_path / "copies").glob("*.bin"))
        assert sum(path.stat().st_size for path in copies) <= 2 * size
    if kind == "rows":  # a batch that needs more than the limit has it, for itself
        ids = rng.permutation(NUM)
        assert source.take(ids)[1].tolist() == (ids % 7).tolist()


def test_threads_share_what_may_go(tmp_path: Path, memory: Any) -> None:
    make("rows", URL)
    source = shards(URL, tmp_path / "copies", cache_bytes=1)
    errors: list[BaseException] = []

    def read(seed: int) -> None:
        try:
            for ids in np.random.default_rng(seed).integers(0, NUM, (20, 5)):
                assert source.take(ids)[1].tolist() == (ids % 7).tolist()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_copy_is_fetched_anew(tmp_path: Path, memory: Any, kind: str) -> None:
    make(kind, URL)
    check(shards(URL, tmp_path / "copies"), kind)
    for place in (5, -5):  # in a block, in the table
        for path in (tmp_path / "copies").glob("*.bin"):
            content = bytearray(path.read_bytes())
            content[place] ^= 1
            path.write_bytes(content)
        check(shards(URL, tmp_path / "copies"), kind)
    for path in (tmp_path / "copies").glob("*.bin"):
        os.truncate(path, 10)
    check(shards(URL, tmp_path / "copies"), kind)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (lambda whole: None, "shard-00001.bin is missing"),
        (lambda whole: whole[:50], "only 50 came"),
        (
            lambda whole: whole[:9] + b"?" + whole[10:],
            "were written. It was fetched",
        ),
        (lambda whole: whole[:-5] + b"?" + whole[-4:], "not the one that was written. It was"),
    ],
)
def test_a_bad_shard_loses_its_samples(
    tmp_path: Path, memory: Any, content: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("rows", URL)
    harmed = content(memory.cat_file("/sets/out/shard-00001.bin"))
    if harmed is None:
        memory.rm_file("/sets/out/shard-00001.bin")
        with pytest.raises(BadShards, match=told):
            shards(URL, tmp_path / "copies")
    else:
        memory.pipe_file("/sets/out/shard-00001.bin", harmed)
    source = shards(URL, tmp_path / "copies", strict=False)
    first = source.index.shards[0].num_samples
    source[0]
    for number in (first, first + 1):
        with pytest.raises(LostSample, match=told):
            source[number]
    assert not list((tmp_path / "copies").glob(".fetching-*"))
    place = open_place(URL, None, 1)
    assert len(list(faults(place, read_index(place)))) == 1


def test_a_shard_that_does_not_come_is_given_up(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("rows", URL)
    source = shards(URL, tmp_path / "copies")
    asked, go_on = [], threading.Event()

    def slow(self: Remote, path: str, start: int, stop: int) -> bytes:
        asked.append(path)
        go_on.wait(30)
        return b""

    with monkeypatch.context() as patched:
        patched.setattr(Remote, "part", slow)
        patched.setattr(fetching, "PATIENCE_S", 0.05)
        for _ in range(3):
            with pytest.raises(LostSample, match=r"no answer within 0.05 s"):
                source[0]
    assert len(asked) == 1, "a shard that failed is not waited for again and again"
    go_on.set()
    source._failed.clear()  # as after a minute
    check(source, "rows")
    for thread in threading.enumerate():
        if thread.name == "shoal-fetch":
            thread.join(10)


def test_a_disk_that_cannot_hold_copies(tmp_path: Path, memory: Any) -> None:
    make("rows", URL)
    (tmp_path / "copies").touch()
    source = shards(URL, tmp_path / "copies")
    with pytest.raises(LostSample, match=r"cannot be kept in .*copies.*cache_dir"):
        source[0]


def test_what_was_left_behind_is_cleared(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("rows", URL)
    (tmp_path / "copies").mkdir()
    old = tmp_path / "copies" / ".fetching-1-1"
    young = tmp_path / "copies" / ".fetching-2-2"
    old.touch()
    young.touch()
    long_ago = time.time() - fetching.ABANDONED_S - 5
    os.utime(old, (long_ago, long_ago))
    shards(URL, tmp_path / "copies")[0]
    assert not old.exists() and young.exists()


def test_an_interrupted_build_goes_on_there(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("rows", tmp_path / "wanted")
    real, left = Remote.put, [7]

    def put(self: Remote, path: str, content: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        real(self, path, content)

    with monkeypatch.context() as patched:
        patched.setattr(Remote, "put", put)
        with pytest.raises(KeyboardInterrupt):
            make("rows", URL)
    with pytest.raises(BadShards):
        shards(URL, tmp_path / "copies")
    written: list[str] = []

    def noted(self: Remote, path: str, content: bytes) -> None:
        written.append(path)
        real(self, path, content)

    monkeypatch.setattr(Remote, "put", noted)
    make("rows", URL)
    assert "shard-00000.bin" not in written and written[-1] == SEAL
    found = {path.rpartition("/")[2]: memory.cat_file(path) for path in memory.find("/sets/out")}
    assert found == files(tmp_path / "wanted")
    with pytest.raises(UsageError, match="holds a set already"):
        make("rows", URL)
    make("packed", URL, force=True)
    check(shards(URL, tmp_path / "copies"), "packed")


def test_a_large_shard_goes_up_in_parts(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts, "UPLOAD_BYTES", 300)
    monkeypatch.setattr(fetching, "PART_BYTES", 100)
    make("rows", URL)
    check(shards(URL, tmp_path / "copies"), "rows")


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    pytest.importorskip("s3fs", reason="needs the extra s3")
    threaded = pytest.importorskip("moto.server", reason="needs the extra test")
    # Its threads stay for good, and are not leaks of the test that happens to start them.
    threads = ThreadPoolExecutor(1)
    threads.submit(int).result()
    fsspec.asyn.get_loop().set_default_executor(threads)
    served = threaded.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    served.start()
    yield served.get_host_and_port()
    served.stop()


@pytest.fixture
def gate(server: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """A bucket that is empty, where the environment says it is."""
    made = Gate(server)
    for name, value in {
        "AWS_ENDPOINT_URL_S3": f"http://127.0.0.1:{made.port}",
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",  # we insist, not the back end
    }.items():
        monkeypatch.setenv(name, value)
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir("shards")
    yield made
    made.num_resets = 0
    fsspec.filesystem("s3", skip_instance_cache=True).rm("shards", recursive=True)
    gc.collect()
    made.close()


def test_s3(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    make("rows", "s3://shards/sets/out")
    make("rows", tmp_path / "wanted")
    source = shards("s3://shards/sets/out", tmp_path / "copies")
    gate.num_resets = 2
    check(source, "rows")
    assert gate.num_resets == 0
    system = fsspec.filesystem("s3", skip_instance_cache=True)
    for name, content in files(tmp_path / "wanted").items():
        assert system.cat_file(f"shards/sets/out/{name}") == content
    place = open_place("s3://shards/sets/out", None, 1)
    assert not list(faults(place, read_index(place)))
    with pytest.raises(StoreError, match="Create the bucket first"):
        make("rows", "s3://elsewhere/out")
    away = shards("s3://shards/sets/out", tmp_path / "others")
    gate.num_resets = 1000
    with pytest.raises(RecipeError, match=r"tried 4 times"):
        away[0]


def test_credentials_may_be_missing(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patched.delenv(name)
        patched.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patched.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        patched.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        with pytest.raises(StoreError, match="Check the credentials"):
            make("rows", "s3://shards/sets/out")
