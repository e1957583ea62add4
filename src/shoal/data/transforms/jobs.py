"""One pass over a whole source: divided among processes, and its result kept for the next time.

The source is cut into shares of neighbouring samples. A process claims a share by a lock that the
kernel releases if it dies, works on it, and writes the result to the job's directory; the results
are merged in the order of the samples. So workers of one call and runs that start at the same time,
also on several hosts with a common cache directory, divide the work, and the result does not depend
on the division. Waiting is bounded: a share that does not come is done again.

The result is kept in `$SHOAL_CACHE/transforms` under a hash of the source and of the work, until it
was not used for 30 days. Not for work whose result depends on the order of shares. Cost: a small
file a share while the pass runs. Next: `cleaning.py` and `statistics.py`, which use it.
"""

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from shoal.data.validate import require_whole
from shoal.errors import UsageError
from shoal.logs import log
from shoal.storage.files import read_hashed, try_lock, write_hashed
from shoal.storage.run_dir import cache_directory
from shoal.system.processes import die_with_parent

_MAGIC = b"shoal-transforms-1"
_LEAST_SHARE = 256  # samples
_MOST_SHARES = 256
_PATIENCE_S = 20.0  # without any share finished, before one in other hands is done again
_ATTEMPTS = 3
_POLL_S = 0.02
_PROGRESS_S = 5.0
_UNUSED_S = 30 * 86400.0  # after which a result goes
_LEFT_S = 86400.0  # after which the parts of a job that failed go

Work = Callable[[range], bytes]
Merge = Callable[[list[bytes]], bytes]


class PassJob(NamedTuple):
    """What is to be done: `work` on each share of the samples, then `merge` over the results.

    `key` names source and work; it is None if there is no way to name them, and then nothing is
    kept. `merge` gets the results in the order of the samples.
    """

    what: str
    key: str | None
    num_samples: int
    work: Work
    merge: Merge


def run_job(job: PassJob, workers: int = 1) -> bytes:
    """The result of the job: kept from an earlier run, or computed now by this many processes."""
    require_whole(workers, "workers")
    if workers < 1:
        raise UsageError(f"workers={workers}. At least 1 has to work.")
    if job.key is None and workers == 1:
        return job.merge([job.work(share) for share in split_samples(job.num_samples)])
    folder = cache_directory() / "transforms"
    try:
        if job.key is not None:
            return _work_out(job, folder, workers)
        with tempfile.TemporaryDirectory(prefix="shoal-") as passing:
            folder = Path(passing)
            return _work_out(job, folder, workers)
    except OSError as error:
        raise UsageError(
            f"the directory {folder} cannot be used: {error.strerror}. What is computed over a "
            "whole source is kept there; set $SHOAL_CACHE (and $TMPDIR) to directories that can "
            "be read and written."
        ) from error


def split_samples(num_samples: int) -> list[range]:
    """Neighbouring samples, in order: cut by their number alone, so that all cut alike."""
    size = max(_LEAST_SHARE, -(-num_samples // _MOST_SHARES))
    return [range(at, min(at + size, num_samples)) for at in range(0, num_samples, size)]


def _work_out(job: PassJob, folder: Path, workers: int) -> bytes:
    kept = folder / f"{job.what}-{job.key}.bin"
    place = folder / f"{job.what}-{job.key}.parts"
    for _ in range(_ATTEMPTS):
        found = _read(kept)
        if found is not None:
            with contextlib.suppress(OSError):  # it may be another user's
                os.utime(kept)
            return found
        place.mkdir(parents=True, exist_ok=True)
        claims = _JobShares(job, place, kept)
        with _extra_workers(claims, min(workers, len(claims.shares)) - 1):
            claims.work(0, shows_progress=True)
        parts = [_read(claims.path(number)) for number in range(len(claims.shares))]
        whole = [part for part in parts if part is not None]
        if len(whole) == len(parts):
            merged = job.merge(whole)
            write_hashed(kept, _MAGIC, merged)
            shutil.rmtree(place, ignore_errors=True)
            _sweep(folder)
            return merged
        # Another process was quicker and took the parts away, or one of them is damaged.
    raise UsageError(
        f"what was written to {folder} was not there or was damaged when it was read, "
        f"{_ATTEMPTS} times. Set $SHOAL_CACHE to a directory on a disk that keeps what it is given."
    )


class _JobShares:
    """The shares of a job, and who works on which."""

    def __init__(self, job: PassJob, place: Path, kept: Path):
        self.job, self.place, self.kept = job, place, kept
        self.shares = split_samples(job.num_samples)
        self.is_over = False  # the caller left, and no share is needed any more

    def path(self, number: int) -> Path:
        return self.place / f"{number:04}.bin"

    def work(self, first: int, shows_progress: bool = False) -> None:
        """Work until every share is done by someone, or another process kept the result."""
        count = len(self.shares)
        left = [(first + turn) % count for turn in range(count)]
        moved_at = said_at = time.monotonic()
        while left and not self.is_over and not self.kept.exists():
            before = len(left)
            overdue = time.monotonic() - moved_at > _PATIENCE_S
            number = next((number for number in left if self._try(number, overdue)), None)
            left = [other for other in left if other != number and not self.path(other).exists()]
            now = time.monotonic()
            if len(left) < before:
                moved_at = now
            else:
                time.sleep(_POLL_S)
            if shows_progress and now - said_at > _PROGRESS_S:
                said_at = now
                done = self.job.num_samples * (count - len(left)) // count
                log.info("%s: %d of %d samples", self.job.what, done, self.job.num_samples)

    def _try(self, number: int, overdue: bool) -> bool:
        """Do a share if no other process does it, or if that one makes no progress."""
        try:
            with self._claim(number) as is_mine:
                if self.path(number).exists():
                    return True
                if not is_mine and not overdue:
                    return False
                if not is_mine:
                    log.warning("%s: share %d is overdue; doing it here", self.job.what, number)
                part = self.job.work(self.shares[number])
                write_hashed(self.path(number), _MAGIC, part)
                return True
        except FileNotFoundError:
            if self.kept.exists():  # another process merged the parts and took them away
                return True
            raise

    @contextlib.contextmanager
    def _claim(self, number: int) -> Iterator[bool]:
        with open(self.place / f"{number:04}.lock", "ab") as file:
            yield try_lock(file)


@contextlib.contextmanager
def _extra_workers(claims: _JobShares, count: int) -> Iterator[None]:
    """Let extra workers work beside the caller, which never depends on them.

    They are forks, or threads where the process has some already, since then a fork is not safe.
    """
    firsts = [turn * len(claims.shares) // (count + 1) for turn in range(1, count + 1)]
    if threading.active_count() == 1:
        pids: list[int] = []
        try:
            for first in firsts:
                pids.append(_fork(claims, first))
            yield
        finally:
            for pid in pids:  # all shares are done, or the caller failed
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        return
    threads = [
        threading.Thread(target=_beside, args=(claims, first), name="shoal-share", daemon=True)
        for first in firsts
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        claims.is_over = True
        for thread in threads:
            thread.join(_PATIENCE_S)


def _fork(claims: _JobShares, first: int) -> int:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(parent)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        torch.set_num_threads(1)  # those of the parent are not there
        _beside(claims, first)
    finally:
        os._exit(0)


def _beside(claims: _JobShares, first: int) -> None:
    """Work beside the caller. What fails is left to the caller, which then meets the same error."""
    with contextlib.suppress(Exception):
        claims.work(first)


def _sweep(folder: Path) -> None:
    """Remove what was not used for long: results, parts of failed jobs, torn files."""
    now = time.time()
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another process may sweep too
            age_s = now - path.stat().st_mtime
            if path.suffix == ".parts":
                if age_s > _LEFT_S and not _is_in_work(path):
                    shutil.rmtree(path, ignore_errors=True)
            elif age_s > (_UNUSED_S if path.suffix == ".bin" else _LEFT_S):
                path.unlink()


def _is_in_work(place: Path) -> bool:
    """Whether a process holds a share of this job."""
    for lock in place.glob("*.lock"):
        with lock.open("ab") as file:
            if not try_lock(file):
                return True
    return False


def _read(path: Path) -> bytes | None:
    """What was written there; None if nothing was, or something else is there now."""
    try:
        body = read_hashed(path, _MAGIC)
    except FileNotFoundError:
        return None
    if body is not None:
        return bytes(body)
    log.warning("%s is damaged; it is computed again", path)
    path.unlink(missing_ok=True)
    return None
