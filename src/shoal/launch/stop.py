"""Stop a job through its engine, or a run that was not submitted by a signal to its process.

The process is the one that holds the lock of the run directory. Cost: a look every 0.2 s until it
has ended.
"""

import os
import signal
import time
from pathlib import Path

from shoal.cluster.engine import JobState
from shoal.errors import UsageError
from shoal.launch.engines import Job, state_of
from shoal.launch.run_status import RunStatus
from shoal.storage.run_dir import RunOwner, owner_of

LOOK_S = 0.2
AGAIN_S, KILL_S = 0.5, 5.0  # after the first signal, if a run is to end at once


def stop_job(job: Job, *, now: bool) -> tuple[JobState, RunStatus]:
    """Ask it to end, and wait until it has; how it stands then."""
    if state_of(job)[0].is_active:
        if job.engine is not None and job.record is not None:
            job.engine.stop(job.record.id, now=now)
        elif job.run_dir is not None and (owner := owner_of(job.run_dir)) is not None:
            _signal(job.run_dir, owner, now=now)
    while True:
        state, run = state_of(job)
        if not state.is_active or (job.engine is None and run.owner is None):
            return state, run
        time.sleep(LOOK_S)


def _signal(run_dir: Path, owner: RunOwner, *, now: bool) -> None:
    """One signal lets it save, a second one ends it; then it is killed."""
    if not owner.is_here:
        raise UsageError(
            f"The run in {run_dir} is of process {owner.pid} on {owner.host}. Stop it there."
        )
    sent_at = time.monotonic()
    try:
        os.kill(owner.pid, signal.SIGTERM)
        if not now:
            return
        while owner_of(run_dir) == owner and time.monotonic() < sent_at + AGAIN_S:
            time.sleep(0.02)
        if owner_of(run_dir) == owner:
            os.kill(owner.pid, signal.SIGTERM)
        while owner_of(run_dir) == owner and time.monotonic() < sent_at + KILL_S:
            time.sleep(0.02)
        if owner_of(run_dir) == owner:
            os.kill(owner.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    except PermissionError:
        raise UsageError(
            f"The run in {run_dir} is process {owner.pid} of another user, who alone may stop it."
        ) from None
