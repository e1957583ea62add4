"""A loop of one's own under plans that cut the model: what it keeps, and what it may change."""

from pathlib import Path

import pytest
import torch

from shoal.testing.ranks import Pool, RankError
from tests.parity.own_loops import differ, freeze, keep

PLANS = [
    ("data=2", 2),
    ("tensor=2", 2),
    pytest.param("pipeline=2", 2, marks=pytest.mark.full),
    pytest.param("data=2 zero=1", 2, marks=pytest.mark.full),
    pytest.param("data=2 zero=3", 2, marks=pytest.mark.full),
    pytest.param("data=2 tensor=2", 4, marks=pytest.mark.full),
    pytest.param("data=2 local_steps=4", 2, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("plan", "num_ranks"), PLANS)
def test_what_a_loop_keeps_is_restored_on_every_rank(
    pool: Pool, tmp_path: Path, plan: str, num_ranks: int
) -> None:
    whole = pool.run(keep, num_ranks, plan, str(tmp_path / "whole"), 99)
    pool.run(keep, num_ranks, plan, str(tmp_path / "parts"), 6)
    parts = pool.run(keep, num_ranks, plan, str(tmp_path / "parts"), 99)
    for one, other in zip(whole, parts, strict=True):
        assert one["rate"] == other["rate"] == pytest.approx(1e-2 / 16)
        assert all(map(torch.equal, one["tensors"], other["tensors"]))


def test_averages_of_another_cut_are_refused(pool: Pool, tmp_path: Path) -> None:
    pool.run(keep, 2, "tensor=2", str(tmp_path), 6)
    with pytest.raises(RankError, match="was saved in 2 parts"):
        pool.run(keep, 2, "data=2", str(tmp_path), 99)


@pytest.mark.parametrize("plan", ["data=2", pytest.param("data=2 zero=1", marks=pytest.mark.full)])
def test_a_layer_is_frozen_for_a_while(pool: Pool, plan: str) -> None:
    (one,) = pool.run(freeze, 1, "data=1 pieces=2")
    for rank in pool.run(freeze, 2, plan):
        assert all(map(torch.equal, one["tensors"], rank["tensors"]))


def test_under_a_cut_it_is_refused(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"2\.weight was frozen after the trainer began"):
        pool.run(freeze, 2, "tensor=2")


@pytest.mark.parametrize(
    ("plan", "num_ranks"),
    [
        ("tensor=2", 2),
        pytest.param("data=2 local_steps=4", 2, marks=pytest.mark.full),
        pytest.param("pipeline=2", 2, marks=pytest.mark.full),
        pytest.param("data=2 zero=3", 2, marks=pytest.mark.full),
        pytest.param("data=4", 4, marks=pytest.mark.full),
    ],
)
def test_another_rate_on_one_rank_is_named_under_any_plan(
    pool: Pool, plan: str, num_ranks: int
) -> None:
    said = rf"\['lr'\] is 0.25 on rank {num_ranks - 1} and 0.01 on rank 0"
    with pytest.raises(RankError, match=said):
        pool.run(differ, num_ranks, plan)
