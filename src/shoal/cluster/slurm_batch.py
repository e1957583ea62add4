"""The batch file of a run on Slurm, and what Slurm's answers about it mean. Pure functions.

The file runs `shoal train` on the first node of the job. It passes on the signal that comes before
the time limit, and puts the job back into the queue if the run has saved (exit code 75), unless
somebody stopped the job: `shoal stop` takes its right to be requeued away first. Of a preemption
Slurm tells the steps of a job and not its batch file, so one step is there only to be told.
`shoal train` is no step itself, or Slurm's signals would end the srun of each agent, its children.
Read next: `on_slurm.py`.
"""

import math
import os
import re
import shlex
from collections.abc import Mapping

from shoal.cluster.engine import JobRequest, JobState, State
from shoal.errors import UsageError

BATCH_FILE = "shoal.sbatch"  # in the run directory; its name says that a job is Shoal's
OUTPUT_FILE = "output.log"  # beside it, where `shoal logs` looks
GRACE_S = 180  # between the signal and the time limit, for a run to save
NICE_STEP = 1000  # of Slurm's priorities, for one of ours
MOST_NICE = 2_147_483_645
SAVED = 75
ENDED_BY_SIGNAL = (129, 130, 143)  # without a checkpoint
# The fields that squeue is asked for, and their widths.
COLUMNS = {
    "JobID": 24,
    "State": 24,
    "exit_code": 16,
    "Reason": 120,
    "Nice": 16,
    "Name": 128,
    "Command": 4096,
}
# Options of sbatch that the batch file sets itself, from the options of `shoal submit`.
OWN_OPTIONS = {
    "chdir": "run it in another directory",
    "cpus-per-task": "use --cores",
    "error": "see `shoal logs`",
    "job-name": "it is the recipe's",
    "nice": "use --priority",
    "nodes": "use --nodes",
    "ntasks": "one task runs on each node",
    "ntasks-per-node": "one task runs on each node",
    "open-mode": "output is appended",
    "output": "see `shoal logs`",
    "priority": "use --priority",
    "requeue": "jobs are requeued",
    "signal": "it is sent so that the run can save",
    "time": "use --time",
}
WAITING_FOR = {
    "BeginTime": "it was requeued, and Slurm lets it wait for about two minutes",
    "Dependency": "it waits for another job",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "it is held (scontrol release lets it go)",
    "PartitionNodeLimit": "it asks for more nodes than its partition gives",
    "PartitionTimeLimit": "it asks for more time than its partition gives",
    "Priority": "jobs of higher priority are before it",
    "ReqNodeNotAvail": "the nodes it needs are not available",
    "Resources": "it waits for nodes to be free",
}
ENDED_AS: dict[str, tuple[State, str]] = {
    "BOOT_FAIL": ("failed", "a node did not start"),
    "CANCELLED": ("stopped", "it was cancelled"),
    "DEADLINE": ("failed", "its deadline passed"),
    "NODE_FAIL": ("failed", "a node failed, and the job was not requeued"),
    "OUT_OF_MEMORY": ("failed", "it needed more memory than it had (--mem of sbatch)"),
    "PREEMPTED": ("stopped", "it was preempted, and not requeued"),
    "TIMEOUT": ("failed", "its time limit came before it had saved"),
}
QUEUED = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")

BODY = """\
# Upon SIGTERM the run saves, and exits with 75.
{command} &
train=$!
trap 'told=yes; kill -TERM "$train" 2>/dev/null' TERM

# Slurm sends SIGTERM to this file before the time limit; if the job is preempted, to its steps.
{{ srun --nodes=1 --ntasks=1 --overlap sleep 366d; [ $? = 143 ] && kill -TERM "$train"; }} \\
    >/dev/null 2>&1 &

wait "$train"; code=$?
while [ "$told" ]; do told=; wait "$train"; code=$?; done  # a signal ends a wait, and not the run

# A run that has saved goes on by itself. So does one that had no time to save anything, unless the
# time limit is too short for that. A job that was cancelled, or stopped by `shoal stop`, does not.
if [ "$code" = 75 ] || {{ [ "$code" = 143 ] && [ "$SECONDS" -lt {early_s} ]; }}; then
    if [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; then
        scontrol requeue "$SLURM_JOB_ID" && sleep 60  # Slurm ends this file meanwhile
    fi
fi
exit "$code"
"""


def batch_file(request: JobRequest, python: str, options: Mapping[str, str]) -> str:
    """What sbatch gets. `python` has Shoal, on all nodes; `options` are more ones of sbatch."""
    grace_s = grace_of(request.time_limit_s)
    settings = {
        "job-name": job_name(request.name),
        "nodes": str(request.num_hosts),
        "ntasks-per-node": "1",
        **({"cpus-per-task": str(request.cores)} if request.cores else {"exclusive": ""}),
        **({} if request.time_limit_s is None else {"time": time_text(request.time_limit_s)}),
        "signal": f"B:TERM@{grace_s}",
        "requeue": "",
        "open-mode": "append",
        **({} if request.priority == 0 else {"nice": str(nice_of(request.priority))}),
        **options,
        "chdir": request.directory,
        "output": f"{request.run_dir}/{OUTPUT_FILE}".replace("%", "%%"),
    }
    head = [f"#SBATCH --{name}{value and '=' + quoted(value)}" for name, value in settings.items()]
    command = command_text([python, "-m", "shoal", "train", *request.arguments])
    early_s = 3600 if request.time_limit_s is None else int(request.time_limit_s - grace_s) // 2
    body = BODY.format(command=command, early_s=early_s)
    what = f"# Written by `shoal submit`. `sbatch {BATCH_FILE}` submits it again.\n"
    return "\n".join(["#!/bin/bash", *head, "", what + body])


def command_text(words: list[str]) -> str:
    """A command with exact quoting, each option in a line of its own with what follows it."""
    lines = [shlex.quote(words[0])]
    for word in words[1:]:
        if word.startswith("--"):
            lines.append(shlex.quote(word))
        else:
            lines[-1] += " " + shlex.quote(word)
    return " \\\n    ".join(lines)


def quoted(value: str) -> str:
    """A value as sbatch reads it in a line that begins with #SBATCH."""
    if re.search(r"[\x00-\x1f\x7f]", value):
        raise UsageError(
            f"{value!r}: Slurm cannot read a name with control characters. Rename the directory."
        )
    if re.fullmatch(r"[\w@%+=:,./-]*", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def job_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.:-]+", "-", name).strip("-")[:64] or "shoal"


def time_text(seconds: float) -> str:
    """As Slurm writes times. It counts in minutes, so they are rounded up to those."""
    minutes = max(1, math.ceil(seconds / 60))
    days, minutes = divmod(minutes, 24 * 60)
    text = f"{minutes // 60:02d}:{minutes % 60:02d}:00"
    return f"{days}-{text}" if days else text


def grace_of(time_limit_s: float | None) -> int:
    """The seconds before the time limit at which a run is asked to save."""
    if time_limit_s is None:
        return GRACE_S
    return max(1, min(GRACE_S, int(time_limit_s / 3)))


def nice_of(priority: int) -> int:
    """Slurm's `nice` of a priority: the larger the one, the smaller the other."""
    nice = -priority * NICE_STEP
    if abs(nice) > MOST_NICE:
        most = MOST_NICE // NICE_STEP
        raise UsageError(f"--priority {priority}: Slurm takes -{most} to {most}.")
    return nice


def parse_options(address: str) -> dict[str, str]:
    """`partition=gpu,account=lab`, from `--on slurm:...`, as options of sbatch."""
    options: dict[str, str] = {}
    for part in filter(None, address.split(",")):
        name, _, value = part.strip().partition("=")
        if not re.fullmatch(r"[a-z][a-z-]*", name):
            raise UsageError(
                f"--on slurm:{address}: {part!r} is no option of sbatch. Give them without dashes "
                "and with commas between them, as in slurm:partition=gpu,account=lab."
            )
        if name in OWN_OPTIONS:
            raise UsageError(
                f"--on slurm:{address}: `shoal submit` sets {name} itself: {OWN_OPTIONS[name]}."
            )
        options[name] = value
    return options


def parse_row(line: str) -> dict[str, str]:
    """A line of squeue, by COLUMNS."""
    found, start = {}, 0
    for name, width in COLUMNS.items():
        found[name] = line[start : start + width].strip()
        start += width
    found["Command"] = line[start - COLUMNS["Command"] :].strip()
    return found


def job_state(row: Mapping[str, str]) -> JobState:
    """What a row of squeue says of a job, in the words that all engines share."""
    state, code, reason = meaning(row["State"], exit_code_of(row["exit_code"]), row["Reason"])
    nice = int(row["Nice"]) if re.fullmatch(r"-?[0-9]+", row["Nice"]) else 0
    return JobState(
        job=f"slurm:{row['JobID']}",
        state=state,
        run_dir=os.path.dirname(row["Command"]),
        name=row["Name"],
        priority=-nice // NICE_STEP,
        exit_code=code,
        reason=reason,
    )


def exit_code_of(status: str) -> int:
    """From what a process leaves, as squeue gives it: 19200 for 75."""
    try:
        code = os.waitstatus_to_exitcode(int(status))
    except ValueError:
        return 0
    return code if code >= 0 else 128 - code


def meaning(word: str, code: int, reason: str) -> tuple[State, int | None, str]:
    """State, exit code and reason, from Slurm's words."""
    word = (word.split() or [""])[0]  # of "CANCELLED by 1000", as sacct says
    if word in QUEUED:
        return "queued", None, in_words(reason)
    if word == "COMPLETED":
        return "done", 0, ""
    if word == "FAILED":
        if code == SAVED:
            return "stopped", code, "it was stopped, and has saved"
        if code in ENDED_BY_SIGNAL:
            return "stopped", code, "it was stopped before it had saved anything new"
        return "failed", code or 1, f"it ended with exit code {code or 1}"
    if word in ENDED_AS:
        state, why = ENDED_AS[word]
        return state, code or (143 if state == "stopped" else 1), why
    if word == "SUSPENDED":
        return "running", None, "Slurm has suspended it"
    return "running", None, ""


def in_words(reason: str) -> str:
    """Why a job waits."""
    if reason in ("", "None", "(null)"):
        return ""
    for known, words in WAITING_FOR.items():
        if reason.split(",")[0] == known:
            return words
    return f"Slurm says: {reason}"
