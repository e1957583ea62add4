"""Workers of parameter servers that are meshes of ranks, and push in every step.

In lockstep they train what one process does, to the bit where the ranks of a replica add up in its
order; out of lockstep what a replay of their pushes and pulls does.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.parity.runs import check_same

ZOO = str(Path(__file__).parents[1] / "zoo.py")
UNLIKE = str(Path(__file__).with_name("unlike.py"))
# Each with the recipe that meets it in the quick suite.
IN_LOCKSTEP = {
    "data=4 replicas=2 sync=server servers=2": f"{UNLIKE}:noisy",
    "data=2 replicas=1 sync=server accumulate=2": f"{UNLIKE}:groups",
    "data=4 replicas=2 sync=server": f"{UNLIKE}:tied",
    "data=2 pipeline=2 sync=server servers=2": f"{ZOO}:lstm",
    "data=4 pipeline=2 replicas=2 sync=server servers=2": f"{ZOO}:mlp",
    "data=1 pipeline=2 sync=server servers=4 codec=bf16": f"{ZOO}:mlp",
    "data=6 replicas=3 sync=server combine=median": f"{UNLIKE}:noisy",
    "data=4 replicas=2 sync=server precision=fp16": f"{UNLIKE}:loud",
}
WITHIN_ROUNDING = {  # also where a parameter's uses are in several stages, which are added up last
    "data=2 pipeline=2 microbatches=2 sync=server servers=2": f"{UNLIKE}:tied_across",
    "data=2 tensor=2 sync=server servers=2": f"{ZOO}:gpt",
    "data=2 tensor=2 pipeline=2 sync=server servers=4": f"{ZOO}:mlp",
}
APART = {
    "data=4 replicas=2 sync=server servers=2 staleness=1": f"{UNLIKE}:unused",
    "data=4 replicas=2 sync=server staleness=any damping=inverse rates=1:0.5": f"{UNLIKE}:groups",
    "data=2 pipeline=2 sync=server servers=4 staleness=any": f"{ZOO}:mlp",
}
APART_WITHIN_ROUNDING = {
    "data=2 pipeline=2 microbatches=2 sync=server servers=2 staleness=1": f"{UNLIKE}:tied_across",
    "data=2 pipeline=2 microbatches=2 sync=server servers=2 staleness=1 local_steps=3": (
        f"{UNLIKE}:tied_across"
    ),
    "data=2 tensor=2 sync=server servers=2 staleness=any": f"{ZOO}:gpt",
    "data=2 tensor=2 sync=server servers=4 staleness=1 local_steps=2": f"{ZOO}:gpt",
}


@pytest.mark.parametrize(("plan", "recipe"), IN_LOCKSTEP.items())
def test_in_lockstep_it_is_what_one_process_trains(verify: Any, plan: str, recipe: str) -> None:
    found = verify(recipe, plan, steps=6)
    if "precision" in plan:
        passes(found, 6)
    else:
        check_same(found, 6)


@pytest.mark.parametrize(("plan", "recipe"), WITHIN_ROUNDING.items())
def test_ranks_that_share_sums(verify: Any, plan: str, recipe: str) -> None:
    passes(verify(recipe, plan, steps=6), 6)


@pytest.mark.parametrize(("plan", "recipe"), APART.items())
def test_else_it_is_what_its_pushes_and_pulls_make(verify: Any, plan: str, recipe: str) -> None:
    found = verify(recipe, plan, steps=8)
    check_same(found, 8)
    assert found.verdict["is_replay"]


@pytest.mark.parametrize(("plan", "recipe"), APART_WITHIN_ROUNDING.items())
def test_ranks_that_share_sums_and_are_ahead_of_others(verify: Any, plan: str, recipe: str) -> None:
    found = verify(recipe, plan, steps=8)
    passes(found, 8)
    assert found.verdict["is_replay"]


def passes(found: Any, steps: int) -> None:
    assert found.exit_code == 0, found.errors
    assert found.verdict["passed"] and found.verdict["num_steps"] == steps
