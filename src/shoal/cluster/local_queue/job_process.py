"""The process of a job: how it is started so that no job ever runs twice, and how it ended.

The process first waits for a byte. The agent writes its number and start time to the journal, and
then sends that byte: whatever the agent dies of, a job that trains is one that the journal knows,
and one that it does not know leaves without having done anything. The last word of a job is a file
with its exit code, since an agent that was started later is not its parent and gets no status.

Read next: `shoal/cli/job.py`, which is what runs there.
"""

import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from shoal.cluster.engine import State
from shoal.cluster.local_queue.journal import QueuedEntry, StopAsked
from shoal.errors import RUN_AGAIN, UsageError
from shoal.plans.plan import Plan
from shoal.plans.resize import resize_plan
from shoal.storage.decoding import encode_json, try_decode_json
from shoal.storage.files import read_regular_file, write_private
from shoal.storage.run_dir import MOST_DESCRIPTION_BYTES, RUN
from shoal.system.processes import describe_exit

OUTPUT = "output.log"
MOST_EVENT_BYTES = 1 << 20  # of the end of events.jsonl


class JobEnd(msgspec.Struct, frozen=True):
    """The last word of a job."""

    exit_code: int | None
    has_begun: bool = True


class JobFiles(NamedTuple):
    """What the queue keeps of a job while it waits and runs, for its user alone."""

    directory: Path
    job: int

    @property
    def end(self) -> Path:
        return self.directory / f"{self.job}.end"

    @property
    def environment(self) -> Path:
        return self.directory / f"{self.job}.environment"

    def write_environment(self, environment: Mapping[str, str]) -> None:
        write_private(self.environment, encode_json(dict(environment)), replace=True)

    def read_environment(self) -> dict[str, str]:
        with suppress(OSError):
            content = self.environment.read_bytes()
            return try_decode_json(content, dict[str, str]) or dict(os.environ)
        return dict(os.environ)

    def read_end(self) -> JobEnd | None:
        with suppress(OSError):
            return try_decode_json(self.end.read_bytes(), JobEnd)
        return None

    def remove(self) -> None:
        for path in (self.end, self.environment):
            path.unlink(missing_ok=True)


def spawn(entry: QueuedEntry, cores: tuple[int, ...], files: JobFiles) -> subprocess.Popen[bytes]:
    """Start the process, which waits for `release`. OSError says why it cannot be."""
    files.end.unlink(missing_ok=True)
    request = entry.request
    with open(Path(request.run_dir) / OUTPUT, "ab") as output:
        return subprocess.Popen(
            [
                *(entry.python, "-P", "-m", "shoal.cli.job"),
                *(str(files.end), ",".join(map(str, cores)), *request.arguments),
            ],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=request.directory,
            env=files.read_environment(),
        )


def release(child: subprocess.Popen[bytes], *, go: bool) -> None:
    """Let it train, or leave."""
    assert child.stdin is not None
    with suppress(OSError):  # it has ended already
        if go:
            child.stdin.write(b"g")
        child.stdin.close()


def judge_end(
    exit_code: int | None, asked: StopAsked | None, time_limit_s: float | None
) -> tuple[State, str]:
    """The state of a job that ended, and why. Pure."""
    late = f"it reached its time limit of {time_limit_s or 0:.0f} s"
    if exit_code == 0:
        return "done", ""
    if exit_code == RUN_AGAIN:
        return "stopped", late if asked is not None and asked.is_late else "it was asked to stop"
    if asked is not None and asked.is_late:
        return "failed", f"{late}, and {_how(exit_code)}"
    if asked is not None:
        told = "it was to end at once" if asked.now else "it was asked to stop"
        return "stopped", f"{told}, and {_how(exit_code)}"
    if exit_code is None:
        return "failed", "it ended while no agent watched, and left no exit code"
    return "failed", f"it {_how(exit_code)}; `shoal logs` shows what it printed"


def _how(exit_code: int | None) -> str:
    """How a process ended that may or may not have saved before."""
    if exit_code is None:
        return "left no exit code"
    return describe_exit(exit_code if exit_code < 128 else 128 - exit_code)


class _RunLine(msgspec.Struct, frozen=True):
    """What is read of run.json."""

    plan: str = ""


class _ResizedLine(msgspec.Struct, frozen=True):
    """What is read of a line of events.jsonl."""

    event: str = ""
    plan: str = ""


def sizes_of(run_dir: Path) -> tuple[int, ...] | None:
    """The numbers of ranks that a run can have up to those it began with, in rising order; None as
    long as it has made no step."""
    with suppress(OSError):
        if not (run_dir / "metrics.jsonl").stat().st_size:
            return None
        found = try_decode_json(read_regular_file(run_dir / RUN, MOST_DESCRIPTION_BYTES), _RunLine)
        return None if found is None else sizes_of_plan(found.plan)
    return None


def sizes_of_plan(text: str) -> tuple[int, ...]:
    """The same of a plan. Pure."""
    plan = Plan.parse(text)
    sizes = []
    for data in range(1, plan.num_ranks):
        with suppress(UsageError):
            sizes.append(resize_plan(plan, f"data={data}").num_ranks)
    return (*sizes, plan.num_ranks)


def num_ranks_now(run_dir: Path) -> int | None:
    """How many ranks a run has, after its last resize; None if it does not say."""
    with suppress(OSError, UsageError):
        found = try_decode_json(read_regular_file(run_dir / RUN, MOST_DESCRIPTION_BYTES), _RunLine)
        plan = "" if found is None else found.plan
        with open(run_dir / "events.jsonl", "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - MOST_EVENT_BYTES))
            for line in file:
                event = try_decode_json(line, _ResizedLine)
                if event is not None and event.event == "resized":
                    plan = event.plan
        return Plan.parse(plan).num_ranks
    return None
