"""Sets behind a URL: built there, copied as they are read, within limits and bounded in time.

S3 is moto's server on loopback (`tests/unit/conftest.py`).
"""

import errno
import fcntl
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import fsspec.asyn
import numpy as np
import pytest

from shoal.data.collating import load_collated, load_good_samples
from shoal.data.readers.records import SourceLost
from shoal.data.shard_files import fetching, shard_source
from shoal.data.shard_files.format import BadShards
from shoal.data.shard_files.locations import open_location, read_index
from shoal.data.shard_files.reading import LostSample, shards
from shoal.data.shard_files.verifying import find_faults
from shoal.data.transforms.quarantine import quarantine
from shoal.storage.object_client import ObjectClient, StoreError
from tests.support.gates import Gate
from tests.unit.data.shards.made import KINDS, NUM, Small, files, make, same
from tests.unit.data.shards.stores import URL, check, hasty, objects

__all__ = ["hasty"]


@pytest.mark.parametrize("compress", [None, "zstd"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_set_is_built_and_read_there(
    tmp_path: Path, memory: Any, kind: str, compress: str | None
) -> None:
    make(kind, URL, compress)
    make(kind, tmp_path / "local", compress)
    assert objects(memory) == files(tmp_path / "local")
    source = shards(URL, tmp_path / "copies")
    check(source, kind)
    assert len(list((tmp_path / "copies").glob("*.bin"))) == len(source.index.shards)
    place = open_location(URL, None, 1)
    assert not list(find_faults(place, read_index(place), 2))
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


@pytest.mark.parametrize("compress", [None, "zstd"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_another_process_removed_is_not_held(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, kind: str, compress: str | None
) -> None:
    monkeypatch.setattr(shard_source, "_LOOK_S", 0.0)
    make(kind, URL, compress)
    source = shards(URL, tmp_path / "copies")
    check(source, kind)
    for path in (tmp_path / "copies").glob("*.bin"):
        path.unlink()
    held = f"{tmp_path}/copies"
    assert held in Path("/proc/self/maps").read_text()
    source[0]
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if held in line]
    assert len(maps) <= 1 and not any("(deleted)" in line for line in maps)
    check(source, kind)


@pytest.mark.parametrize("compress", [None, "zstd"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_that_another_process_removes_at_once_is_fetched_again(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, kind: str, compress: str | None
) -> None:
    """As runs do to each other whose limits are too small for the shards that they use."""
    make(kind, URL, compress)
    number, touch = [0], os.utime

    def removed_first(path: Path) -> None:
        number[0] += 1
        if number[0] % 4:  # three times of four
            os.unlink(path)
        touch(path)

    monkeypatch.setattr(os, "utime", removed_first)
    check(shards(URL, tmp_path / "copies"), kind)
    assert number[0] > 4


@pytest.mark.parametrize("kind", KINDS)
def test_copies_go_by_their_use(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """One that was opened first, and is used ever since, goes last."""
    monkeypatch.setattr(shard_source, "_LOOK_S", 0.0)
    make(kind, URL)
    source = shards(URL, tmp_path / "copies")
    source[0], source[NUM - 1]
    first, last = (source.index.shards[number].hash for number in (0, -1))
    for age, name in ((50, first), (25, last)):
        when = time.time() - age
        os.utime(tmp_path / "copies" / f"{name}.bin", (when, when))
    source[0]
    assert source.place.copies._make_room(fetching.CACHE_BYTES - 1, ())[0] == last


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
    ("harm", "told"),
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
    tmp_path: Path, memory: Any, harm: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("rows", URL)
    harmed = harm(memory.cat_file("/sets/out/shard-00001.bin"))
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
    place = open_location(URL, None, 1)
    assert len(list(find_faults(place, read_index(place)))) == 1


def test_a_shard_that_does_not_come_is_given_up(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("rows", URL)
    source = shards(URL, tmp_path / "copies")
    asked, go_on = [], threading.Event()

    def slow(self: ObjectClient, path: str, start: int, stop: int) -> bytes:
        asked.append(path)
        go_on.wait(30)
        return b""

    with monkeypatch.context() as patched:
        patched.setattr(ObjectClient, "get_range", slow)
        patched.setattr(fetching, "PATIENCE_S", 0.05)
        for _ in range(3):
            with pytest.raises(SourceLost, match=r"no answer within 0.05 s"):
                source[0]
        with pytest.raises(SourceLost):  # and no sample is left out for it
            load_good_samples(quarantine(source, tmp_path / "bad.jsonl"), np.arange(3), None)
    assert len(asked) == 1, "a shard that failed is not waited for again and again"
    go_on.set()
    source._failed.clear()  # as after a minute
    check(source, "rows")
    for thread in threading.enumerate():
        if thread.name == "shoal-fetch":
            thread.join(10)


@pytest.mark.parametrize("compress", [None, "zstd"])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_a_batch_are_fetched_beside_each_other(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch, kind: str, compress: str | None
) -> None:
    make(kind, URL, compress, shard_bytes=480)
    source = shards(URL, tmp_path / "copies")
    under_way, most, lock = [0], [0], threading.Lock()
    part = ObjectClient.get_range

    def counted(self: ObjectClient, path: str, start: int, stop: int) -> bytes:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        time.sleep(0.02)
        try:
            return part(self, path, start, stop)
        finally:
            with lock:
                under_way[0] -= 1

    monkeypatch.setattr(ObjectClient, "get_range", counted)
    ids = np.random.default_rng(0).permutation(NUM)
    _, targets = load_collated(source, ids, lambda samples: (None, [int(y) for _, y in samples]))
    assert targets == [int(KINDS[kind](int(number))[1]) for number in ids]
    if kind == "rows":
        assert source.take(ids)[1].tolist() == targets
    assert len(source.index.shards) > 4 and most[0] == 4


@pytest.mark.parametrize("compress", [None, "zstd"])
def test_a_bad_shard_among_several_is_named(
    tmp_path: Path, memory: Any, compress: str | None
) -> None:
    """And what threads fetch together stays within the limit, but for what the batch needs."""
    make("rows", URL, compress, shard_bytes=480)
    memory.pipe_file("/sets/out/shard-00002.bin", b"short")
    source = shards(URL, tmp_path / "copies", strict=False)
    first = int(source._firsts[2])
    with pytest.raises(LostSample, match=f"sample {first} of .*shard-00002.bin"):
        source.take(np.arange(NUM))
    others = np.array([i for i in range(NUM) if not first <= i < int(source._firsts[3])])
    assert source.take(others)[1].tolist() == (others % 7).tolist()


def test_a_disk_that_cannot_hold_copies(tmp_path: Path, memory: Any) -> None:
    make("rows", URL)
    (tmp_path / "copies").touch()
    source = shards(URL, tmp_path / "copies")
    with pytest.raises(SourceLost, match=r"cannot be kept in .*copies.*cache_dir"):
        source[0]


def test_an_outage_is_no_fault_of_the_set(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("rows", URL)
    place = open_location(URL)
    index = read_index(place)

    def away(self: ObjectClient, path: str, start: int, stop: int) -> bytes:
        raise StoreError(111, "cannot read it: connection refused. Check the network.")

    monkeypatch.setattr(ObjectClient, "get_range", away)
    with pytest.raises(StoreError, match="refused"):
        list(find_faults(place, index))
    with pytest.raises(SourceLost, match=r"sample 0 of .* was not reached: .*Check the network"):
        shards(URL, tmp_path / "copies")[0]


def test_unfinished_copies_have_names_of_their_own(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers that share a cache may have the same numbers for processes and threads."""
    make("rows", URL)
    names, real = [], fetching.fetch_to

    def noted(remote: ObjectClient, index: Any, number: int, path: Path, *rest: Any) -> None:
        names.append(path.name)
        real(remote, index, number, path, *rest)

    monkeypatch.setattr(fetching, "fetch_to", noted)
    for container in ("one", "other"):
        check(shards(URL, tmp_path / container), "rows")
    assert len(names) > 2 and len(set(names)) == len(names)


def test_what_was_left_behind_is_cleared(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("rows", URL)
    (tmp_path / "copies").mkdir()
    old = tmp_path / "copies" / f".fetching-{'1' * 32}-{'1' * 16}"
    young = tmp_path / "copies" / f".fetching-{'2' * 32}-{'2' * 16}"
    old.touch()
    young.touch()
    long_ago = time.time() - fetching.ABANDONED_S - 5
    os.utime(old, (long_ago, long_ago))
    shards(URL, tmp_path / "copies")[0]
    assert not old.exists() and young.exists()


def test_what_is_not_the_caches_own_stays(tmp_path: Path, memory: Any) -> None:
    make("rows", URL)
    copies = tmp_path / "copies"
    long_ago = time.time() - fetching.ABANDONED_S - 5
    for name in ("weights.bin", ".netrc", ".fetching-notes", ".git/config", f"{'a' * 32}.bin/x"):
        (copies / name).parent.mkdir(parents=True, exist_ok=True)
        (copies / name).write_bytes(bytes(5000))
        for path in (copies / name, (copies / name).parent):
            os.utime(path, (long_ago, long_ago))
    before = list(copies.rglob("*"))
    source = shards(URL, copies, cache_bytes=1)
    check(source, "rows")
    assert all(path.exists() for path in before)
    assert len(list(copies.glob("?" * 32 + ".bin"))) == 2  # one copy, and the folder so named


@pytest.mark.full  # readers and checkpoints meet S3 in the quick suite, shards a store in memory
@pytest.mark.usefixtures("s3_environment")
def test_s3(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    make("rows", "s3://bucket/sets/out")
    make("rows", tmp_path / "wanted")
    source = shards("s3://bucket/sets/out", tmp_path / "copies")
    gate.num_resets = 2
    check(source, "rows")
    assert gate.num_resets == 0
    system = fsspec.filesystem("s3", skip_instance_cache=True)
    for name, content in files(tmp_path / "wanted").items():
        assert system.cat_file(f"bucket/sets/out/{name}") == content
    place = open_location("s3://bucket/sets/out", None, 1)
    assert not list(find_faults(place, read_index(place)))
    with pytest.raises(StoreError, match="Create the bucket first"):
        make("rows", "s3://elsewhere/out")
    away = shards("s3://bucket/sets/out", tmp_path / "others")
    gate.num_resets = 1000
    with pytest.raises(SourceLost, match=r"tried 4 times"):
        away[0]


@pytest.mark.usefixtures("s3_environment")
def test_credentials_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patched.delenv(name)
        patched.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patched.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        patched.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        with pytest.raises(StoreError, match="Check the credentials"):
            make("rows", "s3://bucket/sets/out")


def test_two_threads_may_fetch_one_shard_where_files_cannot_be_locked(
    tmp_path: Path, memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    make("rows", URL, shard_bytes=300)
    source = shards(URL, tmp_path / "copies")
    monkeypatch.setattr(fetching.fcntl, "flock", refuse)
    both = threading.Barrier(2)
    load_collated = fetching.ShardCopies._fetch

    def together(*args: Any) -> None:
        both.wait(10)
        load_collated(*args)
        both.wait(10)

    monkeypatch.setattr(fetching.ShardCopies, "_fetch", together)
    with ThreadPoolExecutor(2) as threads:
        local = [threads.submit(source.place.local, source.index, 0, []) for _ in range(2)]
        assert len({found.result().path for found in local}) == 1


def test_a_fork_does_not_keep_a_shard_locked(tmp_path: Path) -> None:
    with fetching._alone(tmp_path / "lock", None):
        child = os.fork()
        if not child:
            time.sleep(20)
            os._exit(0)
    try:
        with open(tmp_path / "lock", "a", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
