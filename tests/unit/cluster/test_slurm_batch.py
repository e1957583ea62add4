"""The batch file of a run on Slurm, and what Slurm's words about it mean; no Slurm is needed."""

import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster import slurm_batch
from shoal.cluster.engine import JobRequest
from shoal.cluster.on_slurm import SlurmEngine, SlurmStarter, ask, error_of, job_number
from shoal.cluster.slurm_batch import (
    COLUMNS,
    batch_file,
    grace_of,
    job_name,
    job_state,
    meaning,
    nice_of,
    parse_options,
    parse_row,
    time_text,
)
from shoal.errors import UsageError
from tests.support.leaks import wait_until

REQUEST = JobRequest(
    name="charlm small",
    arguments=("recipe.py:small", "--plan", "data=4 zero=1", "--run-dir", "/r", "--resume"),
    directory="/projects/someone/a project",
    run_dir="/r",
    num_hosts=2,
    cores=4,
    time_limit_s=3600.0,
)
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


def test_the_file_says_what_was_asked_for() -> None:
    text = batch_file(REQUEST, "/venv/bin/python", {"partition": "gpu", "exclusive": ""})
    head = re.findall("^#SBATCH (.*)$", text, re.M)
    assert head == [
        "--job-name=charlm-small",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=4",
        "--time=01:00:00",
        "--signal=B:TERM@180",
        "--requeue",
        "--open-mode=append",
        "--partition=gpu",
        "--exclusive",
        '--chdir="/projects/someone/a project"',
        "--output=/r/output.log",
    ]
    assert "    --plan 'data=4 zero=1' \\\n" in text
    assert "nice" not in text and "scontrol requeue" in text


def test_all_cores_are_those_of_whole_nodes() -> None:
    text = batch_file(JobRequest(**{**_fields(), "cores": 0}), "python", {})
    assert "#SBATCH --exclusive\n" in text and "cpus-per-task" not in text


def test_bash_reads_the_file() -> None:
    text = batch_file(REQUEST, "python", {})
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@given(st.lists(WORDS, max_size=6))
def test_arguments_are_quoted_exactly(words: list[str]) -> None:
    text = slurm_batch.command_text(["printf", r"%s\0", "python", *words])
    done = subprocess.run(["bash", "-c", text], capture_output=True, check=True)
    assert done.stdout == b"".join(word.encode() + b"\0" for word in ["python", *words])


@pytest.mark.parametrize("code", [0, 1, 2, 75, 143])
@pytest.mark.parametrize("state", ["RUNNING", "COMPLETING"])
def test_only_a_run_that_saved_is_requeued(tmp_path: Path, code: int, state: str) -> None:
    """The file as bash runs it, with commands that stand for Slurm's and for the run."""
    fakes = {"python": f"exit {code}", "squeue": f"echo {state}", "sleep": "", "srun": ""}
    fakes["scontrol"] = f"echo $* >> {tmp_path}/asked"
    for name, body in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    file = tmp_path / "file"
    file.write_text(batch_file(REQUEST, "python", {}))
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", str(file)], env=variables, check=False)
    assert done.returncode == code
    is_requeued = (tmp_path / "asked").exists()
    assert is_requeued == (code in (75, 143) and state == "RUNNING")


@pytest.mark.parametrize(("status", "expected"), [(143, 75), (1, 0), (0, 0)])
def test_a_preemption_reaches_the_run(tmp_path: Path, status: int, expected: int) -> None:
    """Through the step that is there to be told; not if that cannot be started."""
    fakes = {"python": "trap 'exit 75' TERM; for i in $(seq 9); do /bin/sleep 0.1; done"}
    fakes |= {"srun": f"/bin/sleep 0.3; exit {status}", "squeue": "", "scontrol": "", "sleep": ""}
    for name, body in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    text = batch_file(REQUEST, "python", {})
    assert subprocess.run(["bash", "-c", text], env=variables, check=False).returncode == expected


def test_a_signal_at_the_end_of_a_run_does_not_hide_how_it_ended(tmp_path: Path) -> None:
    """The run ends while its shell cannot look, and a signal comes before it does."""
    fakes = {"python": f"/bin/sleep 0.5; touch {tmp_path}/ended", "srun": "exit 1"}
    for name, body in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    with subprocess.Popen(
        ["bash", "-c", batch_file(REQUEST, "python", {})], env=variables
    ) as shell:
        time.sleep(0.2)
        shell.send_signal(signal.SIGSTOP)
        assert wait_until((tmp_path / "ended").exists, 30.0)
        time.sleep(0.2)
        shell.send_signal(signal.SIGTERM)
        shell.send_signal(signal.SIGCONT)
        assert shell.wait(30) == 0


@given(st.floats(min_value=1, max_value=1e8))
def test_times_are_rounded_up_to_minutes_and_leave_time_to_save(seconds: float) -> None:
    match = re.fullmatch(r"(?:(\d+)-)?(\d\d):(\d\d):00", time_text(seconds))
    assert match is not None
    days, hours, minutes = (int(part or 0) for part in match.groups())
    assert hours < 24 and minutes < 60
    assert seconds <= ((days * 24 + hours) * 60 + minutes) * 60 < max(seconds + 60, 61)
    assert 1 <= grace_of(seconds) <= max(1, seconds / 3)


def test_times() -> None:
    assert time_text(90 * 60) == "01:30:00" and time_text(86_400) == "1-00:00:00"
    assert time_text(1) == "00:01:00" and grace_of(None) == 180 and grace_of(60) == 20


def test_a_larger_priority_is_less_nice() -> None:
    assert nice_of(2) == -2000 and nice_of(-1) == 1000
    with pytest.raises(UsageError, match="takes -2147483 to 2147483"):
        nice_of(3_000_000)
    low = batch_file(JobRequest(**{**_fields(), "priority": -3}), "python", {})
    assert "#SBATCH --nice=3000\n" in low


def _fields() -> dict[str, object]:
    return {name: getattr(REQUEST, name) for name in REQUEST.__struct_fields__}


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("gpu:2", "'gpu:2' is no option of sbatch"),
        ("--partition=a", "without dashes"),
        ("nodes=3", "sets nodes itself: use --nodes"),
        ("partition=a,time=5", "sets time itself: use --time"),
    ],
)
def test_options_that_cannot_be_used_are_refused(address: str, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        SlurmEngine(address)


def test_options_of_sbatch() -> None:
    found = parse_options("partition=gpu,gres=gpu:2,exclusive")
    assert found == {"partition": "gpu", "gres": "gpu:2", "exclusive": ""}


@pytest.mark.parametrize("value", ["/a\nb", "/a\tb"])
def test_a_directory_that_slurm_cannot_read_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="control characters"):
        batch_file(JobRequest(**{**_fields(), "run_dir": value}), "python", {})


@given(WORDS)
def test_names_of_jobs_are_plain(name: str) -> None:
    assert re.fullmatch("[A-Za-z0-9_.:-]{1,64}", job_name(name))


@pytest.mark.parametrize(
    ("word", "code", "reason", "expected"),
    [
        ("PENDING", 0, "Resources", ("queued", None, "it waits for nodes to be free")),
        ("PENDING", 0, "None", ("queued", None, "")),
        ("PENDING", 0, "QOSMaxJobs", ("queued", None, "Slurm says: QOSMaxJobs")),
        ("REQUEUED", 0, "", ("queued", None, "")),
        ("CONFIGURING", 0, "None", ("running", None, "")),
        ("RUNNING", 0, "None", ("running", None, "")),
        ("COMPLETING", 0, "None", ("running", None, "")),
        ("COMPLETED", 0, "None", ("done", 0, "")),
        ("FAILED", 75, "NonZeroExitCode", ("stopped", 75, "it was stopped, and has saved")),
        ("FAILED", 1, "NonZeroExitCode", ("failed", 1, "it ended with exit code 1")),
        ("FAILED", 2, "NonZeroExitCode", ("failed", 2, "it ended with exit code 2")),
        ("CANCELLED by 1000", 0, "", ("stopped", 143, "it was cancelled")),
        ("TIMEOUT", 0, "", ("failed", 1, "its time limit came before it had saved")),
        ("OUT_OF_MEMORY", 137, "", ("failed", 137, slurm_batch.ENDED_AS["OUT_OF_MEMORY"][1])),
    ],
)
def test_words_of_slurm(word: str, code: int, reason: str, expected: object) -> None:
    assert meaning(word, code, reason) == expected


@given(st.text(), st.integers(0, 255), st.text())
def test_any_word_of_slurm_has_a_meaning(word: str, code: int, reason: str) -> None:
    state, exit_code, _ = meaning(word, code, reason)
    assert (exit_code is None) == (state in ("queued", "running"))
    assert (exit_code == 0) == (state == "done")


def test_a_row_of_squeue() -> None:
    values = ["12", "FAILED", "19200", "NonZeroExitCode", "-2000", "x", "/a b/ü|/shoal.sbatch"]
    line = "".join(value.ljust(width) for value, width in zip(values, COLUMNS.values()))
    found = job_state(parse_row(line))
    assert (found.job, found.state, found.exit_code) == ("slurm:12", "stopped", 75)
    assert (found.run_dir, found.priority) == ("/a b/ü|", 2)
    assert slurm_batch.exit_code_of("15") == 143 and slurm_batch.exit_code_of("") == 0


@pytest.mark.parametrize("job", ["", "slurm:", "slurm:x", "12_3", "ray:12", "-1", "1" * 19])
def test_what_is_no_job_is_refused(job: str) -> None:
    with pytest.raises(UsageError, match="is no job of Slurm"):
        job_number(job)


def test_errors_of_slurm_are_one_sentence() -> None:
    text = "sbatch: error: invalid partition specified: x\nsbatch: error: Batch job submission "
    assert (
        error_of(text + "failed: Bad partition.\n") == "Batch job submission failed: Bad partition"
    )
    assert error_of("") == ""
    with pytest.raises(UsageError, match="no-such-command is not installed here"):
        ask("no-such-command")


@pytest.mark.parametrize("environment", [{}, {"SLURM_JOB_ID": "3"}])
def test_outside_an_allocation_the_way_in_is_named(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="shoal submit RECIPE --on slurm --nodes N"):
        SlurmStarter(environment)
