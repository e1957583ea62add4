"""Work in shares: divided among any number of workers, taken over from the dead, done once."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.data.transforms import jobs
from shoal.data.transforms.jobs import PassJob, run_job, split_samples
from shoal.errors import RecipeError, UsageError
from shoal.storage.files import try_lock

NUM = 3000


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "transforms"


def work(share: range) -> bytes:
    return f"{share.start}-{share.stop},".encode()


def job(key: str | None = "key", work: Any = work) -> PassJob:
    return PassJob("test", key, NUM, work, b"".join)


EXPECTED = b"".join(map(work, split_samples(NUM)))


@pytest.mark.parametrize("num_samples", [0, 1, 255, 256, 257, 100_000, 1_000_003])
def test_shares_cover_all_in_order(num_samples: int) -> None:
    found = split_samples(num_samples)
    assert [index for share in found for index in share] == list(range(num_samples))
    assert len(found) <= 256


@pytest.mark.parametrize("key", [None, "key"])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_any_number_of_workers(key: str | None, workers: int, cache: Path) -> None:
    assert run_job(job(key), workers) == EXPECTED
    names = [path.name for path in cache.iterdir()] if cache.exists() else []
    assert names == ([] if key is None else ["test-key.bin"])


def test_forks_do_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # whatever other tests left running

    def note(share: range) -> bytes:
        time.sleep(0.01)
        with open(tmp_path / "who", "a") as file:
            file.write(f"{os.getpid()}\n")
        return work(share)

    assert run_job(job(work=note), workers=3) == EXPECTED
    pids = (tmp_path / "who").read_text().split()
    assert len(pids) == len(split_samples(NUM)) and len(set(pids)) == 3


def test_threads_work_where_a_fork_is_not_safe() -> None:
    names: set[str] = set()

    def note(share: range) -> bytes:
        time.sleep(0.01)
        names.add(f"{os.getpid()} {threading.get_ident()}")
        return work(share)

    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        assert run_job(job(work=note), workers=3) == EXPECTED
    finally:
        done.set()
        other.join()
    assert len(names) == 3 and {name.split()[0] for name in names} == {str(os.getpid())}


def test_it_is_done_once() -> None:
    assert run_job(job()) == EXPECTED

    def never(share: range) -> bytes:
        raise AssertionError(share)

    assert run_job(job(work=never), workers=2) == EXPECTED


@pytest.mark.parametrize("change", ["flip", "cut", "empty", "append"])
def test_what_is_damaged_is_done_anew(change: str, cache: Path) -> None:
    run_job(job())
    path = cache / "test-key.bin"
    content = path.read_bytes()
    changed = {
        "flip": content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],
        "cut": content[:-1],
        "empty": b"",
        "append": content + b"x",
    }
    path.write_bytes(changed[change])
    assert run_job(job()) == EXPECTED
    assert path.read_bytes() == content


def test_an_error_in_a_share_is_the_callers() -> None:
    def fail(share: range) -> bytes:
        if share.start > 2000:
            raise RecipeError(f"sample {share.start} is bad")
        return work(share)

    for workers in (1, 3):
        with pytest.raises(RecipeError, match="is bad"):
            run_job(job(work=fail), workers)
    assert run_job(job()) == EXPECTED  # what was left lying is used or done again


def test_workers_that_are_killed_are_not_missed() -> None:
    mother = os.getpid()

    def die(share: range) -> bytes:
        if os.getpid() != mother:
            os.kill(os.getpid(), signal.SIGKILL)
        return work(share)

    assert run_job(job(work=die), workers=4) == EXPECTED


def test_workers_that_stop_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_PATIENCE_S", 0.2)
    mother = os.getpid()

    def stop(share: range) -> bytes:
        if os.getpid() != mother:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(0.01)
        return work(share)

    assert run_job(job(work=stop), workers=3) == EXPECTED


def test_processes_that_start_at_once_divide_the_work(tmp_path: Path) -> None:
    def note(share: range) -> bytes:
        time.sleep(0.01)
        with open(tmp_path / "who", "a") as file:
            file.write(f"{os.getpid()}\n")
        return work(share)

    pids = []
    for _ in range(3):
        pid = os.fork()
        if pid == 0:
            os._exit(0 if run_job(job(work=note)) == EXPECTED else 1)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
    # A late one may find the parts taken away before it sees the result, and begin anew: rarely.
    assert len(set((tmp_path / "who").read_text().split())) > 1


def test_what_nobody_has_used_for_long_goes(cache: Path) -> None:
    def age(path: Path, days: float) -> None:
        then = time.time() - days * 86400
        os.utime(path, (then, then))

    for key in ("old", "used", "young"):
        run_job(job(key))
    for name in ("failed", "working", "fresh"):
        (cache / f"test-{name}.parts").mkdir()
        (cache / f"test-{name}.parts" / "0000.lock").touch()
    (cache / "test-old.binx1y2").touch()
    for name, days in {"old.bin": 31, "used.bin": 31, "young.bin": 29, "old.binx1y2": 2}.items():
        age(cache / f"test-{name}", days)
    for name, days in {"failed": 2, "working": 2, "fresh": 0.5}.items():
        age(cache / f"test-{name}.parts", days)
    run_job(job("used"))
    with open(cache / "test-working.parts" / "0000.lock", "ab") as file:
        assert try_lock(file)
        run_job(job("new"))
    found = {path.name for path in cache.iterdir()}
    names = ("used.bin", "young.bin", "new.bin", "working.parts", "fresh.parts")
    assert found == {f"test-{name}" for name in names}


def test_a_directory_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", "/proc/nowhere")
    with pytest.raises(UsageError, match=r"/proc/nowhere/transforms.*\$SHOAL_CACHE"):
        run_job(job())
    with pytest.raises(UsageError, match="workers=0"):
        run_job(job(), workers=0)
