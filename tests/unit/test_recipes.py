"""Each recipe that ships builds a Run whose first step can be made, on a small stand-in cache."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.data import catalog
from shoal.data.batches import Batches
from shoal.data.pieces import pieces_in_order
from shoal.errors import ShoalError
from shoal.storage.files import write_hashed
from shoal.training.run import Run, call_model, objective

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(autouse=True)
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache with data of the true form, and little of it."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    numbers = np.random.default_rng(0)
    letters = numbers.integers(0, 4, 100_000, dtype=np.uint8)
    pixels = numbers.integers(0, 256, (700, 784), dtype=np.uint8)
    labels = (np.arange(700) % 10).astype(np.uint8)[:, None]
    words = ["cat K AE1 T", "read R EH1 D", "read R IY1 D", "a.b AH0", "it's IH1 T S"] * 30
    contents = {
        "shakespeare-text-0.6": json.dumps(" abc").encode() + b"\n" + letters.tobytes(),
        "digits-0.25.0": np.hstack([pixels, labels]).tobytes(),
        "spelling-1.1.3": "\n".join(words).encode(),
        "ratings-1.2.0": numbers.integers(1, 6, (800, 4), dtype=np.int32).tobytes(),
    }
    for name, body in contents.items():
        write_hashed(tmp_path / f"{name}.bin", catalog._MAGIC, body)


def recipe(name: str) -> Callable[..., Run]:
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", RECIPES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    build: Callable[..., Run] = module.small
    return build


@pytest.mark.parametrize("name", ["charlm", "digits", "spelling", "movielens"])
def test_a_recipe_makes_a_step_and_an_evaluation(name: str) -> None:
    run = recipe(name)()
    assert isinstance(run, Run)
    model = run.make_model()
    piece = Batches(run.data, batch_size=run.batch_size, num_pieces=4).at(0).piece(3)
    goal = objective(run, call_model(model, piece.inputs), piece)
    goal.tensor.backward()
    assert all(p.grad is not None for p in model.parameters())
    run.make_optimizer(model).step()
    model.eval()
    held_out = pieces_in_order(run.evaluate, 2)[0]
    for metric in run.metrics.values():
        answer = metric(call_model(model, held_out.inputs), held_out.target)
        share = answer[0] / answer[1] if isinstance(answer, tuple) else answer
        assert 0 <= float(share) <= 1


def test_charlm_starts_at_the_entropy_of_its_alphabet_and_ties_its_head() -> None:
    run = recipe("charlm")(layers=1, width=32, heads=2, length=16)
    model = run.make_model()
    assert sum(name.endswith("head.weight") for name, _ in model.named_parameters()) == 0
    piece = Batches(run.data, batch_size=run.batch_size).at(0).piece(0)
    loss = run.loss(call_model(model, piece.inputs), piece.target)
    assert float(loss.detach()) == pytest.approx(np.log(4), abs=0.2)


def test_charlm_refuses_heads_that_do_not_divide_the_width() -> None:
    with pytest.raises(ShoalError, match="width=128 cannot be shared by 3 heads"):
        recipe("charlm")(heads=3)


def test_spelling_counts_no_padding() -> None:
    """The loss of two halves adds up to the loss of the whole, sum and weight."""
    run = recipe("spelling")(width=8)
    model = run.make_model()
    batch = Batches(run.data, batch_size=32, num_pieces=2).at(0)
    whole = Batches(run.data, batch_size=32).at(0).piece(0)
    with torch.no_grad():
        parts = [run.loss(call_model(model, p.inputs), p.target) for p in map(batch.piece, (0, 1))]
        total, weight = run.loss(call_model(model, whole.inputs), whole.target)
    assert weight == sum(part[1] for part in parts)
    assert torch.allclose(total, sum(part[0] for part in parts))
    # cat and it's have three and three phonemes; each word ends in an edge that counts too.
    assert weight <= 4 * 32
