"""What is said at the end of a run, and that nothing in it steers the terminal."""

import pickle
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.api import _checked
from shoal.checkpoint.retention import RetentionPolicy
from shoal.cli.outcome import print_outcome
from shoal.elastic.supervisor import SupervisorResult
from shoal.errors import ShoalError, UsageError
from shoal.events.events import RescuedEvent, SavedEvent, SaveFailedEvent
from shoal.launch.outcome import Best, Outcome, RunFiles, Saves, how_it_ended, outcome_of
from shoal.sync.server.clock import Staleness
from shoal.training.options import Recipe

FACTS = {"plan": "data=1", "num_servers": 0, "num_steps": 3, "unholdable": "a tensor"}


def ended(**changes: Any) -> SupervisorResult:
    """The end of a run after three steps."""
    return SupervisorResult(**{"step": 3} | changes)


def outcome_in(
    run_dir: Path, result: SupervisorResult, saves: Saves | None = None, **facts: Any
) -> Outcome:
    return outcome_of(
        result,
        Recipe.named("mine.py:small", {}),
        FACTS | facts,
        saves or Saves(),
        files=RunFiles(run_dir, run_dir, "", str(run_dir / "checkpoints")),
        keep=RetentionPolicy.parse(facts.get("keep", "last=2")),
    )


OWN: dict[str, Any] = {
    "steps": 3,
    "loss": 0.5,
    "evaluation": None,
    "samples_per_s": 1.0,
    "bytes_sent": 8,
    "peak_memory_bytes": 8,
    "times": {"compute": 1.0},
    "checkpoint": 3,
}


@pytest.mark.parametrize(("num_lines", "samples"), [(3, 12), (2, None), (0, None)])
def test_samples_are_counted_if_all_are_on_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_lines: int, samples: int | None
) -> None:
    lines = [f'{{"step": {step}, "samples": 4}}\n' for step in range(1, num_lines + 1)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert print_outcome(outcome_in(tmp_path, ended(summaries={0: OWN})), as_json=True) == 0
    said = capsys.readouterr()
    assert msgspec.json.decode(said.out)["samples"] == samples
    assert ("12 samples" in said.err) == (samples == 12)
    assert ("metrics.jsonl is not whole" in said.err) == (samples is None)


def test_the_staleness_that_ranks_saw_is_told_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = [Staleness({0: 3}).summary(), Staleness({0: 1, 2: 2}).summary()]
    summaries = {rank: OWN | {"staleness": one} for rank, one in enumerate(seen)}
    result = ended(summaries=summaries, num_recoveries=1)
    assert print_outcome(outcome_in(tmp_path, result, num_servers=2), as_json=True) == 0
    said = capsys.readouterr()
    told = msgspec.json.decode(said.out)["staleness"]
    assert told == {"count": 6, "mean": 4 / 6, "largest": 2, "histogram": {"0": 4, "2": 2}}
    assert "staleness: 0.67 on the mean, 2 batches at the most" in said.err
    assert "lost ranks and servers replaced: 1; no step was done again" in said.err
    result = ended(summaries={0: OWN | {"staleness": None}})
    assert print_outcome(outcome_in(tmp_path, result), as_json=True) == 0
    said = capsys.readouterr()
    assert msgspec.json.decode(said.out)["staleness"] is None and "staleness" not in said.err


def test_the_cause_of_an_end_does_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = ended(exit_code=1, cause="rank 0 failed: no file \x1b[2J.csv")
    assert print_outcome(outcome_in(tmp_path, result), as_json=False) == 1
    said = capsys.readouterr().err
    assert "no file \\x1b[2J.csv" in said and "\x1b" not in said


def test_the_best_evaluation_is_by_the_metric_that_checkpoints_are_kept_by(tmp_path: Path) -> None:
    figures = [(0.9, 0.5), (0.4, 0.7), (0.6, 0.8), (float("nan"), None)]
    lines = [
        {"step": step, "samples": 4, "evaluation": {"loss": loss, "accuracy": accuracy}}
        for step, (loss, accuracy) in enumerate(figures, 1)
    ]
    content = b"\n".join(map(msgspec.json.encode, lines))
    (tmp_path / "metrics.jsonl").write_bytes(content + b'\n{"step": 5, "eval')
    result = ended(summaries={0: OWN})
    assert outcome_in(tmp_path, result).best == Best("loss", 0.4, 2)
    assert outcome_in(tmp_path, result, keep="best=accuracy:max").best == Best("accuracy", 0.8, 3)
    assert outcome_in(tmp_path, result, keep="best=recall").best is None


def test_why_the_last_step_was_not_saved_is_what_ranks_said_of_it(tmp_path: Path) -> None:
    saves, own = Saves(), OWN | {"checkpoint": None}
    saves(SavedEvent(step=2, name="step-00000002", bytes=8, ms=1.0))
    saves(SaveFailedEvent(step=3, why="another rank failed", echo=True))
    outcome = outcome_in(tmp_path, ended(summaries={0: own}), saves, unholdable="")
    assert outcome.exit_code == 1 and "another rank failed" in outcome.problem
    for _ in range(2):
        saves(SaveFailedEvent(step=3, why="no room."))
    saves(RescuedEvent(step=3, place="/tmp/rescued"))
    outcome = outcome_in(tmp_path, ended(summaries={0: own}), saves, unholdable="")
    assert "could not be saved: no room. It is in /tmp/rescued instead" in outcome.problem
    assert outcome.checkpoint == str(tmp_path / "checkpoints/step-00000002")


def lambda_recipe() -> Recipe:
    return Recipe("notebook", lambda: (lambda: None, ()), {}, is_named=False)


def test_a_run_that_lost_all_says_how_to_go_on(tmp_path: Path) -> None:
    """A rank may die before the first save, or after one and before it says so."""
    lost = ended(exit_code=1, cause="all died.")
    assert how_it_ended(outcome_in(tmp_path, lost)).endswith(
        f"Nothing was saved: --resume --run-dir {tmp_path} begins again at step 0."
    )
    wrong = ended(exit_code=1, cause="all died.", trace="of the recipe")
    assert "--resume" not in how_it_ended(outcome_in(tmp_path, wrong))
    saved = tmp_path / "checkpoints" / "step-00000002"
    saved.mkdir(parents=True)
    outcome = outcome_in(tmp_path, lost)
    assert "The newest checkpoint is of step 2: the same command" in how_it_ended(outcome)
    assert outcome.checkpoint == str(saved)


def test_what_is_raised_has_the_outcome(tmp_path: Path) -> None:
    """Of a run whose last save failed, and of one that was interrupted and could not be saved."""
    saves = Saves()
    saves(SaveFailedEvent(step=3, why="no room."))
    result = ended(summaries={0: OWN | {"checkpoint": None}})
    outcome = outcome_in(tmp_path, result, saves, unholdable="")
    with pytest.raises(ShoalError, match=r"could not be saved: no room\..*\(resume=True\)") as one:
        _checked(outcome)
    assert one.value.outcome is outcome and outcome.steps == 3
    result = ended(exit_code=130, stopped_by=signal.SIGINT, trace="File mine.py, line 3")
    outcome = outcome_in(tmp_path, result, saves, unholdable="")
    with pytest.raises(
        KeyboardInterrupt, match=r"as asked\. It could not be saved: no room"
    ) as two:
        _checked(outcome)
    assert vars(two.value)["outcome"] is outcome
    assert two.value.__notes__ == ["File mine.py, line 3"]
    result = ended(exit_code=1, stopped_by=signal.SIGINT, cause="rank 0 failed: a key")
    with pytest.raises(KeyboardInterrupt, match=r"rank 0 failed: a key\. Logs are in"):
        _checked(outcome_in(tmp_path, result, saves, unholdable=""))


def test_how_a_run_ended_in_words(tmp_path: Path) -> None:
    saves = Saves()
    saves(SavedEvent(step=3, name="step-00000003", bytes=8, ms=1.0))
    stopped = outcome_in(tmp_path, ended(exit_code=75, stopped_by=signal.SIGTERM), saves)
    again = f"--resume --run-dir {tmp_path}"
    assert how_it_ended(stopped) == (
        f"stopped after step 3, as asked. It is saved; go on with the same command and {again}."
    )
    failed = outcome_in(tmp_path, ended(exit_code=1, cause="all died."), saves)
    assert how_it_ended(failed) == (
        f"all died. Logs are in {tmp_path / 'logs'}. The newest checkpoint is of step 3: the same "
        f"command with {again} goes on from it."
    )
    moved = msgspec.structs.replace(failed, moved="It was moved.")
    assert how_it_ended(moved).endswith("goes on from it. It was moved.")
    assert how_it_ended(outcome_in(tmp_path, ended(summaries={0: OWN}), saves)) == ""


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe.named("mine.py:small", {"width": "3"}),
        Recipe("test_outcome", lambda: (lambda_recipe, ()), {"width": "3"}, is_named=False),
    ],
)
def test_an_outcome_can_be_pickled_with_a_recipe_that_can_be_imported(
    tmp_path: Path, recipe: Recipe
) -> None:
    outcome = outcome_in(tmp_path, ended(summaries={0: OWN}))
    outcome = msgspec.structs.replace(outcome, recipe=recipe)
    again = pickle.loads(pickle.dumps(outcome))
    assert again.summary == outcome.summary and again.recipe.settings == {"width": "3"}
    found, _ = again.recipe.find()
    assert found in ("mine.py:small", f"{__name__}:lambda_recipe")


def test_an_outcome_can_be_pickled_without_its_recipe(tmp_path: Path) -> None:
    outcome = outcome_in(tmp_path, ended(summaries={0: OWN}))
    outcome = msgspec.structs.replace(outcome, recipe=lambda_recipe())
    again = pickle.loads(pickle.dumps(outcome))
    assert again.steps == 3
    with pytest.raises(UsageError, match=r"notebook stayed in the process.*shoal\.load"):
        again.model()


@pytest.mark.parametrize(
    ("times", "is_slow"),
    [
        ({"data": 94.0, "compute": 6.0}, True),
        ({"data": 0.94, "compute": 0.06}, False),  # too short to say
        ({"data": 30.0, "compute": 70.0}, False),
        ({}, False),
    ],
)
def test_a_run_that_waits_for_data_gets_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], times: dict[str, float], is_slow: bool
) -> None:
    result = ended(summaries={0: OWN | {"times": times}})
    print_outcome(outcome_in(tmp_path, result), as_json=False)
    assert ("waited for samples most of the time" in capsys.readouterr().err) == is_slow
