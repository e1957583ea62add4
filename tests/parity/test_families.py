"""Models that people take from packages train under every kind of plan what one process would.

Each cell is a `shoal verify`, and ends the same or within the model's own rounding; what a plan
cannot do with a model it refuses, in a sentence.
"""

from pathlib import Path

import pytest

from shoal.testing.ranks import Pool
from tests.parity import families
from tests.parity.conftest import verify_in
from tests.parity.families import OTHERS, TRANSFORMERS

RECIPES = str(Path(__file__).with_name("families.py"))
NAMES = (*TRANSFORMERS, *OTHERS)
PLANS = (
    "data=2 accumulate=2",
    "data=2 zero=2",
    "data=2 zero=3",
    "tensor=2",
    "pipeline=2",
    "tensor=2 pipeline=2",
    "data=2 local_steps=2 outer=nesterov",
    "data=2 sync=server servers=2",
    "data=2 precision=bf16 recompute=blocks",
)
# What hooks take out of layers, for a loss or a head at the end, does not travel between stages.
REFUSED = {
    (model, plan): "made and did not return"
    for model in ("mixtral", "gpt_oss", "segformer")
    for plan in PLANS
    if "pipeline" in plan
}
# A dozen cells for the quick suite.
QUICK = {
    ("bloom", "data=2 precision=bf16 recompute=blocks"),
    ("mixtral", "tensor=2"),
    ("mamba", "pipeline=2"),
    ("modernbert", "data=2 sync=server servers=2"),
    ("t5", "data=2 zero=3"),
    ("marian", "pipeline=2"),
    ("resnet", "tensor=2"),
    ("wav2vec2", "data=2 zero=2"),
    ("clip", "data=2 accumulate=2"),
    ("quantized", "data=2 local_steps=2 outer=nesterov"),
    ("linformer", "data=2 zero=3"),
    ("tcn", "tensor=2"),
}


def test_there_are_as_many_as_promised() -> None:
    assert len(TRANSFORMERS) == 25 and len(OTHERS) == 10
    assert all(callable(getattr(families, name)) for name in NAMES)
    assert len(QUICK) == 12 and all(model in NAMES and plan in PLANS for model, plan in QUICK)


@pytest.mark.timeout(240)  # the first of them waits for the packages
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        pytest.param(
            model,
            plan,
            id=f"{model}-{plan.replace(' ', '-')}",
            marks=() if (model, plan) in QUICK else pytest.mark.full,
        )
        for model in NAMES
        for plan in PLANS
    ],
)
def test_a_model_under_a_plan(warm_pool: Pool, tmp_path: Path, model: str, plan: str) -> None:
    found = verify_in(warm_pool, tmp_path)(f"{RECIPES}:{model}", plan, steps=3)
    if refusal := REFUSED.get((model, plan)):
        assert found.exit_code == 2 and refusal in found.errors, found.errors
        return
    assert found.exit_code == 0, found.errors
    assert found.verdict["verdict"] in ("SAME", "WITHIN ROUNDING")
    assert found.verdict["num_steps"] == 3


@pytest.mark.full
@pytest.mark.parametrize("model", NAMES)
def test_none_is_large(model: str) -> None:
    made = getattr(families, model)().make_model()
    assert sum(p.numel() for p in made.parameters()) <= 1_000_000
