"""Samples that cannot be loaded: the run stops and names one, or goes on without them."""

from pathlib import Path

import msgspec
import pytest

from shoal.testing.ranks import Pool
from tests.support import faults
from tests.support.faults import Trained

TINY = str(Path(__file__).with_name("tiny.py"))
BAD = [i for i in range(120) if i % 17 == 3]


def test_bad_samples_are_left_out_alike_at_every_size(pool: Pool, tmp_path: Path) -> None:
    trained = []
    for plan, loaders in (("data=1 pieces=2", 0), ("data=2", 1)):
        name = f"run-{len(trained)}"
        settings = {"file": str(tmp_path / f"{name}.bad"), "loaders": loaders}
        run = faults.start(
            pool, f"{TINY}:quarantined", tmp_path / name, plan=plan, settings=settings
        )
        trained.append(run.wait())
        assert trained[-1].exit_code == 0, trained[-1].errors
        lines = (tmp_path / f"{name}.bad").read_bytes().splitlines()
        assert {msgspec.json.decode(line)["index"] for line in lines} == set(BAD)
        faults.check_left_out(trained[-1], f"{TINY}:quarantined", settings, 25)
    faults.check_same(trained[1], trained[0])


def test_a_part_of_the_data_is_under_quarantine(pool: Pool, tmp_path: Path) -> None:
    settings = {"file": str(tmp_path / "bad.jsonl")}
    run = faults.start(pool, f"{TINY}:joined", tmp_path / "run", plan="data=2", settings=settings)
    trained = run.wait()
    assert trained.exit_code == 0, trained.errors
    faults.check_left_out(trained, f"{TINY}:joined", settings, 25)


def emptied(
    pool: Pool, run_dir: Path, *options: str, plan: str = "data=2 pieces=6", **settings: object
) -> Trained:
    settings["file"] = str(run_dir.with_suffix(".bad"))
    recipe = f"{TINY}:emptied"
    run = faults.start(pool, recipe, run_dir, plan=plan, settings=settings, options=options)
    return run.wait()


@pytest.fixture(scope="module")
def one(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """On one rank."""
    return emptied(pool, tmp_path_factory.mktemp("emptied") / "one", plan="data=1 pieces=6")


def test_a_batch_that_is_all_left_out_changes_nothing(
    pool: Pool, tmp_path: Path, one: Trained
) -> None:
    """Its step is committed without an update, alike at every size, and told."""
    runs = [
        one,
        emptied(pool, tmp_path / "two", plan="data=2 pieces=6", loaders=1),
        emptied(pool, tmp_path / "sharded", plan="data=3 zero=1 pieces=6"),
    ]
    for run in runs:
        assert run.exit_code == 0, run.errors
        steps = run.steps()
        assert [(s["step"], s["left_out"]) for s in steps if "left_out" in s] == [(4, 12), (14, 12)]
        assert [s["step"] for s in steps if s["loss"] is None] == [4, 14]
        assert [event["step"] for event in run.events("emptied")] == [4, 14]
        assert (run.result["samples"], run.result["quarantined"]) == (13 * 12, 24)
        assert "15 steps, 156 samples (24 more left out by quarantine)" in run.errors
        assert run.errors.count("changes nothing") == 1
        settings = {"file": str(run.run_dir.with_suffix(".bad"))}
        faults.check_left_out(run, f"{TINY}:emptied", settings, 15)
        faults.check_same(run, runs[0])


@pytest.mark.full
def test_a_run_goes_on_from_a_batch_that_is_all_left_out(
    pool: Pool, tmp_path: Path, one: Trained
) -> None:
    three = emptied(pool, tmp_path / "three", steps=3)
    part = emptied(pool, tmp_path / "part", steps=4)
    assert part.exit_code == 0, part.errors
    assert part.model() == three.model() and part.result["loss"] is None
    assert "loss none in the last step" in part.errors
    part = emptied(pool, tmp_path / "part", "--resume", plan="data=3", steps=15)
    faults.check_same(part, one)
    assert part.result["quarantined"] == 24


def test_a_run_that_has_only_bad_samples_fails(pool: Pool, tmp_path: Path) -> None:
    settings = {"file": str(tmp_path / "bad.jsonl"), "steps": 2}
    run = faults.start(pool, f"{TINY}:hopeless", tmp_path / "run", plan="data=2", settings=settings)
    trained = run.wait()
    assert trained.exit_code == 1
    assert "Quarantine left out all 24 samples, so nothing was trained" in trained.last_words


@pytest.mark.quick("1")
@pytest.mark.parametrize("loaders", [0, 1])
def test_a_sample_that_hangs_is_told_of_and_ends_the_run(
    pool: Pool, tmp_path: Path, loaders: int
) -> None:
    settings = {"loaders": loaders}
    run = faults.start(pool, f"{TINY}:hanging", tmp_path / "run", plan="data=2", settings=settings)
    trained = run.wait()
    assert trained.exit_code == 1
    assert "nothing came for" in trained.last_words and "sample" in trained.last_words
    told = trained.events("waiting")
    assert len(told) >= 2 and {event["rank"] for event in told} <= {0, 1}
    assert all("30" in event["samples"] and event["step"] == 2 for event in told)
    assert f"waits for data since {told[0]['seconds']} s" in trained.errors
