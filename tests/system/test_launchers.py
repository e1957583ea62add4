"""`shoal train` under mpirun, mpiexec, torchrun and srun: each process is one rank of the run."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import run_here
from shoal.testing.ranks import Pool
from tests.support.launchers import SHOAL, Launched, Launching, launch, pid_of_rank, start, words_of
from tests.support.leaks import wait_until
from tests.support.slurm import start_slurm

HERE = Path(__file__).parent
LINE, SCRIPT = f"{HERE / 'tiny.py'}:line", str(HERE / "launched.py")
ROOT = {"PYTHONPATH": str(HERE.parents[1])}
NO_SUPERVISOR = "so nobody supervises them"
pytestmark = pytest.mark.timeout(500)  # a busy machine may take long; none is judged by it

Reference = Callable[[str], Path]


@pytest.fixture
def reference(pool: Pool, tmp_path: Path) -> Reference:
    """The directory of the same run under one supervisor."""

    def train(*words: str) -> Path:
        run_dir = tmp_path / "reference"
        done = pool.start(
            run_here,
            ["train", LINE, "--run-dir", str(run_dir), "--plan", *words],
            environment={"OMP_NUM_THREADS": "1"},
            directory=tmp_path,
            output=tmp_path / "reference.out",
            errors=tmp_path / "reference.err",
        ).wait()
        assert done == 0, (tmp_path / "reference.err").read_text()
        return run_dir

    return train


def model(run_dir: Path) -> bytes:
    return (run_dir / "model.safetensors").read_bytes()


def losses(run_dir: Path) -> list[float]:
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def assert_clean(directory: Path) -> None:
    """Nothing is left of where ranks met."""
    assert not list(directory.glob("shoal-*"))


def last_line(done: Launched) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.output.splitlines()[-1])
    return found


def has_steps(run_dir: Path, count: int) -> Callable[[], bool]:
    record = run_dir / "metrics.jsonl"
    return lambda: record.exists() and len(record.read_text().splitlines()) >= count


@pytest.mark.quick("mpirun")
@pytest.mark.parametrize("launcher", ["mpirun", "mpiexec", "torchrun"])
def test_each_process_is_a_rank_and_the_bits_are_those_of_one_supervisor(
    launcher: str, tmp_path: Path, reference: Reference
) -> None:
    done = launch(launcher, 2, tmp_path, "train", LINE, "--run-dir", "run", "--json")
    assert done.exit_code == 0, done.errors
    told = last_line(done)
    assert (told["plan"], told["steps"], told["exit_code"]) == ("data=2 pieces=2", 8, 0)
    assert done.output.count('{"steps"') == 1 and done.errors.count(NO_SUPERVISOR) == 1
    assert done.errors.count("done: 8 steps") == 1
    run_dir = tmp_path / "run"
    expected = reference("data=2")
    assert model(run_dir) == model(expected) and losses(run_dir) == losses(expected)
    assert (run_dir / "events.jsonl").exists() and (run_dir / "logs" / "rank-001.log").exists()
    assert_clean(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "plan"),
    [
        ("mpirun", "data=4"),
        ("mpirun", "data=2 pipeline=2"),
        ("mpiexec", "tensor=2 zero=1"),
        ("torchrun", "data=2 pipeline=2"),
    ],
)
def test_plans_of_four_ranks(
    launcher: str, plan: str, tmp_path: Path, reference: Reference
) -> None:
    done = launch(launcher, 4, tmp_path, "train", LINE, "--run-dir", "run", "--plan", plan)
    assert done.exit_code == 0, done.errors
    full = f"{plan} data=2" if plan.startswith("tensor") else plan
    assert model(tmp_path / "run") == model(reference(full))


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plan", "data=3"], "The plan needs 3 ranks, and there are 2."),
        (["--plan", "data=2 sync=server servers=1"], "needs parameter servers, and mpirun starts"),
        (["--ranks", "3"], "--ranks 3: mpirun started 2 processes"),
        (["--listen", "127.0.0.1"], "--listen starts processes elsewhere"),
        (["--set", "nothing=1"], "--set nothing"),
        (["--plan", "data=two"], "data=two is not possible"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_sentence(
    words: list[str], said: str, tmp_path: Path
) -> None:
    done = launch("mpirun", 2, tmp_path, "train", LINE, "--run-dir", "run", *words)
    assert done.exit_code == 2
    assert done.errors.count("shoal: ") == 1 and said in done.errors, done.errors
    assert "Traceback" not in done.errors and not (tmp_path / "run").exists()
    assert_clean(tmp_path)


@pytest.mark.full
def test_unlike_commands_are_refused(tmp_path: Path) -> None:
    command = [SHOAL, "train", LINE, "--run-dir", "run"]
    words = words_of("mpirun", 1)
    both = [*words, *command, ":", "-n", "1", *command, "--set", "seed=3"]
    done = Launching(both, tmp_path, {}).wait()
    assert done.exit_code == 2
    said = "rank 1 was started with --set seed 3, and rank 0 with no --set seed."
    assert done.errors.count("unlike things") == 1 and said in done.errors, done.errors


@pytest.mark.full
def test_unlike_recipes_are_refused(tmp_path: Path) -> None:
    done = launch("mpirun", 2, tmp_path, "train", f"{SCRIPT}:unlike", "--run-dir", "run", **ROOT)
    assert done.exit_code == 2
    assert "Run.clip is 2.0 on rank 1 and 1.0 on rank 0" in done.errors, done.errors
    assert done.errors.count("unlike things") == 1 and "Traceback" not in done.errors


@pytest.mark.full
def test_an_error_of_one_rank_is_told_once_with_its_name(tmp_path: Path) -> None:
    words = ("train", f"{SCRIPT}:fails_on_one", "--run-dir", "run")
    done = launch("mpirun", 2, tmp_path, *words, **ROOT)
    assert done.exit_code == 1
    assert 'shoal: rank 1 failed at step 4: KeyError: "a key of this rank\'s own"' in done.errors
    assert done.errors.count("Traceback") == 1 and "logs/rank-001.log has all" in done.errors
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert json.loads(events.splitlines()[-1])["event"] == "gave-up"
    done = launch("mpirun", 2, tmp_path, "train", f"{SCRIPT}:fails_to_load", **ROOT)
    assert done.exit_code == 1 and not (tmp_path / "runs").exists()
    assert done.errors.count("shoal: Rank 1: The recipe") == 1, done.errors


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "rank"), [("mpirun", 1), ("mpirun", 0), ("mpiexec", 1), ("torchrun", 1)]
)
def test_a_killed_rank_ends_all_with_its_name(launcher: str, rank: int, tmp_path: Path) -> None:
    words = ["train", LINE, "--set", "pause=0.05", "--set", "steps=2000", "--run-dir", "run"]
    launching = start(launcher, 2, tmp_path, *words)
    assert wait_until(has_steps(tmp_path / "run", 4), 100.0)
    os.kill(pid_of_rank(launching, rank), signal.SIGKILL)
    done = launching.wait(60.0)
    assert done.exit_code != 0
    if launcher == "mpiexec":  # which kills the others before they can say anything
        assert "Killed (signal 9)" in done.output
    elif rank:
        assert f"shoal: rank {rank} was lost after step" in done.errors, done.errors
        assert done.errors.count("was lost after step") == 1
        assert (
            "Traceback" not in done.errors or launcher == "torchrun"
        )  # which shows one of its own
    else:
        assert "Rank 0 ended, and with that the run" in done.errors, done.errors


@pytest.mark.full
@pytest.mark.parametrize(
    ("plan", "op"),
    [
        ("data=3", r"all-reduce \(bucket 0|all-gather \(numbers"),
        ("pipeline=2", r"receive from rank 1 \("),
    ],
)
def test_a_rank_that_never_comes_is_named_at_the_deadline(
    plan: str, op: str, tmp_path: Path
) -> None:
    """It computes without end; the others tell each other where they stand, and end. Whether its
    numbers of the step were still sent beside its endless forward is a matter of luck."""
    words = ["train", f"{HERE.parent / 'faults' / 'tiny.py'}:sticking", "--set", "where=model"]
    words += ["--plan", plan, "--run-dir", "run"]
    num_ranks = int(plan[-1])
    done = launch("torchrun", num_ranks, tmp_path, *words, SHOAL_EXCHANGE_TIMEOUT_S="4")
    assert done.exit_code != 0
    assert "rank 1 was lost after step" in done.errors, done.errors
    assert re.search(op, done.errors) and "begun at" in done.errors, done.errors
    assert re.search("rank 1 (of the group )?did not come", done.errors), done.errors


@pytest.mark.full
@pytest.mark.parametrize("launcher", ["mpirun", "mpiexec", "torchrun"])
def test_a_signal_stops_all_after_a_saved_step_and_resume_goes_on(
    launcher: str, tmp_path: Path, reference: Reference
) -> None:
    given = ["train", LINE, "--set", "pause=0.05", "--set", "steps=60", "--run-dir", "run"]
    launching = start(launcher, 2, tmp_path, *given, "--json")
    assert wait_until(has_steps(tmp_path / "run", 4), 100.0)
    os.kill(pid_of_rank(launching, 1), signal.SIGTERM)  # one of them is enough
    done = launching.wait()
    assert done.exit_code == (1 if launcher == "torchrun" else 75), done.errors  # its own code
    told = last_line(done)
    assert told["exit_code"] == 75 and told["checkpoint"] == told["steps"] < 60
    assert done.errors.count("It is saved; go on with the same command") == 1
    done = launch(launcher, 4, tmp_path, *given, "--resume", "--plan", "data=4 pieces=4")
    assert done.exit_code == 0, done.errors
    assert f"going on from step {told['steps']}" in done.errors
    assert len(losses(tmp_path / "run")) == 60
    done = launch(launcher, 2, tmp_path, "train", LINE, "--run-dir", "run")
    assert done.exit_code in (1, 2) and "already holds a run" in done.errors
    assert_clean(tmp_path)


@pytest.mark.full
def test_from_and_callbacks(tmp_path: Path, reference: Reference) -> None:
    expected = reference("data=2")
    words = ("train", f"{SCRIPT}:told", "--from", str(expected), "--run-dir", "run")
    done = launch("mpiexec", 2, tmp_path, *words, **ROOT)
    assert done.exit_code == 0, done.errors
    assert done.errors.count("called") == 8, "what rank 0 prints is shown, and of no other"
    assert "called" not in done.output


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "how"),
    [("mpirun", "python"), ("mpiexec", "shoal run"), ("torchrun", "python"), ("mpiexec", "python")],
)
def test_a_script_of_ones_own(launcher: str, how: str, tmp_path: Path) -> None:
    words = words_of(launcher, 2)
    if how == "python":
        words += (
            [SCRIPT] if launcher == "torchrun" else [str(Path(SHOAL).with_name("python")), SCRIPT]
        )
    else:
        words += ["-m", "shoal"] if launcher == "torchrun" else [SHOAL]
        words += ["run", SCRIPT]
    done = Launching(words, tmp_path, ROOT).wait()
    assert done.exit_code == 0, done.errors
    assert "losses [" in done.output and "of 1 thread" in done.output
    assert_clean(tmp_path)


@pytest.mark.full
def test_clear_text_between_hosts_is_refused(tmp_path: Path) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    place = {"MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "29500"}
    done = Launching([SHOAL, "train", LINE], tmp_path, variables | place).wait()
    assert done.exit_code == 2
    assert "cross the network in clear" in done.errors and "--trust-network" in done.errors
    done = Launching([SHOAL, "train", LINE], tmp_path, variables | {"RANK": "2"}).wait()
    assert done.exit_code == 2 and "RANK=2 and WORLD_SIZE=2" in done.errors


@pytest.mark.full
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"OMPI_COMM_WORLD_RANK": "0"}, "did not form within 1 s: rank 1 did not come"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "Rank 0 did not come to"),
        ({"OMPI_COMM_WORLD_RANK": "one"}, "OMPI_COMM_WORLD_RANK='one' in the environment is not"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "port"}, "MASTER_PORT='port'"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "rank 1 did not come"),
    ],
)
def test_bad_variables_and_ranks_that_do_not_come_are_named(
    variables: dict[str, str], said: str, tmp_path: Path
) -> None:
    usual = {
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "PMIX_NAMESPACE": f"test-{os.getpid()}",
    }
    words = [SHOAL, "train", LINE, "--form-timeout", "1"]
    done = Launching(words, tmp_path, usual | variables).wait()
    assert done.exit_code in (1, 2) and said in done.errors, done.errors
    assert "Traceback" not in done.errors
    assert_clean(tmp_path)


@pytest.mark.full
def test_srun(tmp_path: Path, reference: Reference) -> None:
    words = [SHOAL, "train", LINE, "--run-dir", "run"]
    with start_slurm() as slurm:
        conf = {"SLURM_CONF": slurm.conf}
        srun = ["srun", "--chdir", str(tmp_path), "-n", "2"]
        done = Launching([*srun, "-N", "1", *words, "--json"], tmp_path, conf).wait()
        assert done.exit_code == 0 and last_line(done)["plan"] == "data=2 pieces=2", done.errors
        assert model(tmp_path / "run") == model(reference("data=2"))
        done = Launching([*srun, "-N", "2", *words[:-1], "other"], tmp_path, conf).wait()
        assert done.exit_code == 2 and "srun started these ranks on several hosts" in done.errors
        assert done.errors.count("shoal: ") == 1, done.errors
        trusting = [*srun, "-N", "2", *words[:-1], "other", "--trust-network"]
        done = Launching(trusting, tmp_path, conf).wait()
        assert done.exit_code == 2 and ", where ranks are to meet, is not known" in done.errors
        place = {"MASTER_ADDR": "127.0.0.1"}  # its nodes are all on this machine
        done = Launching(trusting, tmp_path, conf | place).wait()
        assert done.exit_code == 0, done.errors
        assert model(tmp_path / "other") == model(tmp_path / "run")
    assert_clean(tmp_path)
