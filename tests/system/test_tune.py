"""`shoal tune` and `shoal.tune`: a study from its first draw to its table, and what it refuses."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import shoal
from shoal.errors import UsageError
from shoal.testing.ranks import Pool
from tests.support.faults import Trained, events
from tests.support.hosts import run_in
from tests.system import tunable

pytest.importorskip("optuna")
TUNABLE = str(Path(__file__).with_name("tunable.py"))
LINE = f"{TUNABLE}:line"
LIMIT_S = 240.0  # a busy machine may take long; none is judged by it
pytestmark = pytest.mark.timeout(300)
Tune = Callable[..., Trained]


@pytest.fixture
def tune(pool: Pool, tmp_path: Path) -> Tune:
    """Run `shoal tune` to its end in a warm process."""

    def run(
        *words: str, study: str = "study", environment: dict[str, str] | None = None
    ) -> Trained:
        command = pool.start(
            run_in,
            "",
            ["tune", *words, "--run-dir", study, "--json"],
            environment=environment or {},
            output=tmp_path / "out",
            errors=tmp_path / "err",
            directory=tmp_path,
        )
        code = command.wait(LIMIT_S)
        said = [(tmp_path / name).read_text() for name in ("out", "err")]
        return Trained(code, *said, tmp_path / study)

    return run


def test_a_study_from_its_first_draw_to_its_table(tune: Tune, tmp_path: Path) -> None:
    """Two trials side by side, and more by the same command; the best trial is a run."""
    words = (LINE, "--space", "lr=log:1e-3..0.2 width=2|4", "--set", "pause=0.001")
    done = tune(*words, "--trials", "3", "--parallel", "2")
    assert done.exit_code == 0, done.errors
    found = done.result
    assert [trial["state"] for trial in found["trials"]] == ["complete"] * 3
    best = min(found["trials"], key=lambda trial: trial["value"])
    assert found["best"] == {name: best[name] for name in ("trial", "value", "settings", "run_dir")}
    assert found["exit_code"] == 0 and found["study"] == "study"
    assert "best: trial" in done.errors
    run_dir = tmp_path / found["best"]["run_dir"]
    last = msgspec.json.decode((run_dir / "metrics.jsonl").read_bytes().splitlines()[-1])
    assert last["step"] == 12 and last["evaluation"]["loss"] == best["value"]
    settings = {key: str(value) for key, value in best["settings"].items()}
    recorded = msgspec.json.decode((run_dir / "run.json").read_bytes())
    assert recorded["settings"] == {"pause": "0.001", **settings}
    more = tune(*words, "--trials", "4", "--sampler", "random")
    assert [t["settings"] for t in more.result["trials"][:3]] == [
        t["settings"] for t in found["trials"]
    ]
    assert len(more.result["trials"]) == 4
    assert len(events(run_dir, "formed")) == 1, "a finished trial was run again"


@pytest.mark.full
def test_the_bits_of_a_trial_are_those_of_a_run(tune: Tune, tmp_path: Path) -> None:
    done = tune(LINE, "--space", "lr=0.05|0.1", "--sampler", "grid", "--keep", "all")
    assert done.exit_code == 0, done.errors
    for trial in done.result["trials"]:
        own = shoal.train(
            LINE, "data=1", settings=trial["settings"], run_dir=tmp_path / "own", progress=False
        )
        model = (tmp_path / trial["run_dir"] / "model.safetensors").read_bytes()
        assert (own.run_dir / "model.safetensors").read_bytes() == model
        assert own.metrics["loss"] == trial["value"]
        os.rename(own.run_dir, tmp_path / f"own-{trial['trial']}")


@pytest.mark.full
def test_the_same_seed_draws_the_same_trials(tune: Tune) -> None:
    words = (LINE, "--space", f"{TUNABLE}:space", "--trials", "3", "--parallel", "1", "--seed", "7")
    first = tune(*words, study="first").result["trials"]
    second = tune(*words, study="second").result["trials"]
    assert [(t["settings"], t["value"]) for t in first] == [
        (t["settings"], t["value"]) for t in second
    ]
    assert {"lr", "width"} == set(first[0]["settings"])


@pytest.mark.full
def test_a_trial_that_fails_does_not_end_the_study(tune: Tune, tmp_path: Path) -> None:
    done = tune(f"{TUNABLE}:moody", "--space", "mood=bad|good", "--sampler", "grid")
    assert done.exit_code == 0, done.errors
    states = {t["settings"]["mood"]: t for t in done.result["trials"]}
    assert states["good"]["state"] == "complete"
    assert states["bad"]["state"] == "failed" and "in a bad mood" in states["bad"]["reason"]


@pytest.mark.full
def test_all_trials_failing_is_a_failure(tune: Tune) -> None:
    done = tune(LINE, "--space", "lr=1e20|1e30", "--sampler", "grid")
    assert done.exit_code == 1
    assert done.result["best"] is None and done.result["exit_code"] == 1
    assert "all trials failed" in done.last_words and "not finite" in done.last_words


@pytest.mark.full
def test_a_recipe_without_evaluation_is_judged_by_its_loss(tune: Tune, tmp_path: Path) -> None:
    done = tune(f"{TUNABLE}:unmeasured", "--space", "lr=0.01|0.1", "--sampler", "grid")
    assert done.exit_code == 0, done.errors
    for trial in done.result["trials"]:
        lines = (tmp_path / trial["run_dir"] / "metrics.jsonl").read_bytes().splitlines()
        assert trial["value"] == msgspec.json.decode(lines[-1])["loss"]


@pytest.mark.full
def test_a_pruned_trial_is_stopped_and_leaves_its_record(tune: Tune, tmp_path: Path) -> None:
    done = tune(
        *(LINE, "--space", "lr=log:1e-5..0.2", "--trials", "12", "--pruner", "median"),
        *("--set", "steps=400", "--set", "pause=0.004", "--sampler", "random"),
        *("--metric", "accuracy:max", "--keep", "best=1"),
    )
    assert done.exit_code == 0, done.errors
    pruned = [t for t in done.result["trials"] if t["state"] == "pruned"]
    assert pruned and all(t["steps"] < 400 for t in pruned)
    assert done.result["direction"] == "max"
    for trial in done.result["trials"]:
        run_dir = tmp_path / trial["run_dir"]
        assert (run_dir / "metrics.jsonl").exists()
        is_best = trial["trial"] == done.result["best"]["trial"]
        assert (run_dir / "checkpoints").exists() == is_best
    assert done.result["best"]["trial"] not in [t["trial"] for t in pruned]


@pytest.mark.full
def test_trials_have_as_many_ranks_as_their_plan_says(tune: Tune, tmp_path: Path) -> None:
    done = tune(LINE, "--space", "lr=0.05|0.1", "--sampler", "grid", "--plan", "data=2 zero=1")
    assert done.exit_code == 0, done.errors
    for trial in done.result["trials"]:
        ranks = {event["rank"] for event in events(tmp_path / trial["run_dir"], "seat")}
        assert ranks == {0, 1}


@pytest.mark.full
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="nothing to grow into")
def test_the_last_trial_grows_into_the_free_cores(tune: Tune, tmp_path: Path) -> None:
    """And computes what it would have computed on one rank."""
    words = (LINE, "--space", "lr=0.05|0.1|0.15", "--sampler", "grid", "--set", "pause=0.01")
    words = (*words, "--set", "steps=150", "--keep", "all")
    grown = tune(*words, "--plan", "data=auto", study="grown")
    assert grown.exit_code == 0, grown.errors
    resized = [
        event["plan"]
        for trial in grown.result["trials"]
        for event in events(tmp_path / trial["run_dir"], "resized")
    ]
    num_cores = len(os.sched_getaffinity(0))
    assert f"data={min(num_cores, 8)} " in f"{resized[-1]} ", grown.errors
    pieces = resized[-1].rpartition("pieces=")[2]
    still = tune(*words, "--plan", f"data=1 pieces={pieces}", "--parallel", "1", study="still")
    values = [{t["settings"]["lr"]: t["value"] for t in x.result["trials"]} for x in (grown, still)]
    assert values[0] == values[1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((LINE, "--space", "lr=1..x", "--trials", "2"), "character 7: 'x'"),
        ((LINE, "--space", " ", "--trials", "2"), "The space is empty"),
        (
            (LINE, "--space", "widht=2|4", "--trials", "2"),
            "has no parameter 'widht', and a Run has none that can be set. Did you mean 'width'?",
        ),
        pytest.param(
            (LINE, "--space", "width=2..4", "--trials", "2"),
            "Did you mean width=int:2..4?",
            marks=pytest.mark.full,
        ),
        ((LINE, "--space", "lr=1..2"), "give --trials N"),
        ((LINE, "--space", "lr=1..2", "--sampler", "grid"), "no end of them"),
        ((LINE, "--space", "lr=1|2", "--trials", "2", "--plan", "dta=1"), "no key 'dta'"),
        pytest.param(
            (LINE, "--space", "lr=1|2", "--trials", "2", "--metric", "acuracy"),
            "Did you mean 'accuracy'?",
            marks=pytest.mark.full,
        ),
        pytest.param(
            (LINE, "--space", "lr=1|2", "--trials", "2", "--set", "lr=3"),
            "Leave one of them out",
            marks=pytest.mark.full,
        ),
        pytest.param(
            (LINE, "--space", f"{TUNABLE}:empty", "--trials", "2"),
            "returned nothing",
            marks=pytest.mark.full,
        ),
        pytest.param(
            (LINE, "--space", f"{TUNABLE}:spcae", "--trials", "2"),
            "has no space 'spcae'",
            marks=pytest.mark.full,
        ),
        pytest.param(
            (f"{TUNABLE}:missing", "--space", "lr=1|2", "--trials", "2"),
            "has no recipe 'missing'",
            marks=pytest.mark.full,
        ),
        pytest.param(
            (LINE, "--space", "lr=1|2", "--trials", "2", "--storage", "nonsense"),
            "cannot be opened",
            marks=pytest.mark.full,
        ),
        ((LINE, "--space", "lr=1|2", "--trials", "2", "--keep", "some"), "best=K"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    tune: Tune, tmp_path: Path, words: tuple[str, ...], told: str
) -> None:
    refused = tune(*words)
    assert refused.exit_code == 2, refused.errors
    assert told in refused.errors and "Traceback" not in refused.errors
    assert {path.name for path in tmp_path.iterdir()} <= {"out", "err"}


@pytest.mark.full
def test_a_study_goes_on_as_it_began(tune: Tune, tmp_path: Path) -> None:
    words = ("--space", "lr=0.05|0.1", "--sampler", "grid")
    assert tune(LINE, *words).exit_code == 0
    before = sorted(path.name for path in (tmp_path / "study").rglob("*"))
    for other, told in (
        ((f"{TUNABLE}:unmeasured", *words), "recipe"),
        ((LINE, "--space", "lr=0.05|0.2", "--sampler", "grid"), "space"),
        ((LINE, *words, "--plan", "data=2"), "plan"),
        ((LINE, *words, "--metric", "accuracy"), "metric"),
        ((LINE, *words, "--set", "steps=4"), "settings"),
    ):
        refused = tune(*other)
        assert refused.exit_code == 2 and f"this command has {told}" in refused.errors
    assert before == sorted(path.name for path in (tmp_path / "study").rglob("*"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").touch()
    assert "holds other files" in tune(LINE, *words, study="other").errors


@pytest.mark.full
def test_the_same_command_finds_its_study(tune: Tune, tmp_path: Path, pool: Pool) -> None:
    """Without --run-dir: the last one with trials left, else a new one."""

    def again(trials: int) -> str:
        command = pool.start(
            run_in,
            "",
            ["tune", LINE, "--space", "lr=0.05..0.1", "--trials", str(trials), "--json"],
            output=tmp_path / "out",
            errors=tmp_path / "err",
            directory=tmp_path,
        )
        assert command.wait(LIMIT_S) == 0, (tmp_path / "err").read_text()
        found: dict[str, Any] = msgspec.json.decode((tmp_path / "out").read_text().splitlines()[-1])
        assert len(found["trials"]) == trials
        return str(found["study"])

    assert again(1) == again(2) == "runs/tunable-line-tune-1"
    assert again(2) == "runs/tunable-line-tune-2"


@pytest.mark.full
def test_from_python_in_a_process_with_threads(pool: Pool, tmp_path: Path) -> None:
    """pytest's own: the recipe is a function, and the process that trials are forked from fresh."""
    found = shoal.tune(
        tunable.line,
        {"lr": [0.05, 0.1], "width": "int:2..3"},
        sampler="grid",
        run_dir=tmp_path / "study",
        metric="accuracy:max",
        progress=False,
    )
    assert len(found.trials) == 4 and found.exit_code == 0
    assert found.best is not None
    model = found.model()
    assert model[0].out_features == found.best.settings["width"]
    with pytest.raises(UsageError, match="no parameter 'rate'"):
        shoal.tune(tunable.line, {"rate": [1, 2]}, 2, run_dir=tmp_path / "b", progress=False)
    with pytest.raises(shoal.ShoalError, match="All 2 trials failed"):
        shoal.tune(
            tunable.line,
            lambda trial: {"lr": trial.suggest_categorical("lr", [1e20, 1e30])},
            2,
            run_dir=tmp_path / "c",
            progress=False,
        )
    with pytest.raises(TypeError, match="Did you mean 'sampler'"):
        shoal.tune(tunable.line, "lr=1|2", 2, smapler="grid")  # type: ignore[call-arg]


@pytest.mark.full
def test_optuna_shows_the_study(tune: Tune, tmp_path: Path) -> None:
    """Its own reader finds all trials in the journal."""
    import optuna

    done = tune(LINE, "--space", "lr=0.05|0.1", "--sampler", "grid")
    backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / done.result["storage"]))
    study = optuna.load_study(study_name="study", storage=optuna.storages.JournalStorage(backend))
    assert study.best_value == done.result["best"]["value"]
    assert sorted(study.best_trial.intermediate_values) == [4, 8, 12]


@pytest.mark.full
def test_without_a_terminal_or_a_reader_it_goes_on(tmp_path: Path) -> None:
    """A cold command whose standard error is closed by its reader."""
    words = ["-m", "shoal", "tune", LINE, "--space", "lr=0.05|0.1", "--sampler", "grid"]
    with subprocess.Popen(
        [sys.executable, *words, "--run-dir", "study", "--json"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(shoal.__file__).parents[1])},
    ) as command:
        assert command.stderr is not None and command.stdout is not None
        command.stderr.readline()
        command.stderr.close()
        found = msgspec.json.decode(command.stdout.read().splitlines()[-1])
        assert command.wait(LIMIT_S) == 0
    assert len(found["trials"]) == 2
