"""`shoal plan`, `shoal scale` and `shoal train --plan auto` from the outside."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import run_here
from shoal.plans.plan import Plan
from shoal.storage.run_dir import read_description
from shoal.testing.ranks import Pool
from tests.support.faults import Trained

TINY = f"{Path(__file__).with_name('tiny.py')}:line"
FAILS = f"{Path(__file__).with_name('tiny.py')}:fails"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which this machine was measured, so that no test does; profiles stay in it."""
    from shoal.cost.cluster import format_cluster, read_cluster

    found = tmp_path_factory.mktemp("cache")
    kept = found / "clusters" / "this-machine.toml"
    kept.parent.mkdir()
    kept.write_text(format_cluster(read_cluster("cores-2")))
    return found


def shoal(pool: Pool, cache: Path, directory: Path, *words: str) -> Trained:
    output, errors = directory / "output", directory / "errors"
    command = pool.start(
        run_here,
        list(words),
        environment={"SHOAL_CACHE": str(cache)},
        output=output,
        errors=errors,
        directory=directory,
    )
    code = command.wait()
    return Trained(code, output.read_text(), errors.read_text(), directory / "runs" / "tiny-line-1")


def result(done: Trained) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(done.output.splitlines()[-1])
    assert found["exit_code"] == done.exit_code
    return found


def test_plans_as_json_are_what_the_contract_says(pool: Pool, cache: Path, tmp_path: Path) -> None:
    words = ("plan", TINY, "--cluster", "laptops-16", "--ranks", "4", "--json")
    done = shoal(pool, cache, tmp_path, *words)
    assert done.exit_code == 0, done.errors
    found = result(done)
    assert found["error"] is None and found["plans"]
    for row in found["plans"]:
        assert {"plan", "step_s", "memory_bytes", "bytes_sent"} < row.keys()
        assert {"changes_result", "reason"} < row.keys()
        resolved = Plan.parse(row["plan"]).resolve(ranks=4, cores=4, batch_size=8)
        assert resolved.num_ranks == 4 and row["step_s"] > 0 and row["memory_bytes"] > 0
    same = [row["step_s"] for row in found["plans"] if not row["changes_result"]]
    assert same and same == sorted(same)
    limited = result(shoal(pool, cache, tmp_path, *words, "--memory", "2GB"))
    assert {r["plan"] for r in limited["plans"]} <= {r["plan"] for r in found["plans"]}


def test_plans_for_people(pool: Pool, cache: Path, tmp_path: Path) -> None:
    done = shoal(pool, cache, tmp_path, "plan", TINY, "--cluster", "cores-2")
    assert done.exit_code == 0, done.errors
    for words in ("The same training", "These train something else", "the fastest of", "data=1"):
        assert words in done.output
    assert "greeting" not in done.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((TINY, "--cluster", "nowhere"), "laptops-16"),
        ((TINY, "--ranks", "0"), "--ranks"),
        ((TINY, "--ranks", "3", "--cluster", "cores-2"), "data=3 does not divide"),
        ((TINY, "--ranks", "5000000", "--cluster", "cores-2"), "up to 10,000 ranks"),
        ((TINY, "--memory", "much"), "is no amount"),
        ((TINY, "--memory", "1MB", "--cluster", "cores-2"), "The nearest is"),
    ],
)
def test_bad_input_is_refused(pool: Pool, cache: Path, tmp_path: Path, words, told) -> None:
    done = shoal(pool, cache, tmp_path, "plan", *words, "--json")
    assert done.exit_code == 2 and told in done.errors
    assert told in result(done)["error"]


def test_a_recipe_that_cannot_be_built(pool: Pool, cache: Path, tmp_path: Path) -> None:
    done = shoal(pool, cache, tmp_path, "plan", FAILS, "--cluster", "cores-2", "--json")
    assert done.exit_code == 1 and "a key of the recipe's own" in result(done)["error"]


def test_train_takes_the_best_plan_and_keeps_it(pool: Pool, cache: Path, tmp_path: Path) -> None:
    planned = result(shoal(pool, cache, tmp_path, "plan", TINY, "--json"))
    best = planned["plans"][0]
    words = ("train", TINY, "--plan", "auto", "--json")
    done = shoal(pool, cache, tmp_path, *words)
    assert done.exit_code == 0, done.errors
    assert "--plan auto chose it" in done.errors and "predicted, from its profile" in done.errors
    found = result(done)
    assert Plan.parse(found["plan"]).data == Plan.parse(best["plan"]).data
    assert not best["changes_result"]
    assert found["predicted"]["from"] == "profile"
    assert found["predicted"]["step_s"] == pytest.approx(best["step_s"])
    assert found["measured"]["step_s"] > 0 and found["measured"]["memory_bytes"] > 0
    (event,) = done.events("predicted")
    assert event["predicted"] == found["predicted"] and event["measured"] == found["measured"]
    again = shoal(pool, cache, tmp_path, *words, "--resume", "--set", "steps=12")
    assert again.exit_code == 0, again.errors
    assert "keeps its plan" in again.errors and result(again)["plan"] == found["plan"]
    assert read_description(done.run_dir).plan == found["plan"]


def test_a_run_without_a_profile_says_where_figures_come_from(pool: Pool, tmp_path: Path) -> None:
    empty = tmp_path / "cache"
    words = ("train", TINY, "--plan", "data=2", "--json", "--set", "steps=16")
    found = result(shoal(pool, empty, tmp_path, *words))
    assert found["predicted"]["from"] == "first steps"
    assert found["predicted"]["memory_bytes"] == pytest.approx(
        found["measured"]["memory_bytes"], rel=0.2
    )
    assert found["predicted"]["step_s"] > 0 and found["predicted"]["memory_bytes"] > 0
    assert not empty.exists(), "a run measures no profile"


@pytest.mark.parametrize(
    ("words", "told"),
    [(("--on", "hosts:localhost,b"), "--cluster FILE"), (("--ranks", "3"), "data=3 does not")],
)
def test_auto_is_refused_where_it_cannot_work(pool: Pool, cache, tmp_path, words, told) -> None:
    done = shoal(pool, cache, tmp_path, "train", TINY, "--plan", "auto", *words, "--json")
    assert done.exit_code == 2 and told in done.errors


@pytest.mark.full
def test_scale_runs_and_reports(pool: Pool, cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "scale.svg"
    words = ("scale", TINY, "--ranks", "2,1", "--steps", "6", "--plot", str(plot), "--json")
    done = shoal(pool, cache, tmp_path, *words)
    assert done.exit_code == 0, done.errors
    found = result(done)
    assert [row["ranks"] for row in found["rows"]] == [1, 2] and found["bottleneck"]
    first, second = found["rows"]
    assert first["speedup"] == first["efficiency"] == 1.0
    assert second["efficiency"] == pytest.approx(second["speedup"] / 2)
    for row in found["rows"]:
        assert row["times"].keys() == {"compute", "exchange", "waiting", "data"}
        assert row["samples_per_s"] > 0 and row["predicted"]["step_s"] > 0
    assert plot.read_text().lstrip().startswith("<?xml")
    assert not (tmp_path / "runs").exists(), "nothing is left behind"


@pytest.mark.quick(
    "words0-Start at 1",
    "words1-2 is given twice",
    "words2-no list of numbers",
    "words3-data=3 does not divide the batch of 8",
)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--ranks", "0,1"), "Start at 1"),
        (("--ranks", "1,2,2"), "2 is given twice"),
        (("--ranks", "1,x"), "no list of numbers"),
        (("--ranks", "1,3"), "data=3 does not divide the batch of 8"),
        (("--ranks", "1,2", "--plan", "data=2"), "The plan needs 2 ranks"),
        (("--ranks", "1", "--plot", "a.gif"), ".svg, .png or .pdf"),
    ],
)
def test_counts_that_cannot_be_are_refused(pool: Pool, cache, tmp_path, words, told) -> None:
    done = shoal(pool, cache, tmp_path, "scale", TINY, *words)
    assert done.exit_code == 2 and told in done.errors
