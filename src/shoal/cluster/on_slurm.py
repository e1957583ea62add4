"""Runs on Slurm: jobs through sbatch, and host agents through srun.

`SlurmEngine` submits a run as a batch job and asks squeue what became of it; Slurm keeps the queue,
the priorities and the limits, so nothing of ours runs meanwhile. A job is known by the name of its
batch file, in the run directory. After some minutes (MinJobAge) Slurm forgets jobs that have ended;
then sacct answers, where there is accounting, and else the run directory alone.

`SlurmStarter` starts the agents of a run inside an allocation. Cost: a process of srun for each
other node, as long as the run lasts. Read next: `slurm_batch.py`, for what is submitted.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from shoal.cluster.agent_starter import AGENT_COMMAND
from shoal.cluster.engine import JobRequest, JobState
from shoal.cluster.log_tail import follow_file
from shoal.cluster.slurm_batch import (
    BATCH_FILE,
    COLUMNS,
    NICE_STEP,
    OUTPUT_FILE,
    batch_file,
    job_state,
    meaning,
    parse_options,
    parse_row,
)
from shoal.errors import UsageError
from shoal.storage.files import write_atomic

ANSWER_S = 90.0  # for a command of Slurm; one that cannot reach slurmctld tries again meanwhile
STATE_S = 3.0  # between two questions about a job whose log is followed
LEAVE_S = 5.0  # for agents to end by themselves, once the run has ended
TAIL_BYTES = 2000
SACCT = ("State", "ExitCode", "JobName", "SubmitLine")
# What srun, started inside a step, would take over from that step.
OF_THE_STEP = ("SLURM_CPU_BIND", "SLURM_MEM_BIND", "SLURM_DISTRIBUTION", "SLURM_GPUS_PER_TASK")


class SlurmEngine:
    """Runs as batch jobs of Slurm. `address` holds options of sbatch: partition=gpu,account=lab."""

    def __init__(self, address: str = "", python: str = sys.executable):
        self._options, self._python = parse_options(address), python

    def describe(self, request: JobRequest) -> str:
        return batch_file(request, self._python, self._options)

    def submit(self, request: JobRequest) -> str:
        text = self.describe(request)
        run_dir = Path(request.run_dir)
        for known in self.jobs():
            if known.run_dir == request.run_dir and known.is_active:
                raise UsageError(
                    f"{request.run_dir} belongs to {known.job}, which is {known.state}. Stop that "
                    "job, or give another --run-dir."
                )
        path = run_dir / BATCH_FILE
        made = not run_dir.exists()
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text.encode())
        except OSError as error:
            raise UsageError(f"{path} cannot be written: {error.strerror}.") from error
        hold = ["--hold"] if request.priority > 0 else []
        try:
            answer = self._ask_for(request, *hold, str(path))
            number = answer.strip().partition(";")[0]
            if hold:
                self._release(number, request.priority)
        except UsageError:
            path.unlink(missing_ok=True)
            if made:
                with suppress(OSError):
                    run_dir.rmdir()
            raise
        return number

    def state(self, job: str) -> JobState:
        number = job_number(job)
        rows = []
        with suppress(_UnknownJob):
            rows = _rows("--jobs", number)
        for row in rows:
            if os.path.basename(row["Command"]) != BATCH_FILE:
                raise UsageError(f"Job {number} of Slurm was not submitted by `shoal submit`.")
            return job_state(row)
        return _from_accounting(number)

    def jobs(self) -> list[JobState]:
        rows = _rows("--sort=-p,i")
        ours = [job_state(row) for row in rows if os.path.basename(row["Command"]) == BATCH_FILE]
        return sorted(ours, key=lambda job: (not job.is_active, job.state == "queued"))

    def stop(self, job: str, *, now: bool) -> None:
        found = self.state(job)
        number = job_number(job)
        if not found.is_active:
            return
        # Without its right to be requeued, a job that saves and exits is not begun again.
        ask("scontrol", "update", f"jobid={number}", "requeue=0")
        if now or found.state == "queued":
            ask("scancel", number)
        else:
            ask("scancel", "--signal=TERM", "--batch", number)

    def output(self, job: str, *, follow: bool) -> Iterator[str]:
        found = self.state(job)
        path = Path(found.run_dir) / OUTPUT_FILE
        return follow_file(path, lambda: not (follow and self.state(job).is_active), STATE_S)

    def _ask_for(self, request: JobRequest, *words: str) -> str:
        """What sbatch answers; if it refuses, with what was asked and what is there."""
        try:
            return ask("sbatch", "--parsable", *words)
        except UsageError as error:
            there = ", ".join(ask("sinfo", "-h", "--format=%D of %c CPUs in %R").splitlines())
            asked = f"nodes {request.num_hosts}, cores of each {request.cores or 'all'}"
            raise UsageError(f"{error} Asked for: {asked}. Nodes there: {there}.") from error

    def _release(self, number: str, priority: int) -> None:
        """Let a job go that was held until it is known whether Slurm honours its priority."""
        (row,) = _rows("--jobs", number)
        if row["Nice"] != str(-priority * NICE_STEP):
            ask("scancel", number)
            raise UsageError(
                f"--priority {priority}: Slurm lets only its operators raise a priority. Leave it "
                "out, lower that of other jobs (--priority -1), or name a partition or QOS that "
                "goes first: --on slurm:partition=NAME, --on slurm:qos=NAME."
            )
        ask("scontrol", "release", number)


class SlurmStarter:
    """Starts agents by srun, on the nodes of the allocation that this process is in."""

    def __init__(self, environment: Mapping[str, str] = os.environ):
        self._here = environment.get("SLURMD_NODENAME", "")
        nodes = environment.get("SLURM_JOB_NODELIST", "")
        if not environment.get("SLURM_JOB_ID") or not nodes:
            raise UsageError(
                "--on slurm: this is not inside an allocation of Slurm. Queue the run with `shoal "
                "submit RECIPE --on slurm --nodes N`, or take nodes first: salloc --nodes=N "
                "--ntasks-per-node=1 shoal train RECIPE --on slurm."
            )
        self._nodes = ask("scontrol", "show", "hostnames", nodes).split()
        self._environment = {
            name: value for name, value in environment.items() if not name.startswith(OF_THE_STEP)
        }
        cores = environment.get("SLURM_CPUS_PER_TASK", "")
        self._cores = [f"--cpus-per-task={cores}"] if cores else []
        self._agents: dict[str, _SrunAgent] = {}  # by their nodes
        self._num_starts = dict.fromkeys(self._nodes, 0)

    @property
    def num_hosts(self) -> int:
        return len(self._nodes)

    @property
    def is_host(self) -> bool:
        """salloc may leave the shell on the login node, which is no node of the allocation."""
        return self._here in self._nodes

    @property
    def peer(self) -> str:
        """The address of another node, so that this one is reached where that leads to."""
        other = next(node for node in self._nodes if node != self._here)
        return ask("sinfo", "--noheader", f"--nodes={other}", "--format=%o").split()[0]

    def start(self, invitation: bytes, count: int) -> None:
        """On nodes that have no agent, those first that had the fewest."""
        free = [node for node in self._nodes if node not in self._agents and node != self._here]
        for node in sorted(free, key=lambda node: self._num_starts[node])[:count]:
            self._num_starts[node] += 1
            words = ["srun", "--nodes=1", "--ntasks=1", "--overlap", f"--nodelist={node}"]
            command = [*words, *self._cores, "--unbuffered", sys.executable, *AGENT_COMMAND]
            self._agents[node] = _SrunAgent(node, command, self._environment, invitation)

    def poll(self) -> list[str]:
        ended = [agent for agent in self._agents.values() if agent.process.poll() is not None]
        return [self._agents.pop(agent.node).end(0.0) for agent in ended]

    def close(self) -> None:
        deadline = time.monotonic() + LEAVE_S
        for agent in self._agents.values():
            agent.end(max(0.0, deadline - time.monotonic()))
        self._agents.clear()


class _SrunAgent:
    """An agent on another node: the process of srun that runs it, and what it printed."""

    def __init__(
        self, node: str, command: list[str], environment: Mapping[str, str], invitation: bytes
    ):
        self.node = node
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        try:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C reaches the run once
            )
        except OSError as error:
            self._output.close()
            raise UsageError(f"srun cannot be started: {error.strerror}.") from error
        assert self.process.stdin is not None
        with suppress(BrokenPipeError), self.process.stdin as pipe:  # `poll` tells why it ended
            pipe.write(invitation)

    def end(self, patience_s: float) -> str:
        """How it ended, in a sentence; one that has not is ended, if it does not in time."""
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.terminate()  # upon which srun ends what it runs
            try:
                self.process.wait(2 * LEAVE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        code = self.process.wait()
        with self._output as output:
            output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = output.read().decode(errors="replace").split("\n")
        said = " ".join(line.strip() for line in lines[-4:] if line.strip())
        return f"The agent on {self.node} ended with exit code {code}" + (
            f", after it printed: {said}" if said else " and printed nothing."
        )


class _UnknownJob(UsageError):
    """A job that Slurm does not know, or not any more."""


def ask(command: str, *words: str) -> str:
    """What a command of Slurm prints; UsageError has its own error, in a sentence."""
    try:
        done = subprocess.run(
            [command, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ANSWER_S,
            check=False,
            text=True,
            errors="replace",
        )
    except FileNotFoundError:
        raise UsageError(
            f"{command} is not installed here. Give the command where Slurm's own commands are, "
            "such as on a login node of the cluster."
        ) from None
    except subprocess.TimeoutExpired:
        raise UsageError(
            f"{command} had no answer from Slurm within {ANSWER_S:g} s. `scontrol ping` says "
            "whether its controller is up."
        ) from None
    if done.returncode:
        why = error_of(done.stderr or done.stdout)
        kind = _UnknownJob if "Invalid job id" in why else UsageError
        raise kind(
            f"{command} failed: {why or f'it ended with exit code {done.returncode}'}. `scontrol "
            "ping` says whether Slurm's controller can be reached from here."
        )
    return done.stdout


def error_of(text: str) -> str:
    """What went wrong, from what a command of Slurm wrote: the last line has the sum of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    return re.sub(r"^(\w+: )?((error|fatal): )?", "", last).rstrip(".")


def job_number(job: str) -> str:
    number = job.removeprefix("slurm:")
    if not re.fullmatch(r"[0-9]{1,18}", number):
        raise UsageError(f"{job!r} is no job of Slurm, whose jobs have numbers, as in slurm:1234.")
    return number


def _rows(*words: str) -> list[dict[str, str]]:
    """This user's jobs that squeue knows."""
    columns = ",".join(f"{name}:{width}" for name, width in COLUMNS.items())
    answer = ask("squeue", "--me", "--noheader", "--states=all", f"--Format={columns}", *words)
    return [parse_row(line) for line in answer.splitlines() if line.strip()]


def _from_accounting(number: str) -> JobState:
    """What sacct says of a job that Slurm's controller has forgotten."""
    try:
        answer = ask("sacct", "-X", "-n", "-P", f"--jobs={number}", f"--format={','.join(SACCT)}")
    except UsageError:
        answer = ""
    rows = [line.split("|", len(SACCT) - 1) for line in answer.splitlines() if line.strip()]
    for state, status, name, submitted in rows[-1:]:
        command = re.fullmatch(rf"\S*sbatch(?: --\S+)* (/.*/{re.escape(BATCH_FILE)})", submitted)
        if command is None:
            raise UsageError(f"Job {number} of Slurm was not submitted by `shoal submit`.")
        code, _, by_signal = status.partition(":")
        total = 128 + int(by_signal) if by_signal not in ("", "0") else int(code)
        word, exit_code, reason = meaning(state, total, "")
        return JobState(
            job=f"slurm:{number}",
            state=word,
            run_dir=os.path.dirname(command[1]),
            name=name,
            exit_code=exit_code,
            reason=reason,
        )
    raise UsageError(
        f"Slurm knows no job {number} of yours. It forgets a job some minutes after its end unless "
        "it has accounting; `shoal status RUN_DIR` reads what the run itself has written."
    )
