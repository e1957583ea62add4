"""Every model of the zoo under every plan trains what one process would have trained.

The quick suite walks a diagonal, so that each plan and each of the ten models is met; the long
matrix has every pair.
"""

from pathlib import Path
from typing import Any

import pytest

from shoal.testing.ranks import Pool
from tests.parity.conftest import OF_TRANSFORMERS, verify_in
from tests.zoo import MORE, TEN

ZOO = str(Path(__file__).parents[1] / "zoo.py")
TRANSFORMERS = ("gpt", "gpt2", "llama", "bert")
MOST_HELD = 0.6  # by a rank, of a transformer under tensor=2
# Each with the model that meets it in the quick suite.
PLANS = {
    "data=2 zero=1": "bert",
    "data=2 zero=2": "moe",
    "data=2 zero=3": "unet",
    "tensor=2": "gpt2",
    "pipeline=2": "towers",
    "pipeline=2 schedule=gpipe": "lstm",
    "pipeline=2 schedule=interleaved": "unet",
    "pipeline=2 schedule=zero-bubble": "mlp",
    "pipeline=2 schedule=zbv": "gpt",
    "data=2 tensor=2": "cnn",
    "data=2 pipeline=2": "cnn",
    "tensor=2 pipeline=2": "moe",
    "data=2 zero=3 tensor=2": "mlp",
    "data=2 zero=2 pipeline=2": "lstm",
    "data=2 tensor=2 pipeline=2": "gpt",
    "data=2 zero=1 tensor=2 accumulate=2": "llama",
    "data=2 zero=3 pipeline=2 recompute=blocks": "mlp",
    "tensor=2 pipeline=2 recompute=blocks": "gpt",
    "data=2 zero=1 offload=optimizer": "towers",
}
# Each is met with more beside it.
LONG = ("data=2 tensor=2", "tensor=2 pipeline=2", "tensor=2 pipeline=2 recompute=blocks")
FEW = ("data=2 zero=3", "tensor=2", "pipeline=2 schedule=zero-bubble", "data=2 zero=1 pipeline=2")


def same(verify: Any, model: str, plan: str, steps: int) -> None:
    found = verify(f"{ZOO}:{model}", plan, steps=steps)
    assert found.exit_code == 0, found.errors
    verdict = found.verdict
    assert verdict["passed"] and verdict["num_steps"] == steps
    if model in TRANSFORMERS and "tensor=2" in plan:
        assert verdict["held_share"] <= MOST_HELD, found.errors


def test_the_diagonal_meets_every_model() -> None:
    assert set(PLANS.values()) == set(TEN)


@pytest.mark.parametrize(
    ("plan", "model"),
    [
        pytest.param(plan, model, marks=pytest.mark.full if plan in LONG else ())
        for plan, model in PLANS.items()
        if model not in OF_TRANSFORMERS
    ],
)
def test_a_plan_trains_what_one_process_would(verify: Any, plan: str, model: str) -> None:
    same(verify, model, plan, steps=5)


@pytest.mark.timeout(240)  # the first of them waits for the package
@pytest.mark.parametrize(
    ("plan", "model"), [cell for cell in PLANS.items() if cell[1] in OF_TRANSFORMERS]
)
def test_so_does_one_of_transformers(
    warm_pool: Pool, tmp_path: Path, plan: str, model: str
) -> None:
    same(verify_in(warm_pool, tmp_path), model, plan, steps=5)


def test_a_tied_embedding_has_its_group_beside_the_others(verify: Any) -> None:
    """Two of four ranks hold it, and all four write the model at the end."""
    same(verify, "gpt", "pipeline=4", steps=2)


@pytest.mark.full
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("model", TEN)
def test_every_model_under_every_plan(verify: Any, model: str, plan: str) -> None:
    same(verify, model, plan, steps=20)


@pytest.mark.full
@pytest.mark.parametrize("plan", FEW)
@pytest.mark.parametrize("model", MORE)
def test_more_models_under_a_few_plans(verify: Any, model: str, plan: str) -> None:
    same(verify, model, plan, steps=20)
