"""What queues whole runs, by the name that `shoal submit --on` takes; and where a job is found.

An engine (`cluster/engine.py`) is one line in ENGINES: its name, and the function that makes it
from what follows the name, as in `ray://address`. Modules of engines are loaded when one is asked
for. A JOB, as the verbs take it, is a run directory or `engine:id`.

Read next: `jobs.py`, for what lies in a run directory; `run_status.py`, for what a run says of
itself.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from shoal.cluster.engine import Engine, JobState
from shoal.errors import UsageError, nearest
from shoal.launch.jobs import JobRecord, read_job
from shoal.launch.run_status import RunStatus, read_run
from shoal.storage.run_dir import RUN, owner_of


class EngineEntry(NamedTuple):
    """How an engine is made, and what `--on` its runs are started with."""

    make: Callable[[str], Engine]
    run_on: Callable[[str], str] = lambda on: on


class Job(NamedTuple):
    """A job that a verb was asked about: of an engine, or a run that was not submitted."""

    engine: Engine | None
    record: JobRecord | None
    run_dir: Path | None  # None if it is out of sight

    @property
    def name(self) -> str:
        return self.record.job if self.record is not None else str(self.run_dir)


def parse_on(on: str) -> tuple[str, str]:
    """The name of an engine that there is, and what follows it."""
    name, _, address = on.partition(":")
    if name not in ENGINES:
        raise UsageError(f"--on {on}: there is no such engine. {nearest(name, ENGINES)}")
    return name, address


def make_engine(on: str) -> Engine:
    name, address = parse_on(on)
    return ENGINES[name].make(address)


def run_on(on: str) -> str:
    """What `--on` the command line of a job has."""
    return ENGINES[parse_on(on)[0]].run_on(on)


def find_job(text: str) -> Job:
    """The job of a run directory or of `engine:id`; UsageError if there is none."""
    path = Path(text)
    if path.is_dir():
        record = read_job(path)
        if record is not None:
            return Job(make_engine(record.on), record, path)
        if not (path / RUN).exists() and owner_of(path) is None:
            raise UsageError(
                f"{text} holds no run, and no job was submitted with it. Give the directory of "
                "one, as in runs/name-1, or engine:id, as `shoal queue` shows it."
            )
        return Job(None, None, path)
    on, colon, number = text.rpartition(":")
    if not colon or not on or not number or on.partition(":")[0] not in ENGINES:
        raise UsageError(
            f"There is no job {text}. Give a run directory, or engine:id, as `shoal queue` shows "
            f"it; engines are {', '.join(ENGINES)}."
        )
    engine = make_engine(on)
    state = engine.state(number)
    run_dir = Path(state.run_dir) if state.run_dir else None
    record = JobRecord(on=on, id=number, name=state.name)
    return Job(engine, record, run_dir if run_dir is not None and run_dir.is_dir() else None)


def state_of(job: Job) -> tuple[JobState, RunStatus]:
    """What the engine knows of a job, and what its run directory says."""
    status = RunStatus() if job.run_dir is None else read_run(job.run_dir)
    if job.engine is not None and job.record is not None:
        return job.engine.state(job.record.id), status
    state = JobState(
        job=str(job.run_dir),
        state=status.state,
        run_dir=str(job.run_dir),
        name=status.recipe,
        reason=status.reason,
    )
    return state, status


def _local(address: str) -> Engine:
    from shoal.cluster.local_queue.engine import LocalQueue

    if address:
        raise UsageError(f"--on local:{address}: local is this machine, and takes no address.")
    return LocalQueue()


def _slurm(address: str) -> Engine:
    from shoal.cluster.on_slurm import SlurmEngine

    return SlurmEngine(address)


def _kubernetes(address: str) -> Engine:
    from shoal.cluster.on_kubernetes import KubernetesEngine

    return KubernetesEngine(address)


def _ray(address: str) -> Engine:
    from shoal.cluster.ray_jobs import RayEngine

    return RayEngine(address)


def _inside_of_ray(on: str) -> str:
    from shoal.cluster.on_ray import inside_of

    return inside_of(on.partition(":")[2])


ENGINES: dict[str, EngineEntry] = {
    "local": EngineEntry(_local),
    "slurm": EngineEntry(_slurm, lambda on: "slurm"),
    "kubernetes": EngineEntry(_kubernetes, lambda on: "kubernetes"),
    "ray": EngineEntry(_ray, _inside_of_ray),
}
