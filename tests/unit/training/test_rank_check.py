"""What ranks compare before they train: a difference is found, and nothing else is one."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal
from shoal.numerics import schedules
from shoal.training.build import build_model
from shoal.training.rank_check import facts_of, first_unlike_pair
from shoal.training.run import resolve

SCALE, RANK = 1.0, 0


def scaled(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) * SCALE


def knowing_its_rank(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target) if RANK >= 0 else output.sum()


def closed_over(scale: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, target: scale * F.mse_loss(output, target)


class Scaled(nn.Module):
    def __init__(self, scale: float):
        super().__init__()
        self.layer, self.scale = nn.Linear(1, 1), scale

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.layer(x) * self.scale
        return answer


def run_of(**changes: Any) -> shoal.Run:
    x = torch.linspace(-1, 1, 16)[:, None]
    run = shoal.Run(
        model=lambda: nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.1), nn.Linear(4, 1)),
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=shoal.data.tensors(x, x),
        batch_size=4,
        steps=3,
    )
    return dataclasses.replace(run, **changes)


def facts(plan: str = "data=2", **changes: Any) -> dict[str, str]:
    run = run_of(**changes)
    resolved = resolve(run, plan, 2)
    return facts_of(run, resolved, build_model(run, resolved).model)


def differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in {**one, **other} if one.get(name) != other.get(name)}


def sgd(**options: Any) -> Any:
    return lambda named: torch.optim.SGD(named, **options)


def noise(seed: int) -> TensorDataset:
    x = torch.randn(16, 1, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x)


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ({}, {"optimizer": sgd(lr=0.2)}, "optimizer.param_groups[0]['lr']"),
        ({}, {"optimizer": sgd(lr=0.1, momentum=0.9)}, "optimizer.param_groups[0]['momentum']"),
        ({}, {"optimizer": torch.optim.Adagrad}, "the optimizer"),
        ({}, {"loss": F.l1_loss}, "the code of Run.loss"),
        ({"loss": closed_over(1.0)}, {"loss": closed_over(2.0)}, "scale in Run.loss"),
        (
            {"loss": partial(F.huber_loss, delta=1.0)},
            {"loss": partial(F.huber_loss, delta=2.0)},
            "the arguments of Run.loss",
        ),
        ({"loss": nn.HuberLoss()}, {"loss": nn.HuberLoss(delta=2.0)}, "Run.loss.delta"),
        ({"loss": nn.MSELoss()}, {"loss": nn.MSELoss(reduction="sum")}, "Run.loss.reduction"),
        ({}, {"model": lambda: nn.Linear(1, 1)}, "the type and shape of weight"),
        ({}, {"model": lambda: nn.Linear(1, 1).bfloat16()}, "the type and shape of weight"),
        (
            {"model": partial(Scaled, 1.0)},
            {"model": partial(Scaled, 2.0)},
            "the model itself.scale",
        ),
        ({}, {"seed": 1}, "first value of 0.weight"),
        ({}, {"seed": 1}, "Run.seed"),
        ({}, {"batch_size": 8}, "Run.batch_size"),
        ({}, {"steps": 4}, "the number of steps"),
        ({}, {"clip": 1.0}, "Run.clip"),
        ({}, {"plan": "data=2 zero=1"}, "the plan"),
        (
            {"schedule": schedules.cosine(warmup=1)},
            {"schedule": schedules.cosine(warmup=2)},
            "warmup in Run.schedule",
        ),
        ({}, {"data": shoal.data.tensors(torch.ones(16, 1), torch.ones(16, 1))}, "the data"),
        ({"data": noise(0)}, {"data": noise(1)}, "sample 0"),
    ],
)
def test_a_difference_is_named(one: dict[str, Any], other: dict[str, Any], named: str) -> None:
    assert named in differing(facts(**one), facts(**other))


def test_a_dropout_and_a_global_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def dropping(p: float) -> Any:
        return lambda: nn.Sequential(nn.Linear(1, 1), nn.Dropout(p))

    assert "the model" in differing(facts(model=dropping(0.1)), facts(model=dropping(0.2)))
    before = facts(loss=scaled)
    monkeypatch.setitem(globals(), "SCALE", 2.0)
    assert differing(before, facts(loss=scaled)) == {"SCALE in Run.loss"}


def test_what_is_the_same_is_so_and_a_rank_may_know_its_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert facts() == facts()
    before = facts(loss=knowing_its_rank, schedule=schedules.one_cycle(), data=noise(0))
    monkeypatch.setitem(globals(), "RANK", 1)
    assert before == facts(loss=knowing_its_rank, schedule=schedules.one_cycle(), data=noise(0))


def test_looking_at_samples_changes_no_draw() -> None:
    class Random(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> Any:
            return torch.rand(1), torch.rand(1)

    run = run_of(data=Random())
    model = run.make_model()
    before = torch.random.get_rng_state()
    told = facts_of(run, resolve(run, "data=2", 2), model)
    assert torch.equal(before, torch.random.get_rng_state())
    assert not any(name.startswith("sample ") for name in told), "they are others each time"


def test_the_odd_one_is_the_one_that_few_agree_with() -> None:
    assert first_unlike_pair([1.0, 1.0, 1.0], [0, 1, 2]) is None
    assert first_unlike_pair([2.0, 1.0, 1.0], [0, 1, 2]) == (0, 1)
    assert first_unlike_pair([1.0, 2.0], [0, 1]) == (1, 0)
    assert first_unlike_pair([1.0, 5.0, 2.0, 5.0], [1, 3]) is None
