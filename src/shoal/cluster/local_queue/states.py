"""What commands are shown of the jobs of the local queue. Pure."""

from shoal.cluster.engine import JobState
from shoal.cluster.local_queue.journal import QueuedEntry, QueueState
from shoal.formatting import plural


def list_jobs(state: QueueState, num_cores: int) -> tuple[JobState, ...]:
    """Jobs in the order of their turn: those that run, those that wait, and those that ended, the
    newest first."""
    running = [entry for entry in state.jobs.values() if entry.state == "running"]
    queued = [entry for entry in state.jobs.values() if entry.state == "queued"]
    queued.sort(key=lambda entry: (-entry.request.priority, entry.job))
    ended = [entry for entry in reversed(state.jobs.values()) if not entry.is_active]
    num_free = max(0, num_cores - sum(len({*one.cores, *one.resizing}) for one in running))
    waits = [
        _shown(entry, why_it_waits(entry, num_free, num_cores, num_before))
        for num_before, entry in enumerate(queued)
    ]
    return (
        *(_shown(entry, _how_it_runs(entry)) for entry in running),
        *waits,
        *(_shown(entry, entry.reason) for entry in ended),
    )


def why_it_waits(entry: QueuedEntry, num_free: int, num_cores: int, num_before: int) -> str:
    needed = min(entry.request.cores or num_cores, num_cores)
    cores = f"needs {plural(needed, 'core')}, and {num_free} of {num_cores} are free"
    return f"{cores}; {plural(num_before, 'job')} before it" if num_before else cores


def _how_it_runs(entry: QueuedEntry) -> str:
    told = f"on {plural(len(entry.cores), 'core')}"
    if entry.stop is not None:
        return f"{told}; is to end"
    if entry.resizing:
        return f"{told}; is to have {len(entry.resizing)}"
    return told


def _shown(entry: QueuedEntry, reason: str) -> JobState:
    return JobState(
        job=f"local:{entry.job}",
        state=entry.state,
        run_dir=entry.request.run_dir,
        name=entry.request.name,
        priority=entry.request.priority,
        exit_code=entry.exit_code,
        reason=reason,
    )
