"""Samples on their way into a set: bad ones, sources that are gone, and processes that load."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.data.readers.records import BadRecord, SourceLost
from shoal.data.shard_files import encoding
from shoal.data.shard_files.reading import shards
from shoal.data.shard_files.writing import build
from shoal.data.transforms.quarantine import quarantine
from shoal.errors import Ended, RecipeError, ShoalError
from tests.support.leaks import descendants
from tests.unit.data.shards.made import KINDS, NUM, Small, in_a_fork, kill, same


class Bad(Small):
    """Some of its samples cannot be had."""

    def __getitem__(self, index: int) -> Any:
        if index in (17, 18, 44):
            raise RecipeError(f"sample {index}: no picture")
        return super().__getitem__(index)


class LeavingOut(Bad):
    def __init__(self, kind: str):
        super().__init__(kind)
        self.left_out: list[int] = []

    def record(self, index: int, error: Exception) -> None:
        assert "no picture" in str(error)
        self.left_out.append(index)


def test_no_worker_starts_that_has_nothing_to_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forks, fork = [], os.fork

    def counted() -> int:
        forks.append(1)
        return fork()

    monkeypatch.setattr(os, "fork", counted)
    build(Small("rows"), tmp_path / "out", workers=256)
    assert len(forks) == -(-NUM // encoding.TURN)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_bad_sample_stops_or_is_left_out(tmp_path: Path, workers: int) -> None:
    with pytest.raises(RecipeError, match="sample 17: no picture"):
        build(Bad("rows"), tmp_path / "bad", shard_bytes=1000, workers=workers)
    source = LeavingOut("rows")
    build(source, tmp_path / "out", shard_bytes=1000, workers=workers)
    assert source.left_out == [17, 18, 44]
    good = [number for number in range(NUM) if number not in source.left_out]
    opened = shards(tmp_path / "out")
    assert len(opened) == len(good)
    assert all(same(opened[at], KINDS["rows"](i)) for at, i in enumerate(good))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_name_that_is_no_text_is_told_of(tmp_path: Path, workers: int) -> None:
    source = Gone(40, ValueError(os.fsdecode(b"photo-\xff.jpg")))
    with pytest.raises(RecipeError, match=r"sample 40 .*photo-\\udcff.jpg"):
        build(source, tmp_path / "out", workers=workers)
    build(quarantine(source, tmp_path / "bad.jsonl"), tmp_path / "out", workers=workers)
    assert len(shards(tmp_path / "out")) == NUM - 1


class Gone(Small):
    """Its server goes away."""

    def __init__(self, index: int, error: BaseException):
        super().__init__("rows")
        self.index, self.error = index, error

    def __getitem__(self, index: int) -> Any:
        if index == self.index:
            raise self.error
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("index", [30, 31])  # the second is one that is looked at first
@pytest.mark.parametrize("error", [SourceLost("no server"), ConnectionError("no server")])
def test_what_is_not_reached_is_never_left_out(
    tmp_path: Path, error: Exception, index: int, workers: int
) -> None:
    source = quarantine(Gone(index, error), tmp_path / "bad.jsonl")
    with pytest.raises(ShoalError, match="no server") as raised:
        build(source, tmp_path / "out", shard_bytes=1000, workers=workers)
    assert not isinstance(raised.value, RecipeError)
    assert not (tmp_path / "out").exists() and not (tmp_path / "bad.jsonl").exists()


@pytest.mark.parametrize("index", [30, 31])
def test_any_error_of_a_sample_is_its_own(tmp_path: Path, index: int) -> None:
    source = quarantine(Gone(index, ValueError("a torn page")), tmp_path / "bad.jsonl")
    assert build(source, tmp_path / "out", shard_bytes=1000).num_samples == NUM - 1
    assert "a torn page" in (tmp_path / "bad.jsonl").read_text()


def test_a_worker_shows_what_it_died_of(tmp_path: Path, capfd) -> None:
    with pytest.raises(RecipeError, match=r"loads sample 30 died \(exit code 1\)"):
        build(Gone(30, Ended("enough")), tmp_path / "out", workers=2)
    assert "Ended: enough" in capfd.readouterr().err


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(0)])
@pytest.mark.parametrize("workers", [1, 2])
def test_an_exit_in_a_sample_does_not_end_a_build_as_if_it_were_done(
    tmp_path: Path, workers: int, error: BaseException
) -> None:
    with pytest.raises(RecipeError, match=f"sample 30 of 60 failed: {type(error).__name__}: 0"):
        build(Gone(30, error), tmp_path / "out", workers=workers)
    assert not (tmp_path / "out").exists()


def test_workers_do_not_outlive_a_build_that_is_killed(tmp_path: Path) -> None:
    before = descendants()

    class Deadly(Small):
        def __getitem__(self, index: int) -> Any:
            if index == 20 and os.getpid() != self.builder:
                os.kill(self.builder, signal.SIGKILL)
                time.sleep(60)
            return super().__getitem__(index)

    def dies() -> None:
        source = Deadly("rows")
        source.builder = os.getpid()
        build(source, tmp_path / "out", workers=2)

    assert in_a_fork(dies) == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while descendants() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not descendants() - before


def test_a_worker_that_dies_is_named(tmp_path: Path) -> None:
    class Deadly(Small):
        def __getitem__(self, index: int) -> Any:
            if index == 20 and os.getpid() != parent:
                kill()
            return super().__getitem__(index)

    parent = os.getpid()
    with pytest.raises(RecipeError, match=r"loads sample 20 died \(killed by signal SIGKILL\)"):
        build(Deadly("rows"), tmp_path / "out", workers=2)


def test_workers_of_a_layout_that_does_not_fit_are_ended(tmp_path: Path) -> None:
    samples: list[Any] = [(torch.zeros(1 << 14), i) for i in range(NUM)]  # more than a pipe holds
    samples[20] = (torch.zeros(1), 20)
    before, seen = len(descendants()), []
    build(
        samples,
        tmp_path / "out",
        shard_bytes=1 << 20,
        workers=2,
        progress=lambda num_samples, num_bytes: seen.append(len(descendants()) - before),
    )
    assert seen and max(seen) <= 2


class Together(Small):
    """Records that come many at a time."""

    def __init__(self, missing: int = -1, error: Exception | None = None):
        super().__init__("rows")
        self.missing, self.error = missing, error

    def many(self, ids: Any) -> list[Any]:
        self.asked += 1
        if self.missing in list(ids):
            assert self.error is not None
            raise self.error
        return [self.make(int(index)) for index in ids]

    def __getitem__(self, index: int) -> Any:
        return self.many([index])[0]


@pytest.mark.parametrize("workers", [1, 3])
def test_records_are_asked_for_together(tmp_path: Path, workers: int) -> None:
    source = Together()
    build(source, tmp_path / "out", shard_bytes=1000, workers=workers)
    opened = shards(tmp_path / "out")
    assert all(same(opened[number], KINDS["rows"](number)) for number in range(NUM))
    assert source.asked <= 16 + NUM / 16 + 1  # probes, and then a question a turn
    gone = Together(30, BadRecord("row 30 is gone"))
    with pytest.raises(RecipeError, match="sample 30: row 30 is gone"):
        build(gone, tmp_path / "gone", shard_bytes=1000, workers=workers)
    lost = Together(30, SourceLost("no server"))
    with pytest.raises(ShoalError, match="no server") as raised:
        build(lost, tmp_path / "lost", shard_bytes=1000, workers=workers)
    assert not isinstance(raised.value, RecipeError)
