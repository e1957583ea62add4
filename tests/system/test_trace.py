"""`shoal train --trace`: the spans of every rank, whole, nested and on one clock."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from shoal.testing.ranks import Pool
from tests.support.faults import Trained, start

RECIPE = f"{Path(__file__).with_name('tiny.py')}:line"
STEPS = range(3, 6)
SLACK_US = 1.0  # of rounding


def traced(pool: Pool, run_dir: Path, plan: str, recipe: str = RECIPE, **settings: Any) -> Trained:
    trained = start(
        pool, recipe, run_dir, plan=plan, settings=settings, options=["--trace", "3:5"]
    ).wait()
    assert trained.exit_code == 0, trained.errors
    return trained


def spans_of(trained: Trained) -> list[dict[str, Any]]:
    """All spans as complete events, with the checks that every trace must pass."""
    entries = json.loads((trained.run_dir / "trace" / "trace.json").read_text())
    named = {(e["pid"], e["tid"]) for e in entries if e["name"] == "thread_name"}
    begun: dict[int, dict[str, Any]] = {}
    spans = []
    for entry in entries:
        assert entry["ph"] in "MXbe" and isinstance(entry["pid"], int)
        if entry["ph"] != "M":
            assert (entry["pid"], entry["tid"]) in named and entry["ts"] > 0
        if entry["ph"] == "X":
            assert entry["dur"] >= 0
            spans.append(entry)
        elif entry["ph"] == "b":
            assert begun.setdefault(entry["id"], entry) is entry, "an id is used once"
        elif entry["ph"] == "e":
            first = begun.pop(entry["id"])
            assert entry["ts"] >= first["ts"] and entry["name"] == first["name"]
            spans.append({**first, "dur": entry["ts"] - first["ts"]})
    assert not begun, "all that began has ended"
    check_nested(spans)
    return spans


def check_nested(spans: list[dict[str, Any]]) -> None:
    """In a thread, what begins within a span ends within it."""
    by_thread: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        if span["cat"] != "collective":
            by_thread[span["pid"], span["tid"]].append((span["ts"], span["ts"] + span["dur"]))
    for found in by_thread.values():
        open_ends: list[float] = []
        for start_us, end_us in sorted(found, key=lambda s: (s[0], -s[1])):
            while open_ends and open_ends[-1] <= start_us + SLACK_US:
                open_ends.pop()
            assert not open_ends or end_us <= open_ends[-1] + SLACK_US
            open_ends.append(end_us)


def check_one_clock(spans: list[dict[str, Any]]) -> int:
    """No rank ends a collective before all of them have begun it. Returns how many there were."""
    together: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for span in spans:
        if (
            span["cat"] == "collective"
            and span["args"]["group"]
            and ":" not in span["args"]["group"]
        ):
            key = span["args"]["group"], span["args"]["number"]
            together[key].append((span["ts"], span["ts"] + span["dur"]))
    shared = [found for found in together.values() if len(found) > 1]
    for found in shared:
        assert max(begin for begin, _ in found) <= min(end for _, end in found) + SLACK_US
    return len(shared)


def names_of(spans: list[dict[str, Any]], rank: int) -> set[str]:
    return {span["name"] for span in spans if span["pid"] == rank}


PLANS = [
    ("data=2", 2),
    pytest.param("data=1", 1, marks=pytest.mark.full),
    pytest.param("data=2 accumulate=2", 2, marks=pytest.mark.full),
    pytest.param("data=2 zero=1", 2, marks=pytest.mark.full),
    pytest.param("data=2 zero=2", 2, marks=pytest.mark.full),
    pytest.param("data=2 zero=3", 2, marks=pytest.mark.full),
    pytest.param("tensor=2", 2, marks=pytest.mark.full),
    pytest.param("pipeline=2 accumulate=2", 2, marks=pytest.mark.full),
    pytest.param("data=2 local_steps=2", 2, marks=pytest.mark.full),
    pytest.param("data=2 sync=server servers=1", 2, marks=pytest.mark.full),
    pytest.param("data=2 sync=server servers=1 staleness=2", 2, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("plan", "num_ranks"), PLANS)
def test_every_rank_has_its_spans_on_one_clock(pool, tmp_path, plan, num_ranks) -> None:
    spans = spans_of(traced(pool, tmp_path / "run", plan))
    assert {span["pid"] for span in spans} == {*range(num_ranks)}
    for rank in range(num_ranks):
        names = names_of(spans, rank)
        assert {f"step {step}" for step in STEPS} == {n for n in names if n.startswith("step ")}
        assert {"load", "exchange", "update"} <= names
        if "pipeline" in plan:
            assert any(n.startswith(f"stage {rank} forward") for n in names)
            assert any(n.startswith(f"stage {rank} backward") for n in names)
        else:
            assert {"forward", "backward"} <= names and any(n.startswith("piece") for n in names)
    is_met = num_ranks > 1 and "staleness" not in plan
    num_shared = check_one_clock(spans)
    assert num_shared > 0 or not is_met, names_of(spans, 0)
