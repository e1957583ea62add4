"""The queue of this machine, for those without an engine."""

from collections.abc import Iterator

from shoal.cluster.engine import JobRequest, JobState
from shoal.errors import UsageError


class LocalQueue:
    """Not there yet."""

    def describe(self, request: JobRequest) -> str:
        return " ".join(["shoal", "train", *request.arguments])

    def submit(self, request: JobRequest) -> str:
        raise UsageError("The local queue is not there yet.")

    def state(self, job: str) -> JobState:
        raise UsageError(f"There is no job local:{job}.")

    def jobs(self) -> list[JobState]:
        return []

    def stop(self, job: str, *, now: bool) -> None:
        raise UsageError(f"There is no job local:{job}.")

    def output(self, job: str, *, follow: bool) -> Iterator[str]:
        raise UsageError(f"There is no job local:{job}.")
