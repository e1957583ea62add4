"""The record of a job in its run directory: which engine has it, and under which id.

`shoal submit` makes the run directory and writes `job.json` there, so that the other verbs find the
job by its directory, and that a directory is not submitted twice. While it does so it holds a lock
that the kernel releases when it ends, however it ends.

Read next: `engines.py`, which finds the engine of a job.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from shoal.errors import UsageError
from shoal.storage.decoding import decode_json, encode_json
from shoal.storage.files import read_regular_file, write_atomic

JOB, OUTPUT = "job.json", "output.log"
MOST_BYTES = 1 << 20


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Which job a run directory belongs to."""

    on: str  # as `--on` names the engine
    id: str
    name: str = ""

    @property
    def job(self) -> str:
        return f"{self.on}:{self.id}"


def read_job(run_dir: Path) -> JobRecord | None:
    """The record in a run directory; None if no job was submitted with it."""
    try:
        content = read_regular_file(run_dir / JOB, MOST_BYTES)
    except OSError:
        return None
    return _decode(content, run_dir)


def write_job(run_dir: Path, record: JobRecord) -> None:
    write_atomic(run_dir / JOB, msgspec.json.format(encode_json(record), indent=2) + b"\n")


@contextmanager
def claimed(run_dir: Path) -> Iterator[JobRecord | None]:
    """Keep other submits away from a run directory; yields the record of an earlier one.

    The file is empty until `write_job`, and gone if that is not called.
    """
    path = run_dir / JOB
    with open(path, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"{run_dir} is being submitted by another command. Two jobs cannot share a run "
                "directory; choose another with --run-dir DIR."
            ) from None
        file.seek(0)
        try:
            yield _decode(file.read(MOST_BYTES), run_dir)
        finally:
            with suppress(OSError):
                if path.stat().st_size == 0:
                    os.unlink(path)


def _decode(content: bytes, run_dir: Path) -> JobRecord | None:
    if not content:
        return None
    way_out = "Remove it if no engine has the job."
    return decode_json(content, JobRecord, str(run_dir / JOB), way_out=way_out)
