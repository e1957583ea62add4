"""Keras 3 on torch under a plan trains what one process would have trained, or says why not."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# Not imported here, where it would look for another backend.
pytestmark = pytest.mark.skipif(find_spec("keras") is None, reason="keras is not installed")

MODELS = f"{Path(__file__).with_name('keras_models.py')}:run"
CELLS = [
    ("dense", "pipeline=2", ()),
    ("dense", "data=2", pytest.mark.full),
    ("dense", "data=2 zero=2", pytest.mark.full),
    ("attention", "data=2 zero=1", pytest.mark.full),
    ("attention", "pipeline=2 schedule=zbv", pytest.mark.full),
]


@pytest.mark.parametrize(
    ("model", "plan"), [pytest.param(model, plan, marks=marks) for model, plan, marks in CELLS]
)
def test_a_model_of_keras(verify: Any, model: str, plan: str) -> None:
    found = verify(MODELS, plan, steps=3, settings={"model": model})
    assert found.exit_code == 0 and found.verdict["identical"], found.errors


@pytest.mark.full
@pytest.mark.parametrize("plan", ["data=2 zero=3", "tensor=2"])
def test_parameters_that_layers_hold_are_not_replaced_unnoticed(verify: Any, plan: str) -> None:
    found = verify(MODELS, plan, steps=2)
    assert found.exit_code == 2, found.errors
    assert "dense/kernel in another way than through its module" in found.errors
