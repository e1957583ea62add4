"""What queues and starts whole runs: the local queue, Slurm, Ray, Kubernetes.

An engine takes the command line of a `shoal train`, runs it when there is room, and can say what
became of it. It knows nothing of ranks: where a run's processes start is a `Backend`'s business,
which the command line names again (`--on slurm`). `shoal submit`, `status`, `logs`, `stop` and
`queue` are the same words over all of them. `shoal.testing.engines` has the tests that each must
pass. Read next: `launch/engines.py`, for their names.
"""

from collections.abc import Iterator
from typing import Literal, Protocol

import msgspec

State = Literal["queued", "running", "stopped", "done", "failed"]


class JobRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A run to start when there is room."""

    name: str  # for people
    arguments: tuple[str, ...]  # what follows `shoal train`; with --run-dir and --resume
    directory: str  # to run it in
    run_dir: str  # absolute
    num_hosts: int = 1
    cores: int = 1  # of each host; 0: all that one has
    time_limit_s: float | None = None
    priority: int = 0  # larger goes first


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine knows of a job; the run directory knows the rest."""

    job: str  # `engine:id`
    state: State
    run_dir: str = ""
    name: str = ""
    priority: int = 0
    exit_code: int | None = None  # once it has ended
    reason: str = ""  # why it waits, or why it failed

    @property
    def is_active(self) -> bool:
        """Whether it waits or runs."""
        return self.state in ("queued", "running")


class Engine(Protocol):
    """Queues runs and starts them. A job is named by the id that `submit` returned; each method
    raises UsageError for an id that the engine does not know."""

    def describe(self, request: JobRequest) -> str:
        """What would be submitted, as a person reads it: a batch file, a manifest, a command."""
        ...

    def submit(self, request: JobRequest) -> str:
        """The id of the job that was accepted."""
        ...

    def state(self, job: str) -> JobState: ...

    def jobs(self) -> list[JobState]:
        """The jobs of this user that the engine still knows, in the order of their turn."""
        ...

    def stop(self, job: str, *, now: bool) -> None:
        """Ask a job to save and end; `now` ends it at once."""
        ...

    def output(self, job: str, *, follow: bool) -> Iterator[str]:
        """The lines that the command printed, for jobs whose run directory is out of sight."""
        ...
