"""Callbacks under plans: what they measure, change and keep is that of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.checkpoint.find import list_steps
from shoal.checkpoint.load import CheckpointReader
from shoal.errors import PlanError
from shoal.storage.object_store import open_store
from shoal.testing.ranks import Pool
from shoal.training.run import resolve
from tests.parity.callback_runs import run_of, train

EXACT = [
    ("data=2", 2, 2),
    pytest.param("data=2 zero=1", 2, 2, marks=pytest.mark.full),
    pytest.param("data=2 zero=2", 2, 2, marks=pytest.mark.full),
    pytest.param("pipeline=2", 2, 4, marks=pytest.mark.full),
]
ROUNDED = [
    ("data=2 zero=3", 2, 2),
    pytest.param("tensor=2", 2, 1, marks=pytest.mark.full),
    pytest.param("data=2 tensor=2", 4, 2, marks=pytest.mark.full),
]


def averages(directory: Path) -> dict[str, torch.Tensor]:
    store = open_store(directory)
    opened = CheckpointReader(store, list_steps(store)[0])
    return {name: opened.whole(name) for name in opened if name.startswith("ema.")}


def both(pool: Pool, tmp_path: Path, plan: str, num_ranks: int, pieces: int) -> list[Any]:
    """One process and a plan: what rank 0 has, and the averages in the last checkpoint."""
    found = []
    for name, given, count in (("one", f"data=1 pieces={pieces}", 1), ("all", plan, num_ranks)):
        first = pool.run(train, count, given, str(tmp_path / name))[0]
        found.append(first | {"ema": averages(tmp_path / name)})
    return found


@pytest.mark.parametrize(("plan", "num_ranks", "pieces"), EXACT)
def test_callbacks_do_the_same_bit_for_bit(
    pool: Pool, tmp_path: Path, plan: str, num_ranks: int, pieces: int
) -> None:
    one, other = both(pool, tmp_path, plan, num_ranks, pieces)
    for name in ("losses", "parts", "evaluations", "rate", "step"):
        assert one[name] == other[name], name
    assert one["rate"] < 1e-2, "no plateau was reached"
    for name in ("model", "ema"):
        assert one[name].keys() == other[name].keys()
        assert all(torch.equal(one[name][key], other[name][key]) for key in one[name])


@pytest.mark.parametrize(("plan", "num_ranks", "pieces"), ROUNDED)
def test_callbacks_do_the_same_up_to_rounding(
    pool: Pool, tmp_path: Path, plan: str, num_ranks: int, pieces: int
) -> None:
    one, other = both(pool, tmp_path, plan, num_ranks, pieces)
    assert one["rate"] == other["rate"] < 1e-2
    for own, theirs in zip(one["parts"], other["parts"], strict=True):
        assert own == pytest.approx(theirs, rel=1e-3)
    for own, theirs in zip(one["evaluations"], other["evaluations"], strict=True):
        assert own.keys() >= {"loss", "absolute", "ema_loss"}
        assert own == pytest.approx(theirs, rel=1e-3)
    for name in ("model", "ema"):
        assert one[name].keys() == other[name].keys()
        for key in one[name]:
            assert torch.allclose(one[name][key], other[name][key], rtol=1e-3, atol=1e-5), key


@pytest.mark.parametrize(
    ("plan", "num_ranks"),
    [
        ("data=2", 2),
        pytest.param("data=2 zero=3", 2, marks=pytest.mark.full),
        pytest.param("tensor=2", 2, marks=pytest.mark.full),
        pytest.param("pipeline=2", 2, marks=pytest.mark.full),
    ],
)
def test_what_callbacks_keep_goes_on_with_the_same_bits(
    pool: Pool, tmp_path: Path, plan: str, num_ranks: int
) -> None:
    whole = pool.run(train, num_ranks, plan, str(tmp_path / "whole"))[0]
    first = pool.run(train, num_ranks, plan, str(tmp_path / "parts"), 8)[0]
    assert first["step"] == 8
    rest = pool.run(train, num_ranks, plan, str(tmp_path / "parts"))[0]
    assert first["losses"] + rest["losses"] == whole["losses"]
    assert first["evaluations"] + rest["evaluations"] == whole["evaluations"]
    own, other = averages(tmp_path / "parts"), averages(tmp_path / "whole")
    assert own.keys() == other.keys() and all(own[name].equal(other[name]) for name in own)


def test_an_average_goes_on_under_another_plan(pool: Pool, tmp_path: Path) -> None:
    """Saved in parts, since each rank holds a shard of it, and taken whole."""
    pool.run(train, 2, "data=2 zero=3", str(tmp_path), 8)
    before = averages(tmp_path)
    one = pool.run(train, 1, "data=1 pieces=2", str(tmp_path))[0]
    assert one["step"] == 18 and averages(tmp_path).keys() == before.keys()
    model = shoal.load(tmp_path, run_of(), weights="ema")
    for name, p in model.named_parameters():
        assert torch.equal(p, averages(tmp_path)[f"ema.{name}"])


@pytest.mark.parametrize(
    ("callback", "plan", "said"),
    [
        (shoal.callbacks.EMA(), "data=2 sync=server", "EMA does not go with sync=server"),
        (shoal.callbacks.EMA(), "data=2 local_steps=2", "EMA does not go with local_steps=2"),
        (shoal.callbacks.Freeze("0.*"), "tensor=2", "Freeze does not go with tensor=2"),
        (shoal.callbacks.Freeze("0.*"), "data=2 zero=3", "Freeze does not go with zero=3"),
        (shoal.Callback(), "data=2 sync=server staleness=2", "staleness=2 with sync=server does"),
    ],
)
def test_plans_that_a_callback_cannot_follow_are_refused(
    callback: Any, plan: str, said: str
) -> None:
    with pytest.raises(PlanError, match=said):
        resolve(run_of(callbacks=[callback]), plan, 2)
