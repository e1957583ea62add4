"""What is said at the end of a run, and that nothing in it steers the terminal."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.checkpoint.retention import RetentionPolicy
from shoal.cli.outcome import print_outcome
from shoal.elastic.supervisor import SupervisorResult
from shoal.events.events import RescuedEvent, SavedEvent, SaveFailedEvent
from shoal.launch.outcome import Best, Outcome, RunFiles, Saves, outcome_of
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
