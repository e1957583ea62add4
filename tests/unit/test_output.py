"""What is said at the end of a run, and that nothing in it steers the terminal."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.cli.report import report
from shoal.elastic.supervise import Outcome
from shoal.sync.server.clock import Staleness

FACTS = {
    "plan": "data=1",
    "num_servers": 0,
    "model_problem": "a full disk",
    "unholdable": "a tensor",
    "unsaved": {},
    "saved_step": None,
}


def ended(**changes: Any) -> Outcome:
    """The end of a run after three steps."""
    return Outcome(**{"step": 3} | changes)


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
    assert report(ended(summaries={0: OWN}), FACTS, tmp_path, as_json=True) == 0
    said = capsys.readouterr()
    assert msgspec.json.decode(said.out)["samples"] == samples
    assert ("12 samples" in said.err) == (samples == 12)
    assert ("metrics.jsonl is not whole" in said.err) == (samples is None)


def test_the_staleness_that_ranks_saw_is_told_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = [Staleness({0: 3}).summary(), Staleness({0: 1, 2: 2}).summary()]
    summaries = {rank: OWN | {"staleness": one} for rank, one in enumerate(seen)}
    outcome, facts = ended(summaries=summaries, num_recoveries=1), FACTS | {"num_servers": 2}
    assert report(outcome, facts, tmp_path, as_json=True) == 0
    said = capsys.readouterr()
    told = msgspec.json.decode(said.out)["staleness"]
    assert told == {"count": 6, "mean": 4 / 6, "largest": 2, "histogram": {"0": 4, "2": 2}}
    assert "staleness: 0.67 on the mean, 2 batches at the most" in said.err
    assert "lost ranks and servers replaced: 1; no step was done again" in said.err
    outcome = ended(summaries={0: OWN | {"staleness": None}})
    assert report(outcome, FACTS, tmp_path, as_json=True) == 0
    said = capsys.readouterr()
    assert msgspec.json.decode(said.out)["staleness"] is None and "staleness" not in said.err


def test_the_cause_of_an_end_does_not_steer_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = ended(exit_code=1, cause="rank 0 failed: no file \x1b[2J.csv")
    assert report(outcome, FACTS, tmp_path, as_json=False) == 1
    said = capsys.readouterr().err
    assert "no file \\x1b[2J.csv" in said and "\x1b" not in said
