"""Local steps through servers out of lockstep: what their pushes and pulls make, played again.

In lockstep, and without servers: `test_outer.py`.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.parity.runs import check_same

ZOO = str(Path(__file__).parents[1] / "zoo.py")
UNLIKE = str(Path(__file__).with_name("unlike.py"))


@pytest.mark.parametrize(
    ("plan", "recipe"),
    [
        ("data=2 sync=server servers=2 local_steps=3 staleness=any codec=int8", f"{UNLIKE}:unused"),
        (
            "data=4 zero=1 replicas=2 sync=server servers=2 local_steps=3 staleness=1",
            f"{UNLIKE}:unused",
        ),
        (
            "data=2 pipeline=2 sync=server servers=4 local_steps=3 staleness=1 codec=int8",
            f"{ZOO}:mlp",
        ),
        pytest.param(
            "data=3 sync=server servers=2 local_steps=4 outer=nesterov staleness=1 damping=inverse",
            f"{UNLIKE}:groups",
            marks=pytest.mark.full,
        ),
    ],
)
def test_out_of_lockstep_it_is_what_its_pushes_and_pulls_make(
    verify: Any, plan: str, recipe: str
) -> None:
    found = verify(recipe, plan, steps=10)
    assert found.verdict["is_replay"]
    check_same(found, 10)


def test_a_short_window_at_the_end_has_no_momentum_and_others_keep_theirs(verify: Any) -> None:
    """Rank 0 comes with its last window, of two steps, before rank 1 with its first, of four."""
    plan = "data=2 sync=server local_steps=4 outer=nesterov staleness=any"
    check_same(verify(f"{UNLIKE}:plain", plan, bug="slow rank", steps=6), 6)


def test_a_rank_that_is_far_behind_is_not_waited_for_by_its_reader(verify: Any) -> None:
    """What it did first comes after all that rank 0 did, whose last step waits for it."""
    plan = "data=2 sync=server servers=2 local_steps=3 staleness=any"
    check_same(verify(f"{UNLIKE}:plain", plan, bug="slow rank", steps=8), 8)
