"""`shoal train` from the outside: what it prints, what it leaves, how it starts and ends."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.testing.ranks import Pool
from tests.support.faults import check_ledger, start
from tests.support.leaks import is_alive, wait_until

SHOAL = Path(sys.executable).with_name("shoal")
RECIPE = f"{Path(__file__).with_name('bad_recipes.py')}:fine"
LARGE = f"{Path(__file__).with_name('tiny.py')}:large"
FAULTS_TINY = str(Path(__file__).parents[1] / "faults" / "tiny.py")


@pytest.mark.quick("data=2")
@pytest.mark.parametrize("plan", ["data=2", "data=2 sync=server"])
def test_a_run_from_the_command_line(plan: str, tmp_path: Path) -> None:
    """Its ranks may have several threads: the process that they are forked from computes on much,
    and OpenMP's threads stay there."""
    done = subprocess.run(
        [SHOAL, "train", LARGE, "--plan", plan, "--json"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    result = json.loads(line)
    assert result["steps"] == 2 and result["recoveries"] == 0 and result["exit_code"] == 0
    assert result["bytes_sent"] > 0 and result["samples_per_s"] > 0
    assert "done: 2 steps, 4096 samples" in done.stderr
    run_dir = tmp_path / result["run_dir"]
    assert run_dir == tmp_path / "runs" / "tiny-large-1"
    for name in ("run.json", "events.jsonl", "metrics.jsonl", "model.safetensors"):
        assert (run_dir / name).stat().st_size > 0
    assert not (run_dir / "owner.json").exists()
    assert {"rank-000.log", "rank-001.log"} <= {path.name for path in run_dir.glob("logs/*")}


def test_what_a_run_leaves(pool: Pool, tmp_path: Path) -> None:
    trained = start(pool, RECIPE, tmp_path / "run", plan="data=2", settings={"steps": 4}).wait()
    assert trained.exit_code == 0, trained.errors
    check_ledger(trained, 4)
    described = json.loads((trained.run_dir / "run.json").read_text())
    assert described["run"]["steps"] == {"value": 4, "from": "--set"}
    assert described["run"]["batch_size"] == {"value": 8, "from": "recipe"}
    assert described["plan"].startswith("data=2") and described["num_ranks"] == 2
    for record in trained.steps():
        assert {"step", "loss", "samples", "rate", "times", "bytes_sent"} <= record.keys()
        assert record["times"].keys() == {"data", "compute", "exchange", "waiting"}
    assert trained.steps()[-1]["loss"] == trained.result["loss"]
    assert [event["rank"] for event in trained.events("seat")] == [0, 1]


@pytest.mark.quick("data=2 pieces=4")
@pytest.mark.parametrize("plan", ["data=1 pieces=4", "data=2 pieces=4", "data=4"])
def test_the_number_of_ranks_does_not_change_the_model(pool: Pool, tmp_path: Path, plan) -> None:
    reference = start(pool, RECIPE, tmp_path / "a", plan="accumulate=4 data=1").wait()
    trained = start(pool, RECIPE, tmp_path / "b", plan=plan).wait()
    assert trained.exit_code == reference.exit_code == 0, trained.errors
    assert trained.model() == reference.model()


def test_tensorboard_events_are_written(pool: Pool, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    options = ["--tensorboard"]
    trained = start(pool, RECIPE, tmp_path / "run", plan="data=2", options=options).wait()
    assert trained.exit_code == 0, trained.errors

    def written() -> dict[Path, int]:  # names have the second in them, which may be the same
        found = (trained.run_dir / "tensorboard").glob("events*")
        return {path: path.stat().st_mtime_ns for path in found}

    before = written()
    assert len(before) == 1
    more = {"steps": trained.result["steps"] + 2}
    again = start(
        pool, RECIPE, trained.run_dir, plan="data=2", settings=more, options=["--resume"]
    ).wait()
    assert again.exit_code == 0, again.errors
    assert written() != before, "it was forgotten"


def test_every_evaluation_is_shown_and_the_best_is_the_best_of_them(
    pool: Pool, tmp_path: Path
) -> None:
    """However quick the steps are; and the loss of a batch is never compared with theirs."""
    settings = {"steps": 24, "save": 4, "save_every": 2}
    keep = ["--keep", "last=1 best=loss"]
    judged = f"{FAULTS_TINY}:judged"
    trained = start(
        pool, judged, tmp_path / "run", plan="data=2", settings=settings, options=keep
    ).wait()
    assert trained.exit_code == 0, trained.errors
    losses = {r["step"]: r["evaluation"]["loss"] for r in trained.steps() if "evaluation" in r}
    assert list(losses) == [4, 8, 12, 16, 20, 24]
    for step, loss in losses.items():
        assert f"step {step}: evaluation  loss {loss:.4f}" in trained.errors
    assert [event["step"] for event in trained.events("evaluated")] == list(losses)
    batches = [record["loss"] for record in trained.steps()]
    assert min(batches) < min(losses.values()), "a batch would have been the best"
    kept = sorted(path.name for path in (trained.run_dir / "checkpoints").iterdir())
    saved = {event["step"] for event in trained.events("saved")}  # one may have been skipped
    best = min(saved & losses.keys(), key=lambda step: losses[step])
    assert kept == sorted({f"step-{best:08d}", "step-00000024"})


def test_the_best_of_what_is_not_measured_is_refused(pool: Pool, tmp_path: Path) -> None:
    settings, keep = {"steps": 9, "save_every": 2, "evaluate_every": 5}, ["--keep", "best=loss"]
    refused = start(
        pool,
        f"{FAULTS_TINY}:evaluated",
        tmp_path / "run",
        plan="data=1",
        settings=settings,
        options=keep,
    ).wait()
    assert refused.exit_code == 2 and "Let evaluate_every divide save_every" in refused.errors
    told = start(
        pool, RECIPE, tmp_path / "told", plan="data=1", settings={"steps": 4}, options=keep
    ).wait()
    assert told.exit_code == 0 and "this run does not evaluate" in told.errors


@pytest.mark.full  # a supervisor that is killed: test_other_faults.py
def test_killing_the_command_leaves_no_process(tmp_path: Path) -> None:
    """As a terminal that closes would: the whole tree goes, whoever is first."""
    words = ["train", RECIPE, "--plan", "data=2", "--set", "steps=1000000", "--run-dir", "run"]
    with subprocess.Popen([SHOAL, *words], cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        events = tmp_path / "run" / "events.jsonl"
        assert wait_until(lambda: events.exists() and '"formed"' in events.read_text(), 40)
        records = [json.loads(line) for line in events.read_text().splitlines()]
        pids = {record["pid"] for record in records if record["event"] == "started"}
        assert len(pids) >= 2
        os.kill(process.pid, signal.SIGKILL)
    assert wait_until(lambda: not any(map(is_alive, pids)), 10)


def test_tables_train_on_one_rank_if_no_number_is_asked_for(pool: Pool, tmp_path: Path) -> None:
    """Several ranks could not exchange their gradients."""
    recipe = f"{Path(__file__).with_name('used.py')}:tabled"
    trained = start(
        pool, recipe, tmp_path / "run", plan="data=auto", environment={"SHOAL_CORES": "2"}
    ).wait()
    assert trained.exit_code == 0, trained.errors
    assert json.loads((trained.run_dir / "run.json").read_text())["num_ranks"] == 1
    assert "The plan is data=1, since more ranks do not work: " in trained.errors
    asked = start(pool, recipe, tmp_path / "asked", plan="data=2").wait()
    assert asked.exit_code == 2 and "train on one rank (data=1)" in asked.last_words
