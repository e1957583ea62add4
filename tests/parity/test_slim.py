"""Runs with masks, with a teacher, and with rounding train under plans what one process does."""

import dataclasses
from pathlib import Path

import pytest
from safetensors.torch import save_model

from tests import zoo
from tests.parity.conftest import Verify

RECIPES = Path(__file__).with_name("slimmed.py")
full = pytest.mark.full
PLANS = (
    *("data=2", "data=2 zero=1", "data=2 zero=3", "pipeline=2", "data=2 sync=server servers=1"),
    *("data=2 local_steps=2", "data=2 recompute=blocks", "data=2 accumulate=2"),
)


@pytest.mark.parametrize(
    ("recipe", "plan"),
    [
        ("movement", "data=2"),
        ("taught", "pipeline=2"),
        *(
            pytest.param(recipe, plan, marks=full)
            for recipe in ("magnitude", "movement", "taught", "rounded")
            for plan in PLANS
            if (recipe, plan) not in (("movement", "data=2"), ("taught", "pipeline=2"))
        ),
        *(pytest.param("taught", plan, marks=full) for plan in ("tensor=2", "data=2 tensor=2")),
        *(pytest.param("taught_layers", p, marks=full) for p in ("data=2", "tensor=2")),
        *(pytest.param("pattern", plan, marks=full) for plan in ("data=2", "data=2 zero=3")),
        *(pytest.param("structured", plan, marks=full) for plan in ("data=2", "tensor=2")),
        pytest.param("taught_in_loaders", "data=2", marks=full),
    ],
)
@pytest.mark.timeout(300)
def test_a_plan_trains_the_same(verify: Verify, recipe: str, plan: str) -> None:
    found = verify(f"{RECIPES}:{recipe}", plan)
    assert found.exit_code == 0, (found.errors, found.verdict)


@pytest.mark.full
@pytest.mark.parametrize("plan", ["data=2 zero=3", "tensor=2", "data=2 sync=server servers=1"])
@pytest.mark.timeout(300)
def test_a_teacher_in_processes_of_its_own(verify: Verify, tmp_path: Path, plan: str) -> None:
    weights = tmp_path / "teacher.safetensors"
    save_model(dataclasses.replace(zoo.gpt(), seed=7).make_model(), str(weights))
    found = verify(f"{RECIPES}:taught_apart", plan, settings={"teacher": weights})
    assert found.exit_code == 0, (found.errors, found.verdict)


@pytest.mark.full
@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("magnitude", "a mask keeps the largest elements of a whole weight"),
        ("rounded", "its rounding looks at whole rows"),
    ],
)
def test_weights_that_must_be_whole_are_not_cut(verify: Verify, recipe: str, why: str) -> None:
    found = verify(f"{RECIPES}:{recipe}", "tensor=2")
    assert found.exit_code == 2
    assert f"{why}, and tensor=2 cuts weights" in found.errors
