"""Data parallel: any number of ranks trains the bits that one rank trains."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from shoal.data.batches import Batches
from shoal.testing.ranks import Pool
from tests.parity.runs import RECIPES, train


def unlike(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What has other bits in the two."""
    told = ("steps", "losses", "norms", "rates", "evaluation")
    model = theirs["model"]
    return [
        *(key for key in told if mine[key] != theirs[key]),
        *(name for name in model if not torch.equal(mine["model"][name], model[name])),
    ]


@pytest.mark.quick("2-clipped", "3-tokens", "4-network")
@pytest.mark.parametrize("recipe", ["network", "clipped", "tokens"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_any_number_of_ranks_gives_the_same_bits(pool: Pool, recipe: str, num_ranks: int) -> None:
    (one,) = pool.run(train, 1, recipe, "pieces=12")
    for rank in pool.run(train, num_ranks, recipe, f"data={num_ranks} pieces=12"):
        assert not unlike(rank, one)
        assert rank["bytes"] > 0
    assert one["bytes"] == 0


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_short_last_batch(pool: Pool, num_ranks: int) -> None:
    (one,) = pool.run(train, 1, "padded", "pieces=4")
    for rank in pool.run(train, num_ranks, "padded", f"data={num_ranks} pieces=4"):
        assert not unlike(rank, one)


def test_accumulating_is_the_same_as_more_ranks(pool: Pool) -> None:
    (alone,) = pool.run(train, 1, "network", "accumulate=4")
    for rank in pool.run(train, 2, "network", "data=2 accumulate=2"):
        assert not unlike(rank, alone)
    for rank in pool.run(train, 4, "network", "data=4"):
        assert not unlike(rank, alone)


@pytest.mark.parametrize("recipe", ["clipped", "tokens"])
def test_sums_in_any_order_come_close(pool: Pool, recipe: str) -> None:
    (one,) = pool.run(train, 1, recipe, "pieces=6")
    for rank in pool.run(train, 3, recipe, "data=3 pieces=6 sums=ring"):
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-3)


def test_fp16_gives_the_same_bits(pool: Pool) -> None:
    (one,) = pool.run(train, 1, "network", "pieces=4 precision=fp16")
    for rank in pool.run(train, 2, "network", "data=2 pieces=4 precision=fp16"):
        assert not unlike(rank, one)


def test_one_rank_is_a_plain_loop(pool: Pool) -> None:
    """Written out without a line of Shoal's, but for the order of samples."""
    (trained,) = pool.run(train, 1, "padded", "pieces=1")
    run = RECIPES["padded"]()
    torch.manual_seed(run.seed)
    model = run.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = Batches(run.data, batch_size=12, seed=run.seed, end="pad")
    for step in range(8):
        samples = [run.data[int(i)] for i in batches.at(step).ids]
        inputs = torch.stack([sample[0] for sample in samples])
        target = torch.stack([torch.as_tensor(sample[1]) for sample in samples])
        loss = F.mse_loss(model(inputs)[:, 0], target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert trained["losses"][step] == pytest.approx(loss.item(), rel=1e-5)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(trained["model"][name], tensor, rtol=1e-4, atol=1e-6)


def test_local_sgd_ends_alike_on_all_ranks_and_sends_less(pool: Pool) -> None:
    every_step = pool.run(train, 2, "tokens", "data=2 memory=apart")
    first, second = pool.run(train, 2, "tokens", "data=2 local_steps=4")
    for name, tensor in first["model"].items():
        assert torch.equal(tensor, second["model"][name]), name
    assert first["bytes"] < every_step[0]["bytes"] / 2
