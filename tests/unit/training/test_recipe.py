"""Recipes by name, and values set from outside."""

import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import RecipeError, UsageError
from shoal.training.recipe import find_recipe, load_recipe, parameters_of, provenance

TEXT = '''"""A recipe for tests."""
import shoal
import torch

number = 3

def small(width: int = 4, rate: float = 0.1, name: str = "a", flag: bool = False,
          depth: int | None = None, guessed=2) -> shoal.Run:
    run = shoal.Run(
        model=lambda: torch.nn.Linear(width, 1),
        loss=lambda output, target: output.mean(),
        optimizer=lambda named: torch.optim.SGD(named, lr=rate),
        data=[(torch.zeros(width), 0.0)] * 8,
        batch_size=2,
        steps=5,
    )
    small.given = (width, rate, name, flag, depth, guessed)
    return run

def raises() -> shoal.Run:
    raise ZeroDivisionError("of its own")

def other() -> int:
    return 3
'''


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "recipe_for_tests.py"
    path.write_text(TEXT)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return f"{path}:small"


def test_defaults(spec: str) -> None:
    run = load_recipe(spec, {})
    assert (run.batch_size, run.steps) == (2, 5)
    assert sys.modules["recipe_recipe_for_tests"].small.given == (4, 0.1, "a", False, None, 2)


def test_parameters_are_read_by_their_types(spec: str) -> None:
    given = {
        "width": "3",
        "rate": "1e-3",
        "name": "7",
        "flag": "true",
        "depth": "2",
        "guessed": "5",
    }
    load_recipe(spec, given)
    assert sys.modules["recipe_recipe_for_tests"].small.given == (3, 1e-3, "7", True, 2, 5)
    load_recipe(spec, {"depth": "none"})
    assert sys.modules["recipe_recipe_for_tests"].small.given[4] is None


def test_fields_of_the_run_come_after_parameters(spec: str) -> None:
    run = load_recipe(spec, {"steps": "9", "seed": "4", "clip": "0.5", "width": "2"})
    assert (run.steps, run.seed, run.clip) == (9, 4, 0.5)
    epochs = load_recipe(spec, {"epochs": "2"})
    assert (epochs.steps, epochs.epochs, epochs.num_steps()) == (None, 2, 8)


def test_provenance_says_where_each_value_came_from(spec: str) -> None:
    settings = {"steps": "9"}
    told = provenance(load_recipe(spec, settings), settings)
    assert told["steps"] == {"value": 9, "from": "--set"}
    assert told["batch_size"] == {"value": 2, "from": "recipe"}
    assert told["seed"] == {"value": 0, "from": "default"}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"widht": "3"}, "Did you mean 'width'"),
        ({"width": "three"}, "'three' is not int"),
        ({"flag": "perhaps"}, "not bool"),
        ({"steps": "0"}, "steps=0 must be a whole number"),
        ({"loss": "x"}, "neither"),
    ],
)
def test_wrong_settings_are_refused(spec: str, settings: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_recipe(spec, settings)


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        (":smal", UsageError, "Did you mean 'small'"),
        (":number", UsageError, "is a int"),
        (":other", UsageError, "returned a int"),
        (":raises", RecipeError, "ZeroDivisionError: of its own"),
    ],
)
def test_wrong_recipes_are_told_apart(spec: str, name: str, kind: type, words: str) -> None:
    with pytest.raises(kind, match=words):
        load_recipe(spec.replace(":small", name), {})


@pytest.mark.parametrize("spec_text", ["", "file.py", ":small", "no_such_module:f", "absent.py:f"])
def test_names_that_lead_nowhere(spec_text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UsageError):
        find_recipe(spec_text)


def test_a_file_that_does_not_load_is_the_recipes_error(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "broken_for_tests.py"
    path.write_text("x = 1 / 0\n")
    with pytest.raises(RecipeError, match="ZeroDivisionError"):
        find_recipe(f"{path}:f")
    sys.modules.pop("broken_for_tests", None)


def test_a_recipe_of_a_notebook_lacks_the_names_of_its_annotations() -> None:
    """It comes by cloudpickle, with the globals that its code uses and no others."""
    text = "def small(width: 'int' = 4, like: 'Elsewhere' = None, given: 'list[float]' = ()): ..."
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(text, space)
    types = parameters_of(space["small"], "notebook:small")
    assert types == {"width": int, "like": str, "given": list[float]}
    space["small"].__module__ = "mine"
    with pytest.raises(UsageError, match=r"annotation of mine:small cannot be read.*Elsewhere"):
        parameters_of(space["small"], "mine:small")


def test_a_password_is_not_set() -> None:
    """What is set stands in run.json; a URL with a user alone, or without one, may."""
    with pytest.raises(UsageError, match=r"--set url: mongodb://db/x was given with a") as refused:
        load_recipe(lambda url: None, {"url": "mongodb://reader:hunter2@db/x"})
    assert "hunter2" not in str(refused.value)
    for url in ("mongodb://reader@db/x", "s3://bucket/a:b", "a:b@c"):
        with pytest.raises(UsageError, match=r"returned a NoneType"):
            load_recipe(lambda url: None, {"url": url})
