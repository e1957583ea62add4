"""Local steps through servers: in lockstep the bits of one process that plays all replicas."""

from pathlib import Path
from typing import Any

import pytest

ZOO = str(Path(__file__).parents[1] / "zoo.py")
UNLIKE = str(Path(__file__).with_name("unlike.py"))
# Each with a recipe and the steps, of which the last window is cut short.
QUICK = [
    ("data=3 sync=server servers=2 local_steps=3 outer=nesterov:0.5:0.8", f"{UNLIKE}:noisy", 8),
    ("data=2 sync=server servers=2 local_steps=4 codec=int4", f"{UNLIKE}:frozen", 10),
]
PLANS = [
    "data=2 sync=server local_steps=4",
    "data=4 sync=server servers=3 local_steps=8 outer=nesterov codec=int8",
    "data=4 sync=server servers=2 local_steps=7 outer=nesterov codec=bf16 accumulate=2",
    "data=2 sync=server local_steps=5 outer=nesterov codec=fp16 precision=bf16",
    "data=1 sync=server local_steps=4 outer=nesterov:0.5",
]


def check_same(found: Any, steps: int) -> None:
    assert found.exit_code == 0, found.errors
    assert found.verdict["passed"] and found.verdict["num_steps"] == steps
    assert found.verdict["identical"], found.errors


@pytest.mark.parametrize(("plan", "recipe", "steps"), QUICK)
def test_replicas_train_what_the_reference_does(
    verify: Any, plan: str, recipe: str, steps: int
) -> None:
    check_same(verify(recipe, plan, steps=steps), steps)


@pytest.mark.parametrize(
    ("plan", "recipe"),
    [
        ("data=2 sync=server servers=2 local_steps=3 staleness=any codec=int8", f"{UNLIKE}:unused"),
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


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("recipe", ["mlp", "cnn", "gpt"])
def test_many_steps(verify: Any, recipe: str, plan: str) -> None:
    check_same(verify(f"{ZOO}:{recipe}", plan, steps=18), 18)


@pytest.mark.full
@pytest.mark.parametrize("recipe", ["tied", "frozen", "unused", "double", "groups", "recurrent"])
def test_models_unlike_one_another(verify: Any, recipe: str) -> None:
    plan = "data=3 sync=server servers=2 local_steps=4 outer=nesterov codec=int8"
    check_same(verify(f"{UNLIKE}:{recipe}", plan, steps=11), 11)
