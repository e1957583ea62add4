"""Training through servers: in lockstep what one process trains, else what a replay of it does."""

from pathlib import Path
from typing import Any

import pytest

from tests.zoo import TEN

UNLIKE = str(Path(__file__).with_name("unlike.py"))
ZOO = str(Path(__file__).parents[1] / "zoo.py")
RECIPES = ["noisy", "tied", "frozen", "unused", "double", "groups", "weighted"]
IN_LOCKSTEP = {  # each with the recipe that meets it in the quick suite
    "data=2 sync=server": "laid_out",
    "data=2 sync=server servers=2": "noisy",
    "data=1 sync=server accumulate=2": "unused",
    "data=3 sync=server servers=2 accumulate=2": "groups",
    "data=2 sync=server precision=bf16": "frozen",
    "data=3 sync=server servers=2 precision=fp16": "loud",
    "data=2 sync=server servers=3": "lonely",  # more servers than there is to hold
    "data=2 sync=server recompute=blocks": "weighted",
    "data=3 sync=server servers=2 combine=median": "noisy",
    "data=4 sync=server combine=trimmed:0.2": "tied",
    "data=3 sync=server combine=median": "poisoned",
    "data=4 sync=server servers=2 combine=trimmed:0.3": "poisoned",
    "data=2 sync=server servers=2 copies=2": "tied",
    "data=4 sync=server servers=2 hosts=2": "groups",
    "data=6 sync=server hosts=3 accumulate=2": "weighted",
    "data=4 sync=server servers=3 hosts=2 precision=fp16": "loud",
    "data=3 sync=server servers=2 pieces=4 codec=fp16": "noisy",
}
APART = {
    "data=2 sync=server servers=2 staleness=1": "laid_out",
    "data=2 sync=server staleness=any": "noisy",
    "data=3 sync=server servers=2 staleness=1": "unused",
    "data=2 sync=server servers=2 staleness=2 damping=inverse rates=1:0.5": "groups",
    "data=2 sync=server servers=3 copies=3 staleness=any": "unused",
    "data=2 sync=server staleness=any accumulate=2 codec=bf16": "tied",
}
# Cells of the long matrix that are rightly refused: a recipe, words of its plan, and why.
PAIRS = "does not go with a loss that returns (sum, weight)"
REFUSED = {
    ("weighted", "combine=median"): (2, PAIRS),
    ("weighted", "combine=trimmed"): (2, PAIRS),
    # A worker whose own share weighs nothing has no step to make, and knows of no other share.
    ("weighted", "data=3 sync=server servers=2 staleness=1"): (1, "no sample of this replica's"),
    # Twelve pieces of twelve samples.
    ("noisy", "data=6 sync=server hosts=3 accumulate=2"): (1, "Expected more than 1 value per"),
}


def same(verify: Any, recipe: str, plan: str, steps: int) -> dict[str, Any]:
    found = verify(recipe, plan, steps=steps)
    assert found.exit_code == 0, found.errors
    assert found.verdict["passed"] and found.verdict["is_replay"] == ("staleness" in plan)
    verdict: dict[str, Any] = found.verdict
    return verdict


@pytest.mark.quick(
    "data=4 sync=server servers=3 hosts=2 precision=fp16-loud",
    "data=3 sync=server servers=2 pieces=4 codec=fp16-noisy",
    "data=2 sync=server servers=2-noisy",
    "data=4 sync=server servers=2 combine=trimmed:0.3-poisoned",
    "data=3 sync=server servers=2 combine=median-noisy",
    "data=2 sync=server servers=2 copies=2-tied",
    "data=2 sync=server precision=bf16-frozen",
)
@pytest.mark.parametrize(
    ("plan", "recipe"),
    [
        pytest.param(*case, marks=pytest.mark.full if "accumulate" in case[0] else ())
        for case in IN_LOCKSTEP.items()
    ],
)
def test_in_lockstep_it_is_what_one_process_trains(verify: Any, plan: str, recipe: str) -> None:
    verdict = same(verify, f"{UNLIKE}:{recipe}", plan, steps=5)
    assert verdict["identical"] or "precision" in plan


@pytest.mark.quick(
    "data=2 sync=server servers=3 copies=3 staleness=any-unused",
    "data=2 sync=server servers=2 staleness=2 damping=inverse rates=1:0.5-groups",
    "data=2 sync=server staleness=any accumulate=2 codec=bf16-tied",
)
@pytest.mark.parametrize(("plan", "recipe"), APART.items())
def test_else_it_is_what_its_pushes_and_pulls_make(verify: Any, plan: str, recipe: str) -> None:
    assert same(verify, f"{UNLIKE}:{recipe}", plan, steps=8)["identical"]


@pytest.mark.full
@pytest.mark.parametrize("by", ["adagrad", "momentum", "adam-foreach"])
def test_any_optimizer_steps_on_a_server(verify: Any, by: str) -> None:
    found = verify(
        f"{UNLIKE}:optimized", "data=2 sync=server servers=2", steps=5, settings={"by": by}
    )
    assert found.exit_code == 0, found.errors


def test_a_step_made_twice_is_caught(verify: Any) -> None:
    found = verify(
        f"{UNLIKE}:plain", "data=2 sync=server staleness=any", bug="applied twice", steps=5
    )
    assert found.exit_code == 1, found.errors
    assert found.verdict["first"]["what"] in ("weight", "loss")


@pytest.mark.full
@pytest.mark.parametrize("plan", [*IN_LOCKSTEP, *APART])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe(verify: Any, recipe: str, plan: str) -> None:
    for (refused, words), (exit_code, why) in REFUSED.items():
        if recipe == refused and words in plan:
            found = verify(f"{UNLIKE}:{recipe}", plan, steps=10)
            assert found.exit_code == exit_code and why in found.errors, found.errors
            return
    same(verify, f"{UNLIKE}:{recipe}", plan, steps=10)


@pytest.mark.full
@pytest.mark.parametrize(
    "plan", ["data=2 sync=server servers=2", "data=2 sync=server staleness=any"]
)
@pytest.mark.parametrize("model", TEN)
def test_every_model(verify: Any, model: str, plan: str) -> None:
    same(verify, f"{ZOO}:{model}", plan, steps=20)
