"""Threads and forks that read one set at the same time."""

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from shoal.data.collating import collate_samples
from shoal.data.shard_files.reading import shards
from tests.unit.data.shards.made import KINDS, NUM, Small, make, same, small_blocks

__all__ = ["small_blocks"]


def read_all(source, kind: str, seed: int) -> None:
    wanted = Small(kind)
    for number in np.random.default_rng(seed).permutation(NUM):
        assert same(source[int(number)], wanted[int(number)])
    if kind == "rows":
        ids = np.random.default_rng(seed).integers(0, NUM, 40)
        assert same(source.take(ids), collate_samples([wanted[int(i)] for i in ids]))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("compress", [None, "zstd"])
@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_a_set(tmp_path: Path, kind: str, compress: str | None) -> None:
    make(kind, tmp_path / "out", compress)
    errors: list[BaseException] = []
    for attempt in range(3):
        source, start = shards(tmp_path / "out"), threading.Barrier(4)

        def read(seed: int, source=source, start=start) -> None:
            try:
                start.wait(10)
                read_all(source, kind, seed)
            except BaseException as error:
                errors.append(error)
                raise

        threads = [threading.Thread(target=read, args=(4 * attempt + i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("compress", [None, "zstd"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_fork_reads_what_its_parent_opened(
    tmp_path: Path, kind: str, compress: str | None
) -> None:
    """Even if another thread of the parent holds the locks at that moment."""
    make(kind, tmp_path / "out", compress)
    source = shards(tmp_path / "out")
    source[0]
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with source._locked():
            held.set()
            free.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(10)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            read_all(source, kind, 7)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    free.set()
    holder.join()
    assert os.waitstatus_to_exitcode(status) == 0
    read_all(source, kind, 8)


def test_a_set_that_is_replaced_stays_readable(tmp_path: Path) -> None:
    """A build with force puts new files in place; those that are mapped live on."""
    make("rows", tmp_path / "out")
    source = shards(tmp_path / "out")
    for number in range(NUM):
        source[number]
    make("packed", tmp_path / "out", force=True)
    read_all(source, "rows", 1)
    read_all(shards(tmp_path / "out"), "packed", 1)
