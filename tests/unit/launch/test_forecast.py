"""What is surely too large is refused, with numbers, the nearest plan and a way out."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from shoal.cost.profile_index import profile_recipe, recall_profile
from shoal.cost.sizes import (
    ModelSizes,
    least_host_bytes,
    rank_sizes,
    sizes_of,
    sizes_without_memory,
)
from shoal.data.sources import tensors
from shoal.errors import PlanError
from shoal.launch import forecast
from shoal.launch.forecast import Forecast, refuse_too_large
from shoal.plans.plan import Plan
from shoal.training.options import Recipe
from shoal.training.run import Run, resolve

GB = 10**9


def run(width: int = 1000, calls: list[int] | None = None) -> Run:
    def model() -> nn.Module:
        if calls is not None:
            calls.append(1)
        return nn.Sequential(nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 4))

    return Run(
        model=model,
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named),
        data=tensors(torch.zeros(64, 4), torch.zeros(64, 4)),
        batch_size=8,
        steps=1,
    )


def test_sizes_are_those_of_the_model_and_take_no_memory() -> None:
    calls: list[int] = []
    small = run(calls=calls)
    found = sizes_without_memory(small)
    assert not calls, "it is made in a fork, which leaves no trace"
    model = small.make_model()
    num_bytes = sum(p.nbytes for p in model.parameters())
    count = len(list(model.parameters()))
    assert found == sizes_of(small, model)
    assert found == ModelSizes(num_bytes, num_bytes, 2 * num_bytes + 4 * count)
    assert sizes_without_memory(run(width=10**6)) is not None  # 4 TB


def test_a_model_that_needs_real_tensors_has_no_sizes() -> None:
    def model() -> nn.Module:
        return nn.Linear(int(torch.ones(1).item()) + 3, 4)

    assert sizes_without_memory(replace(run(), model=model)) is None


def test_what_cannot_fit_is_refused_with_a_plan_that_may() -> None:
    found = sizes_without_memory(run())
    assert found is not None
    plan = resolve(run(), "data=4", None)
    known = Forecast(plan, sizes=found)
    needs = least_host_bytes(found, plan)
    refuse_too_large(run(), known, limit=needs)
    with pytest.raises(PlanError) as refused:
        refuse_too_large(run(), known, limit=needs - 1)
    for words in ("at the least", "'data=4 zero=3 pieces=4' may fit", "--anyway", "optimizer"):
        assert words in str(refused.value)
    with pytest.raises(PlanError, match="No plan is known that fits"):
        refuse_too_large(run(), known, limit=1000)


def test_activations_of_a_large_model_are_found_from_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    monkeypatch.setattr(forecast, "LARGE", 1e-5)
    large = run()
    plan = resolve(large, "data=1", None)
    found = forecast.foresee(Recipe.named("nowhere:run", {}), large, plan)
    assert found.prediction is not None and found.cluster is None
    facts = found.facts()
    assert facts["from"] == "shapes" and facts["step_s"] is None
    assert facts["memory_bytes"] == found.prediction.memory.peak
    needs = found.prediction.host_bytes
    refuse_too_large(large, found, limit=needs)
    with pytest.raises(PlanError, match=r"by its shapes \(give or take 15%\)"):
        refuse_too_large(large, found, limit=needs // 2)


def test_nothing_is_refused_that_is_not_known() -> None:
    refuse_too_large(run(), Forecast(resolve(run(), "data=4", None)), limit=1)


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([0, 1, 2, 3]))
def test_a_higher_level_of_zero_never_needs_more(data: int, zero: int) -> None:
    """Than ranks that hold all of it apart."""
    sizes = ModelSizes(GB, GB, 2 * GB)
    plan = Plan(data=data, zero=zero if data > 1 else 0)
    apart = Plan(data=data, memory="apart") if data > 1 else plan
    assert least_host_bytes(sizes, plan) <= least_host_bytes(sizes, apart)
    shared = least_host_bytes(sizes, Plan(data=data))
    assert shared == least_host_bytes(sizes, apart) - (data - 1) * 3 * GB
    own = rank_sizes(sizes, plan)
    assert own.parameters <= GB and own.gradients <= GB and own.optimizer <= 2 * GB


def test_a_profile_is_found_until_the_recipe_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "recipe.py"
    file.write_text("def small(): ...\n")
    recipe = Recipe.named(f"{file}:small", {"steps": "9", "width": "2"})
    assert recall_profile(recipe) is None
    profile = profile_recipe(recipe, run(width=8))
    assert recall_profile(recipe) == profile
    assert recall_profile(Recipe.named(f"{file}:small", {"width": "2"})) == profile
    assert recall_profile(Recipe.named(f"{file}:small", {"width": "3"})) is None
    assert recall_profile(Recipe.named(f"{file}:large", {"width": "2"})) is None
    file.write_text("def small(): return 1\n")
    assert recall_profile(recipe) is None
