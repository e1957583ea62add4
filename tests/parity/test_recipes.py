"""Every plan trains what one process would have: the recipes that ship, and models unlike them.

With exact sums the bits are the same, and nothing less is accepted. The recipes' data comes from
the catalog's cache, which is filled through pip when it is empty.
"""

from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
UNLIKE = str(Path(__file__).with_name("unlike.py"))
SMALL: dict[str, dict[str, object]] = {
    "charlm": {"layers": 1, "width": 32, "length": 32, "batch_size": 12},
    "digits": {"channels": 4, "batch_size": 24},
    "spelling": {"width": 32, "batch_size": 24},
}
PLANS = [
    "data=2",
    "data=4",
    "data=2 accumulate=2",
    "data=2 local_steps=4",
    "data=2 precision=bf16",
    "data=3 pieces=6",
    "data=2 precision=fp16",
    "data=2 sums=ring",
]
QUICK = {("charlm", "data=4"), ("digits", "data=2 accumulate=2"), ("spelling", "data=3 pieces=6")}


def check_same(found: Any, plan: str, steps: int) -> None:
    assert found.exit_code == 0, found.errors
    assert found.verdict["passed"] and found.verdict["num_steps"] == steps
    if "ring" not in plan:
        assert found.verdict["identical"], found.errors
        assert "identical, bit for bit" in found.errors
        assert found.verdict["verdict"] == "SAME" and found.verdict["rounding"] == {}
        assert set(found.verdict["worst"].values()) == {0.0}


def cases(recipes: Any, plans: list[str], quick: set[tuple[str, str]]) -> list[Any]:
    """All pairs, those that are not quick marked as part of the long matrix."""
    return [
        pytest.param(
            recipe,
            plan,
            id=f"{recipe}-{plan.replace(' ', '-')}",
            marks=[] if (recipe, plan) in quick else [pytest.mark.full],
        )
        for recipe in recipes
        for plan in plans
    ]


@pytest.mark.parametrize(("recipe", "plan"), cases(SMALL, PLANS, QUICK))
def test_a_recipe_that_ships(verify: Any, recipe: str, plan: str) -> None:
    found = verify(f"{ROOT}/recipes/{recipe}.py:small", plan, steps=6, settings=SMALL[recipe])
    check_same(found, plan, 6)


MODELS = [
    "tied",
    "recurrent",
    "frozen",
    "unused",
    "named_inputs",
    "several_inputs",
    "double",
    "grouped_norm",
    "groups",
    "weighted",
    "noisy",
    "laid_out",
]
QUICK_MODELS = {
    ("laid_out", "data=3 pieces=6"),
    ("tied", "data=3 pieces=6"),
    ("frozen", "data=2 local_steps=4"),
    ("unused", "data=4"),
    ("double", "data=2 accumulate=2"),
    ("groups", "data=2 precision=fp16"),
    ("weighted", "data=4"),
    ("noisy", "data=2 sums=ring"),
    ("noisy", "data=2 precision=bf16"),
    ("noisy", "data=2 local_steps=4"),
}


@pytest.mark.quick(
    "tied-data=3-pieces=6",
    "unused-data=4",
    "groups-data=2-precision=fp16",
    "noisy-data=2-sums=ring",
    "frozen-data=2-local_steps=4",
)
@pytest.mark.parametrize(("model", "plan"), cases(MODELS, PLANS, QUICK_MODELS))
def test_a_model_unlike_the_recipes(verify: Any, model: str, plan: str) -> None:
    if model == "recurrent" and "precision" in plan:
        pytest.skip("torch has no LSTM in 16 bits on every CPU")
    check_same(verify(f"{UNLIKE}:{model}", plan), plan, 5)


COMPILED = ["whole", "whole-in-place", "blocks", "blocks-in-place"]
QUICK_COMPILED = {("whole", "data=2"), ("blocks-in-place", "data=2 zero=1")}


@pytest.mark.quick("whole-data=2")
@pytest.mark.parametrize(
    ("how", "plan"),
    cases(COMPILED, ["data=2", "data=2 zero=1", "data=2 zero=2", "data=2 zero=3"], QUICK_COMPILED),
)
def test_a_compiled_model(verify: Any, how: str, plan: str) -> None:
    settings = {"how": how, "backend": "aot_eager" if "zero=2" in plan else "eager"}
    found = verify(f"{UNLIKE}:compiled", plan, steps=3, settings=settings)
    assert found.exit_code == 0 and found.verdict["passed"], found.errors
    assert found.verdict["identical"] or "zero=3" in plan  # whose sums are FSDP2's


@pytest.mark.parametrize(
    ("recipe", "plan"),
    cases(["gaps"], ["data=2", "pipeline=2", "data=2 zero=3"], {("gaps", "pipeline=2")}),
)
def test_a_list_with_empty_places(verify: Any, recipe: str, plan: str) -> None:
    found = verify(f"{UNLIKE}:{recipe}", plan, steps=3)
    assert found.exit_code == 0 and found.verdict["passed"], found.errors


ODD_PLANS = [
    "pipeline=2",
    "pipeline=2 schedule=zbv recompute=blocks",
    "data=2 zero=3 pipeline=2 microbatches=2",
]


@pytest.mark.parametrize(
    ("recipe", "plan"), cases(["handed"], ODD_PLANS, {("handed", plan) for plan in ODD_PLANS[:2]})
)
def test_a_parameter_that_is_handed_on(verify: Any, recipe: str, plan: str) -> None:
    found = verify(f"{UNLIKE}:{recipe}", plan, steps=3)
    assert found.exit_code == 0 and found.verdict["passed"], found.errors


@pytest.mark.parametrize(
    ("pair", "plan"),
    cases(
        ["false", "true"],
        ["data=2", "data=3 pieces=6", "data=4", "data=2 accumulate=2", "data=2 sums=ring"],
        {("false", "data=4"), ("true", "data=3 pieces=6")},
    ),
)
def test_a_short_batch_at_the_end_of_an_epoch(verify: Any, pair: str, plan: str) -> None:
    """Of 52 samples the fifth batch of 12 has 4, fewer than the pieces of some plans."""
    check_same(verify(f"{UNLIKE}:padded", plan, steps=6, settings={"pair": pair}), plan, 6)


@pytest.mark.parametrize("end", ["wrap", "drop"])
@pytest.mark.full
def test_other_ends_of_an_epoch(verify: Any, end: str) -> None:
    found = verify(f"{UNLIKE}:noisy", "data=3", steps=6, settings={"end": end})
    check_same(found, "data=3", 6)


@pytest.mark.parametrize(
    ("by", "plan"),
    cases(
        ["adagrad", "momentum", "rmsprop", "adam-foreach"],
        ["data=2", "data=2 local_steps=4"],
        {("rmsprop", "data=2"), ("adam-foreach", "data=2 local_steps=4")},
    ),
)
def test_an_optimizer(verify: Any, by: str, plan: str) -> None:
    check_same(verify(f"{UNLIKE}:optimized", plan, settings={"by": by}), plan, 5)
