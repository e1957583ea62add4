"""ZeRO 1 to 3 train what one rank trains, also where parameters are awkward to shard."""

from itertools import product
from typing import Any

import pytest
import torch

from shoal.errors import PlanError
from shoal.testing.ranks import Pool
from shoal.training.build import build_model
from shoal.training.run import resolve
from tests.parity.shards import OPTIMIZERS, awkward, train

CLIP = 0.3
SHARDS = {1: "zero=1 memory=apart", 2: "zero=2 memory=apart", 3: "zero=3"}  # each alone
BY_ELEMENT = ("AdamW", "SGD", "Adagrad")  # the others look at whole tensors


def unlike(mine: dict[str, Any], one: dict[str, Any]) -> list[str]:
    """What has other bits in the two."""
    told, model = ("losses", "norms", "evaluation", "loss_scale"), one["model"]
    return [
        *(key for key in told if mine[key] != one[key]),
        *(name for name, tensor in mine["model"].items() if not torch.equal(tensor, model[name])),
    ]


def apart(mine: dict[str, Any], one: dict[str, Any], rel: float = 1e-4) -> list[str]:
    """What differs by more than another order of sums explains."""
    told = ["losses", "evaluation", *(["norms"] if one["norms"][0] is not None else [])]
    model = one["model"]
    return [
        *(["loss_scale"] if mine["loss_scale"] != one["loss_scale"] else []),
        *(key for key in told if mine[key] != pytest.approx(one[key], rel=rel)),
        *(
            name
            for name, tensor in mine["model"].items()
            if not torch.allclose(tensor, model[name], rtol=1e-3, atol=1e-4)
        ),
    ]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_any_optimizer_steps_on_its_shard(pool: Pool, optimizer: str) -> None:
    """Frozen, unused and scalar parameters and two groups are in each of these."""
    (one,) = pool.run(train, 1, optimizer, CLIP, 1.0, "pieces=2")
    for level in (1, 2):
        ranks = pool.run(train, 2, optimizer, CLIP, 1.0, f"data=2 {SHARDS[level]}")
        assert ranks[0]["model"].keys() == one["model"].keys()
        for rank in ranks:
            assert not unlike(rank, one)
        assert sum(rank["state"] for rank in ranks) <= one["state"] + 2 * 20, "step counters aside"
        assert max(rank["state"] for rank in ranks) < one["state"]


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize(
    "plan",
    [
        "zero=1 accumulate=2",
        "zero=2",
        pytest.param("zero=1 accumulate=3", marks=pytest.mark.full),
        pytest.param("zero=2 accumulate=2", marks=pytest.mark.full),
        pytest.param("zero=2 precision=fp16", marks=pytest.mark.full),
    ],
)
def test_on_one_host_ranks_share_what_would_be_sharded(
    pool: Pool, optimizer: str, plan: str
) -> None:
    """Adagrad's kernel takes no runs of elements: there each rank has a shard."""
    times = int(plan.partition("accumulate=")[2] or 1)
    keys = plan.partition("accumulate=")[0].partition(" ")[2]
    (one,) = pool.run(train, 1, optimizer, CLIP, 1.0, f"pieces={2 * times} {keys}")
    ranks = pool.run(train, 2, optimizer, CLIP, 1.0, f"data=2 {plan}")
    shards = optimizer == "Adagrad"
    for rank in ranks:
        assert not (apart if shards and plan == "zero=2 accumulate=2" else unlike)(rank, one)
        assert (rank["state"] < one["state"]) == shards


@pytest.mark.parametrize("num_pieces", [6, 12])
def test_many_pieces_are_added_where_all_read_them(pool: Pool, num_pieces: int) -> None:
    (one,) = pool.run(train, 1, "AdamW", CLIP, 1.0, f"pieces={num_pieces}")
    ranks = pool.run(train, 2, "AdamW", CLIP, 1.0, f"data=2 zero=2 pieces={num_pieces}")
    assert not any(apart(rank, one) for rank in ranks)


@pytest.mark.parametrize("optimizer", BY_ELEMENT)
def test_parameters_can_be_sharded_too(pool: Pool, optimizer: str) -> None:
    (one,) = pool.run(train, 1, optimizer, CLIP, 1.0, "pieces=2")
    ranks = pool.run(train, 2, optimizer, CLIP, 1.0, "data=2 zero=3")
    assert ranks[0]["model"].keys() == one["model"].keys()
    for rank in ranks:
        assert not apart(rank, one)


@pytest.mark.parametrize("optimizer", sorted(set(OPTIMIZERS) - set(BY_ELEMENT)))
@pytest.mark.parametrize("key", ["zero=3", "tensor=2", "offload=optimizer"])
def test_whole_tensors_are_not_cut(optimizer: str, key: str) -> None:
    run = awkward(optimizer, CLIP)
    with pytest.raises(PlanError, match=f"{optimizer} may look at a whole tensor .* and {key}"):
        build_model(run, resolve(run, f"data=2 {key}", None))


@pytest.mark.parametrize("level", [1, 2, 3])
def test_accumulating(pool: Pool, level: int) -> None:
    (one,) = pool.run(train, 1, "AdamW", None, 1.0, "pieces=4")
    for rank in pool.run(train, 2, "AdamW", None, 1.0, f"data=2 {SHARDS[level]} accumulate=2"):
        assert not (unlike if level == 1 else apart)(rank, one)


@pytest.mark.parametrize("level", [1, 2, 3])
def test_an_overflow_is_tried_again_by_all(pool: Pool, level: int) -> None:
    """The loss is so large that fp16's first scale cannot hold it."""
    plan = "precision=fp16 pieces=2"
    (one,) = pool.run(train, 1, "SGD", CLIP, 500.0, plan)
    (small,) = pool.run(train, 1, "SGD", CLIP, 1e-3, plan)
    assert one["loss_scale"] < small["loss_scale"], "there was an overflow"
    for rank in pool.run(train, 2, "SGD", CLIP, 500.0, f"data=2 {SHARDS[level]} precision=fp16"):
        assert not (unlike(rank, one) if level < 3 else apart(rank, one, rel=5e-3))


@pytest.mark.full
@pytest.mark.parametrize("num_ranks", [3, 4])
@pytest.mark.parametrize(
    ("optimizer", "level"), [*product(OPTIMIZERS, [1, 2]), *product(BY_ELEMENT, [3])]
)
def test_more_ranks(pool: Pool, optimizer: str, level: int, num_ranks: int) -> None:
    (one,) = pool.run(train, 1, optimizer, CLIP, 1.0, f"pieces={num_ranks}")
    for rank in pool.run(
        train, num_ranks, optimizer, CLIP, 1.0, f"data={num_ranks} {SHARDS[level]}"
    ):
        assert not (unlike if level < 3 else apart)(rank, one)
