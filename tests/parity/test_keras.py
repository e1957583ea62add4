"""Keras 3 on torch under a plan trains what one process would have trained, or says why not."""

import json
import os
import subprocess
import sys
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


BACK_INTO_KERAS = """
import sys
import numpy, torch
import shoal
from shoal.training.recipe import load_recipe

run_dir, models, folder = sys.argv[1:]
# The file of the recipe chooses the back end of Keras.
model = shoal.load(run_dir, models, settings={"model": "attention"})
import keras

model.save(f"{folder}/model.keras")
model.save_weights(f"{folder}/model.weights.h5")
run = load_recipe(models, {"model": "attention"})
inputs = torch.stack([run.data[i][0] for i in range(16)])
again = keras.saving.load_model(f"{folder}/model.keras")
other = run.make_model()
other.load_weights(f"{folder}/model.weights.h5")
answers = numpy.load(f"{folder}/answers.npz")["output"]
with torch.no_grad():
    for kept in (model, again, other):
        numpy.testing.assert_array_equal(kept(inputs).numpy(), answers[:16])
"""


@pytest.mark.full
@pytest.mark.timeout(480)
def test_from_training_to_a_file_that_keras_loads(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    found = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}

    def python(*words: object) -> str:
        command = [sys.executable, *map(str, words)]
        done = subprocess.run(
            command, cwd=tmp_path, env=found, text=True, capture_output=True, timeout=110
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def shoal(*words: object) -> str:
        return python("-m", "shoal", *words)

    settings = ("--set", "model=attention", "--json")
    shoal("train", MODELS, *settings, "--plan", "data=2", "--run-dir", "run", "--set", "steps=3")
    use = (MODELS, *settings, "--from", "run", "--on-data", "train")
    alone, many = (json.loads(shoal("evaluate", *use, "--plan", f"data={n}")) for n in (1, 2))
    assert (alone["loss"], alone["samples"]) == (many["loss"], many["samples"])
    shoal("predict", *use, "--out", "answers.npz")
    python("-c", BACK_INTO_KERAS, "run", MODELS, ".")
