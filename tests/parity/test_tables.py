"""Tables on servers: in lockstep the bits of one process, by every optimizer that takes rows."""

from pathlib import Path
from typing import Any

import pytest

TABLED = str(Path(__file__).with_name("tabled.py"))
QUICK = {
    "rowwise": "data=2 sync=server servers=2",
    "sgd": "data=2 sync=server precision=fp16",  # clipped, and with a schedule
    "seldom": "data=3 sync=server servers=2",
    "lazy": "data=2 sync=server servers=2",
    "often": "data=2 sync=server servers=2",
    "bags": "data=2 sync=server servers=2",
    "factors": "data=2 sync=server servers=2",  # no layers
}
FULL = [
    ("adam", "data=2 sync=server servers=2"),
    ("adagrad", "data=3 sync=server servers=2"),
    ("rowwise", "data=1 accumulate=3"),
    ("rowwise", "data=2 sync=server servers=3 accumulate=3"),
    ("sgd", "data=1 sync=server accumulate=2"),
    ("seldom", "data=2 sync=server recompute=blocks"),
    ("lazy_adam", "data=2 sync=server servers=3"),
    ("lazy_adagrad", "data=3 sync=server servers=2"),
    ("lazy_sgd", "data=2 sync=server"),
    ("lazy", "data=1 accumulate=3"),
    ("rowwise", "data=2 sync=server servers=3 copies=2"),
]


@pytest.mark.quick(
    "rowwise-data=2 sync=server servers=2",
    "seldom-data=3 sync=server servers=2",
    "lazy-data=2 sync=server servers=2",
    "bags-data=2 sync=server servers=2",
)
@pytest.mark.parametrize(
    ("recipe", "plan"),
    [*QUICK.items(), *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)],
)
def test_it_is_what_one_process_trains(verify: Any, recipe: str, plan: str) -> None:
    found = verify(f"{TABLED}:{recipe}", plan, steps=5)
    assert found.exit_code == 0, found.errors
    assert found.verdict["identical"]


def test_a_run_out_of_lockstep_cannot_be_played_again(verify: Any) -> None:
    found = verify(f"{TABLED}:sgd", "data=2 sync=server staleness=any")
    assert found.exit_code != 0
    assert "Verify without staleness" in found.errors


@pytest.mark.parametrize("bug", ["a row forgotten", "rows before the step"])
def test_a_wrong_lookup_is_caught(verify: Any, bug: str) -> None:
    found = verify(f"{TABLED}:sgd", "data=2 sync=server servers=2", bug=bug)
    assert found.exit_code == 1, found.errors


def test_a_large_lazy_table_is_not_compared(verify: Any) -> None:
    found = verify(f"{Path(__file__).with_name('large.py')}:lazy", "data=2 sync=server")
    assert found.exit_code != 0
    assert "Make it smaller, 256 MB at the most" in found.errors
