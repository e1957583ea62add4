"""A study in its storage: what is drawn, what is told, and what a driver that was killed leaves."""

import math
from pathlib import Path

import pytest

from shoal.errors import RecipeError, UsageError
from shoal.tuning.objective import Goal, TrialReport
from shoal.tuning.search import Search, SearchOptions, grid_size, require_packages, storage_of
from shoal.tuning.space import AnySpace, Space, SpaceFunction

pytest.importorskip("optuna")

SLOW = ("random", "cmaes", "gp")
SPACE = Space.parse("lr=log:1e-4..1 width=int:1..8 act=relu|gelu")


def opened(
    directory: Path,
    sampler: str = "tpe",
    pruner: str = "none",
    seed: int = 0,
    space: AnySpace = SPACE,
    record: str = "r.py:small",
) -> Search:
    """As the driver opens it, again and again."""
    storage = storage_of(None, directory / "study.log")
    search = Search(storage, "study", {"recipe": record}, space, Goal(), is_new=False)
    search.configure(SearchOptions(sampler, pruner, seed, 1, 20))
    return search


def value_of(drawn: dict[str, object]) -> float:
    return abs(math.log10(float(drawn["lr"])) + 2) + float(drawn["width"])  # type: ignore[arg-type]


def finish(search: Search, count: int) -> list[dict[str, object]]:
    every = []
    for _ in range(count):
        number, drawn = search.propose()
        search.report(number, [TrialReport(20, value_of(drawn))])
        search.complete(number, value_of(drawn))
        every.append(drawn)
    return every


@pytest.mark.parametrize(
    "sampler",
    ["tpe", *(pytest.param(name, marks=pytest.mark.full) for name in SLOW)],
)
def test_a_study_that_was_interrupted_draws_what_it_would_have_drawn(
    tmp_path: Path, sampler: str
) -> None:
    """Past the first ten, which tpe and gp draw by chance."""
    for name in ("whole", "cut", "other"):
        (tmp_path / name).mkdir()
    whole = finish(opened(tmp_path / "whole", sampler), 14)
    cut = finish(opened(tmp_path / "cut", sampler), 6)
    cut += finish(opened(tmp_path / "cut", sampler), 8)
    assert cut == whole
    assert finish(opened(tmp_path / "other", sampler, seed=1), 2) != whole[:2]


def test_a_trial_that_was_under_way_is_taken_up_with_its_values(tmp_path: Path) -> None:
    search = opened(tmp_path)
    finish(search, 2)
    number, drawn = search.propose()
    search.report(number, [TrialReport(5, 1.0)])
    again = opened(tmp_path)
    assert again.left_running() == [2]
    assert again.propose(2) == (number, drawn)
    again.report(2, [TrialReport(5, 1.0), TrialReport(10, 0.5)])
    again.complete(2, 0.5)
    assert again.num_trials() == again.num_finished() == 3


def test_what_was_not_drawn_yet_is_drawn_then(tmp_path: Path) -> None:
    """The driver was killed between two parameters of a trial."""

    class Killed(Exception):
        pass

    def stops(trial):
        trial.suggest_float("lr", 1e-4, 1, log=True)
        raise Killed

    storage = storage_of(None, tmp_path / "study.log")
    search = Search(
        storage,
        "study",
        {"recipe": "r.py:small"},
        SpaceFunction("stops", stops),
        Goal(),
        is_new=False,
    )
    search.configure(SearchOptions("random", "none", 0, 1, 20))
    with pytest.raises(RecipeError, match="The space stops failed: Killed"):
        search.propose()
    again = opened(tmp_path, "random")
    number, drawn = again.propose(again.left_running()[0])
    assert number == 0 and set(drawn) == {"lr", "width", "act"}
    (tmp_path / "other").mkdir()
    assert drawn["lr"] == opened(tmp_path / "other", "random").propose()[1]["lr"]


def test_half_a_line_and_a_lock_of_a_killed_driver_are_mended(tmp_path: Path) -> None:
    finish(opened(tmp_path), 2)
    journal = tmp_path / "study.log"
    with journal.open("ab") as file:
        file.write(b'{"op_code": 4, "worker')
    (tmp_path / "study.log.lock").symlink_to(journal)
    assert len(finish(opened(tmp_path), 1)) == 1
    assert opened(tmp_path).num_finished() == 3


def test_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    finish(opened(tmp_path), 1)
    journal = tmp_path / "study.log"
    journal.write_bytes(b"{\n" + journal.read_bytes())
    with pytest.raises(UsageError, match="is damaged"):
        opened(tmp_path)


def test_states_and_reasons_are_kept(tmp_path: Path) -> None:
    search = opened(tmp_path)
    finish(search, 1)
    search.fail(search.propose()[0], "the loss is nan")
    number, _ = search.propose()
    search.report(number, [TrialReport(5, 3.0)])
    search.prune(number)
    search.propose()
    rows = opened(tmp_path).trials(lambda number: f"trials/{number}")
    assert [row.state for row in rows] == ["complete", "failed", "pruned", "running"]
    assert [row.reason for row in rows] == ["", "the loss is nan", "", ""]
    assert rows[2].value == 3.0 and rows[2].steps == 5
    assert search.best() == (rows[0].value, 0)
    assert search.num_finished() == 3


@pytest.mark.parametrize(
    "pruner",
    ["asha", *(pytest.param(name, marks=pytest.mark.full) for name in ("hyperband", "median"))],
)
def test_pruners_stop_what_falls_behind(tmp_path: Path, pruner: str) -> None:
    search = opened(tmp_path, "random", pruner)
    steps = range(1, 21)
    for _ in range(8):
        number, _ = search.propose()
        search.report(number, [TrialReport(step, 1.0 / step) for step in steps])
        search.complete(number, 0.05)
    pruned = []
    for _ in range(6):
        number, _ = search.propose()
        pruned.append(any(search.report(number, [TrialReport(step, 9.0)]) for step in steps))
        search.prune(number)
    assert any(pruned)


def test_none_prunes_nothing(tmp_path: Path) -> None:
    search = opened(tmp_path)
    finish(search, 8)
    number, _ = search.propose()
    assert not search.report(number, [TrialReport(step, 1e9) for step in range(1, 21)])


def test_a_grid_is_tried_once_each_and_ends(tmp_path: Path) -> None:
    space = Space.parse("lr=0.1|0.01 width=int:1..3")
    assert grid_size(space) == 6
    search = opened(tmp_path, "grid", space=space)
    drawn = finish(search, 4) + finish(opened(tmp_path, "grid", space=space), 2)
    assert len({tuple(one.values()) for one in drawn}) == 6
    assert opened(tmp_path, "grid", space=space).num_finished() == 6


def test_a_grid_has_no_function() -> None:
    with pytest.raises(UsageError, match="does not list them"):
        grid_size("r.py:space")


def test_importances_need_more_than_one_trial(tmp_path: Path) -> None:
    search = opened(tmp_path, "random")
    assert search.importances() == {}
    finish(search, 1)
    search.importances()
    finish(search, 12)
    found = search.importances()
    assert set(found) == {"lr", "width", "act"} and math.isclose(sum(found.values()), 1)


def test_a_study_of_another_recipe_is_refused(tmp_path: Path) -> None:
    finish(opened(tmp_path), 1)
    with pytest.raises(UsageError, match=r"has a study 'study' already, of r\.py:small"):
        opened(tmp_path, record="r.py:large")


@pytest.mark.full
def test_a_database_keeps_a_study(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/study.db"

    def of(is_new: bool) -> Search:
        storage = storage_of(url, tmp_path / "study.log")
        search = Search(storage, "study", {"recipe": "r"}, SPACE, Goal(), is_new=is_new)
        search.configure(SearchOptions("tpe", "none", 0, 1, 20))
        return search

    finish(of(is_new=True), 2)
    assert of(is_new=False).num_finished() == 2
    with pytest.raises(UsageError, match="choose another"):
        of(is_new=True)


@pytest.mark.full
@pytest.mark.parametrize("url", ["nonsense", "sqlite:////proc/none/x.db", "mysql://u:pw@h/x"])
def test_a_database_that_cannot_be_opened_is_refused(tmp_path: Path, url: str) -> None:
    with pytest.raises(UsageError, match="cannot be opened") as refused:
        storage_of(url, tmp_path / "study.log")
    assert "pw" not in str(refused.value).split(":", 1)[0]


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.tuning.search.find_spec", lambda name: None)
    monkeypatch.setattr("shoal.tuning.search.require", refuse)
    with pytest.raises(UsageError, match="optuna tune"):
        require_packages("tpe")


def refuse(module: str, extra: str) -> None:
    raise UsageError(f"{module} {extra}")


def test_what_a_function_made_of_its_draws_is_kept(tmp_path: Path) -> None:
    made = SpaceFunction("made", lambda trial: {"width": 8 * trial.suggest_int("eighth", 1, 4)})
    search = opened(tmp_path, "random", space=made)
    number, drawn = search.propose()
    search.complete(number, 1.0)
    (row,) = search.trials(str)
    assert row.settings == drawn == {"width": drawn["width"]}
