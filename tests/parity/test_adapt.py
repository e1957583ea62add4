"""Runs that train a part of a model, at several rates, or adapters alone, under plans."""

from pathlib import Path

import pytest

from tests.parity.conftest import Verify

RECIPES = Path(__file__).with_name("adapted.py")
ROOT = Path(__file__).parents[2]
full = pytest.mark.full
PLANS = (
    *("data=2", "data=2 zero=1", "data=2 zero=2", "data=2 zero=3", "pipeline=2", "tensor=2"),
    *("data=2 sync=server servers=1", "data=2 local_steps=2", "data=2 recompute=blocks"),
    *("data=2 accumulate=2", "data=2 zero=1 offload=optimizer"),
)


@pytest.mark.parametrize(
    ("recipe", "plan"),
    [
        ("frozen_layers", "data=2 zero=1"),
        *(
            pytest.param(recipe, plan, marks=full)
            for recipe in ("frozen_layers", "with_rates", "lora", "lora_dropout")
            for plan in PLANS
            if (recipe, plan) != ("frozen_layers", "data=2 zero=1")
        ),
    ],
)
@pytest.mark.timeout(300)
def test_a_plan_trains_the_same(verify: Verify, recipe: str, plan: str) -> None:
    found = verify(f"{RECIPES}:{recipe}", plan)
    assert found.exit_code == 0, (found.errors, found.verdict)


@full
@pytest.mark.timeout(300)
def test_weights_that_others_trained(verify: Verify) -> None:
    found = verify(f"{ROOT}/recipes/plays.py:small", "data=2", steps=2)
    assert found.exit_code == 0, (found.errors, found.verdict)
