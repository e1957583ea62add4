"""Evaluations: left where nobody would hear of them."""

import pytest
import torch
from torch import nn

import shoal
from shoal.errors import GroupLost
from shoal.training.evaluate import measure


def test_a_group_that_is_lost_ends_an_evaluation() -> None:
    inputs, calls = torch.randn(256, 4), 0

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return nn.functional.mse_loss(output, target)

    run = shoal.Run(
        model=lambda: nn.Linear(4, 1),
        loss=loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=shoal.data.tensors(inputs, inputs[:, :1]),
        batch_size=8,
        steps=2,
    )
    with shoal.trainer(run, plan="data=1") as trainer:
        measure(run, trainer.runner, run.data, trainer.mesh)
        assert calls == 256 / 8
        trainer.mesh.data.is_lost = lambda: calls == 256 / 8 + 3
        with pytest.raises(GroupLost):
            measure(run, trainer.runner, run.data, trainer.mesh)
        assert calls == 256 / 8 + 3
