"""The queue of this machine as an engine: what `--on local` of `shoal submit` means.

For machines without Slurm, Ray or Kubernetes. Each user has a queue of his own on each host; queues
of several users do not know of each other (`shoal queue --limit cores=N` keeps one small). Read
next: `protocol.py`, for how the agent is found; `policy.py`, for who runs when.
"""

import os
import secrets
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from shoal.cluster.engine import JobRequest, JobState
from shoal.cluster.local_queue.job_process import OUTPUT
from shoal.cluster.local_queue.journal import QueueLimits, read_journal
from shoal.cluster.local_queue.protocol import (
    JOURNAL,
    QueueReply,
    QueueRequest,
    ask_agent,
    connect,
    make_queue_directory,
)
from shoal.cluster.local_queue.states import list_jobs
from shoal.cluster.log_tail import follow_file
from shoal.errors import UsageError, sendable
from shoal.formatting import plural
from shoal.world import cores


class LocalQueue:
    """The queue of this user on this host."""

    def describe(self, request: JobRequest) -> str:
        _refuse_hosts(request)
        asked = request.cores or cores()
        told = f"# {plural(asked, 'core')}, priority {request.priority}"
        if request.time_limit_s is not None:
            told += f", at most {request.time_limit_s:.0f} s"
        words = shlex.join(["shoal", "train", *request.arguments])
        return f"{told}\ncd {shlex.quote(request.directory)}\n{words}"

    def submit(self, request: JobRequest) -> str:
        _refuse_hosts(request)
        asked = QueueRequest(
            ask="submit",
            request=request,
            python=sys.executable,
            token=secrets.token_hex(16),
            environment=_environment(),
        )
        return str(ask_agent(make_queue_directory(), asked).job)

    def state(self, job: str) -> JobState:
        for found in self.jobs():
            if found.job == f"local:{job}":
                return found
        raise UsageError(f"There is no job local:{job}. `shoal queue --all` lists them.")

    def jobs(self) -> list[JobState]:
        return list(self._ask(QueueRequest(ask="jobs")).jobs)

    def stop(self, job: str, *, now: bool) -> None:
        if self.state(job).is_active:
            ask_agent(make_queue_directory(), QueueRequest(ask="stop", job=int(job), now=now))

    def limits(self, changes: dict[str, str]) -> QueueLimits:
        """Change limits, and what they are then."""
        directory = make_queue_directory()
        if changes:
            ask_agent(directory, QueueRequest(ask="limits", limits=changes))
        return read_journal(directory / JOURNAL).limits

    def output(self, job: str, *, follow: bool) -> Iterator[str]:
        """Of output.log in the run directory."""
        path = Path(self.state(job).run_dir) / OUTPUT
        return follow_file(path, lambda: not (follow and self.state(job).is_active))

    def _ask(self, request: QueueRequest) -> QueueReply:
        """Of the agent, or of the journal if there is nothing that an agent would do."""
        directory = make_queue_directory()
        connection = connect(directory)
        if connection is not None:
            connection.close()
            return ask_agent(directory, request)
        state = read_journal(directory / JOURNAL)
        if state.active:
            return ask_agent(directory, request)
        return QueueReply(jobs=list_jobs(state, cores()))


def _refuse_hosts(request: JobRequest) -> None:
    if request.num_hosts > 1:
        raise UsageError(
            f"--nodes {request.num_hosts}: the local queue is of one machine. Leave --nodes out, "
            "or choose an engine of several with --on."
        )


def _environment() -> dict[str, str]:
    """The environment of this command, without what UTF-8 has no bytes for."""
    return {name: text for name, text in os.environ.items() if sendable(name + text) == name + text}
