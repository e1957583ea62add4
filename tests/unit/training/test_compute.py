"""What passes through a recipe's code on its way out of a round."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.mesh import LauncherSeat
from shoal.errors import GroupLost
from shoal.training.run import Run, resolve
from shoal.training.trainer import Trainer
from shoal.world import World


class Wraps(nn.Module):
    """Makes an error of its own of whatever is raised inside."""

    def __init__(self, cause: Exception):
        super().__init__()
        self.inner, self.cause = nn.Linear(3, 1), cause

    def forward(self, x: Tensor) -> Tensor:
        try:
            raise self.cause
        except Exception as error:
            raise ValueError("it failed") from error


@pytest.mark.parametrize(
    ("cause", "seen"), [(GroupLost("a server is gone"), GroupLost), (KeyError("x"), ValueError)]
)
def test_a_group_that_is_lost_is_so_for_whoever_wraps_it_too(
    cause: Exception, seen: type[Exception]
) -> None:
    run = Run(
        model=lambda: Wraps(cause),
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=shoal.data.tensors(torch.randn(8, 3), torch.randn(8, 1)),
        batch_size=4,
        steps=2,
    )
    plan = resolve(run, "data=1", None)
    with pytest.raises(seen), Trainer(run, plan, LauncherSeat(World())) as trainer:
        next(iter(trainer))
