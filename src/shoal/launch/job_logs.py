"""The lines that a job or one of its ranks has printed, as they come.

They are read from the run directory where it is in sight, and else asked of the engine. A rank that
was replaced goes on in another file, which is followed too. Cost: a look every 0.2 s.
"""

import time
from collections.abc import Iterator
from pathlib import Path

from shoal.cluster.log_tail import LOOK_S, LogTail
from shoal.errors import UsageError
from shoal.launch.engines import Job, state_of
from shoal.launch.jobs import OUTPUT
from shoal.launch.run_status import log_of, read_run


def lines_of(job: Job, *, rank: int | None, follow: bool) -> Iterator[str]:
    """Each line without its end; with `follow` until the job has ended."""
    if job.run_dir is None or (rank is None and job.engine is not None and not _has_output(job)):
        if rank is not None or job.engine is None or job.record is None:
            raise UsageError(f"The logs of {job.name} are not in sight of this machine.")
        yield from job.engine.output(job.record.id, follow=follow)
        return
    if rank is None and job.engine is None:
        rank = 0
    tails: dict[Path, LogTail] = {}
    while True:
        is_over = not follow or not state_of(job)[0].is_active
        path = _path(job.run_dir, rank)
        if path is not None:
            tails.setdefault(path, LogTail(path))
        for tail in tails.values():
            yield from tail.more(is_over=is_over)
        if is_over:
            if not tails:
                raise _no_log(job, rank)
            return
        time.sleep(LOOK_S)


def _has_output(job: Job) -> bool:
    return job.run_dir is not None and (job.run_dir / OUTPUT).exists()


def _path(run_dir: Path, rank: int | None) -> Path | None:
    if rank is None:
        return run_dir / OUTPUT
    return log_of(run_dir, read_run(run_dir), rank)


def _no_log(job: Job, rank: int | None) -> UsageError:
    which = "The command" if rank is None else f"Rank {rank}"
    return UsageError(f"{which} of {job.name} has no log yet. `shoal status {job.name}` says more.")
