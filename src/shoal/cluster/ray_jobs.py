"""`shoal submit --on ray`: runs as jobs of a Ray cluster, which its dashboard shows.

The job is `shoal train ... --on ray` on Ray's first node; the working directory travels with it,
without `runs/`, up to a limit. Ray stops a job with one SIGTERM to all of its processes, at which
`shoal train` saves, and kills it after a time that the job carries (`RAY_JOB_STOP_WAIT_TIME_S`).
It then forgets the exit code, so the command prints it as its last line. Ray has no order to kill a
job, no limits of time and no priorities: the first is done by another job on the same node, the
others are refused. Read next: `engine.py`; `on_ray.py`, for what the job starts.
"""

import asyncio
import logging
import os
import secrets
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from shoal.cluster.engine import JobRequest, JobState, State
from shoal.cluster.on_ray import RayPlace, parse_place
from shoal.cluster.ray_process import probe
from shoal.errors import RUN_AGAIN, UsageError, require
from shoal.formatting import in_units

CONNECT_S = 10.0
STOP_S = 600  # for a job to save and end
MOST_BYTES = 100 << 20  # of the working directory
EXCLUDED = ("runs", ".git", ".venv", "venv", "__pycache__", ".mypy_cache", ".pytest_cache")
_RUN_DIR, _NAME = "shoal_run_dir", "job_name"  # in the metadata of a job; Ray shows the latter
_JOB = "SHOAL_RAY_JOB"  # in the environment of a job's processes
_EXIT_LINE = "shoal: exit code "


class RayEngine:
    """Runs as jobs of Ray."""

    def __init__(self, address: str):
        """`address` is what follows `ray:`."""
        self._place = parse_place(address)
        self._name = f"ray:{address}" if address else "ray"  # as `--on` has it
        require("ray", extra="ray")
        self._connection: Any = None

    def describe(self, request: JobRequest) -> str:
        return (
            f"a job of {self._place.name}, with the files of {request.directory}:\n"
            f"  {shlex.join(['shoal', 'train', *request.arguments])}"
        )

    def submit(self, request: JobRequest) -> str:
        if request.time_limit_s is not None or request.priority:
            raise UsageError(
                f"{'--time' if request.time_limit_s is not None else '--priority'}: jobs of Ray "
                "have neither limits of time nor priorities. Leave it out."
            )
        refuse_large(Path(request.directory))
        job = f"shoal-{secrets.token_hex(5)}"
        with _as_usage_error(self._place):
            self._client.submit_job(
                entrypoint=entrypoint(job, request.arguments),
                submission_id=job,
                metadata={_RUN_DIR: request.run_dir, _NAME: request.name},
                runtime_env={
                    "working_dir": request.directory,
                    "excludes": [f"{name}/" for name in EXCLUDED],
                    "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_S)},
                },
            )
        return job

    def state(self, job: str) -> JobState:
        return self._state_of(self._find(job))

    def jobs(self) -> list[JobState]:
        with _as_usage_error(self._place):
            found = [one for one in self._client.list_jobs() if _RUN_DIR in (one.metadata or {})]
        order = {"running": 0, "queued": 1}
        known = [self._state_of(one) for one in sorted(found, key=lambda one: one.start_time or 0)]
        return sorted(known, key=lambda one: order.get(one.state, 2))

    def stop(self, job: str, *, now: bool) -> None:
        found = self._find(job)
        if found.status.is_terminal():
            return
        with _as_usage_error(self._place):
            self._client.stop_job(job)
            if now and found.status == "RUNNING":
                self._client.submit_job(
                    entrypoint=_python(f"-P -m shoal.cluster.ray_jobs {job}"),
                    submission_id=f"{job}-kill-{secrets.token_hex(2)}",
                )

    def output(self, job: str, *, follow: bool) -> Iterator[str]:
        self._find(job)
        with _as_usage_error(self._place):
            if follow:
                parts = _in_turn(self._client.tail_job_logs(job))
            else:
                parts = iter([self._client.get_job_logs(job)])
            rest = ""
            for text in parts:
                *lines, rest = (rest + text).split("\n")
                yield from (line for line in lines if not _is_rays_own(line))
            yield from [rest] if rest else []

    @property
    def _client(self) -> Any:
        if self._connection is None:
            probe(self._place.address, CONNECT_S)
            os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "error")  # or it prints
            jobs = require("ray.job_submission", extra="ray")
            for name in ("ray", "ray.dashboard.modules.dashboard_sdk"):
                logging.getLogger(name).setLevel(logging.ERROR)
            with _without_address(self._place.address != "auto"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._connection = jobs.JobSubmissionClient(self._place.address)
        return self._connection

    def _find(self, job: str) -> Any:
        with _as_usage_error(self._place):
            found = {one.submission_id: one for one in self._client.list_jobs()}
        if job not in found or _RUN_DIR not in (found[job].metadata or {}):
            raise UsageError(f"{self._place.name} knows no job {job!r}. `shoal queue` lists them.")
        return found[job]

    def _state_of(self, found: Any) -> JobState:
        printed = None
        if found.status == "STOPPED":
            with suppress(RuntimeError):
                printed = printed_exit_code(self._client.get_job_logs(found.submission_id))
        state, code = job_state(str(found.status.value), found.driver_exit_code, printed)
        reason = last_words(found.message or "") if state in ("failed", "queued") else ""
        return JobState(
            job=f"{self._name}:{found.submission_id}",
            state=state,
            run_dir=found.metadata[_RUN_DIR],
            name=found.metadata.get(_NAME, ""),
            exit_code=code,
            reason=reason,
        )


def job_state(status: str, exit_code: int | None, printed: int | None) -> tuple[State, int | None]:
    """Ray's status of a job in our words, and its exit code: as Ray knows it, else as `printed`.
    One that saved and can go on is stopped, however it came to that. Pure."""
    code = printed if exit_code is None else exit_code
    match status:
        case "PENDING":
            return "queued", None
        case "RUNNING":
            return "running", None
        case "SUCCEEDED":
            return "done", 0
        case "STOPPED" if code == 0:
            return "done", 0
        case "STOPPED":
            return "stopped", code
    return ("stopped", code) if code == RUN_AGAIN else ("failed", 1 if code is None else code)


def entrypoint(job: str, arguments: tuple[str, ...]) -> str:
    """The shell command of a job. The shell waits at SIGTERM, which the command gets too. Pure."""
    command = _python(shlex.join(["-P", "-m", "shoal", "train", *arguments]))
    return (
        f"trap : TERM INT; export {_JOB}={job}; {command}; "
        f'code=$?; echo "{_EXIT_LINE}$code"; exit $code'
    )


def _python(words: str) -> str:
    """With the Python that submits, if that is there too."""
    own = shlex.quote(sys.executable)
    return f"if [ -x {own} ]; then {own} {words}; else python {words}; fi"


def printed_exit_code(output: str) -> int | None:
    """The exit code that a job printed last. Pure."""
    for line in reversed(output.splitlines()[-5:]):
        if line.startswith(_EXIT_LINE) and line.removeprefix(_EXIT_LINE).isdigit():
            return int(line.removeprefix(_EXIT_LINE))
    return None


def last_words(message: str) -> str:
    """Of what Ray says of a job, which ends with the job's output if that failed. Pure."""
    lines = [line.strip() for line in message.splitlines()]
    return next((one for one in reversed(lines) if one and not one.startswith(_EXIT_LINE)), "")


def _is_rays_own(line: str) -> bool:
    """Whether Ray wrote it before the command began."""
    return line.startswith("Running entrypoint for job ") or " job_manager.py:" in line


def refuse_large(directory: Path) -> None:
    """UsageError if more than the limit would travel."""
    total, largest = 0, (0, "")
    for place, folders, files in os.walk(directory):
        folders[:] = [name for name in folders if name not in EXCLUDED]
        for name in files:
            path = os.path.join(place, name)
            with suppress(OSError):
                size = os.lstat(path).st_size
                total, largest = total + size, max(largest, (size, path))
        if total > MOST_BYTES:
            raise UsageError(
                f"{directory} holds more than {in_units(MOST_BYTES)}, and travels with the "
                f"job: {largest[1]} alone has {in_units(largest[0])}. Submit from a directory "
                "with the recipe and its small files, and keep data where all nodes see it."
            )


@contextmanager
def _as_usage_error(place: RayPlace) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ConnectionError, ValueError, OSError) as error:
        why = "".join(str(error).strip().splitlines()[:1])[:400].rstrip(".")
        raise UsageError(
            f"{place.name} cannot be asked: {why}. Its dashboard must run "
            "(`ray start --head` starts it), and --on ray:HOST:PORT or RAY_ADDRESS names it."
        ) from error


@contextmanager
def _without_address(is_given: bool) -> Iterator[None]:
    """Ray prefers these variables to an address that is given."""
    names = ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS") if is_given else ()
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(before)


def _in_turn(parts: Any) -> Iterator[str]:
    """An asynchronous iterator, waited for here."""
    with asyncio.Runner() as runner:
        try:
            while True:
                yield runner.run(anext(parts))
        except StopAsyncIteration:
            return
        finally:
            runner.run(parts.aclose())


def kill_job(job: str) -> int:
    """Kill the processes of a job on this machine: how many they were. The shell that began them
    does not have the variable itself, and is left to say how they ended."""
    own = os.getpid()
    killed = 0
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != own and process.environ().get(_JOB) == job:
                process.send_signal(signal.SIGKILL)
                killed += 1
    return killed


if __name__ == "__main__":
    sys.exit(kill_job(sys.argv[1]) == 0)
