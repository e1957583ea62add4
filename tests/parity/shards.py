"""Runs that are awkward to shard, for the tests of ZeRO, and the training of one on a rank."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shoal
from shoal.comm.mesh import Mesh
from shoal.training.run import resolve
from shoal.training.trainer import Trainer
from tests.parity.runs import GivenSeat, network

Named = list[tuple[str, nn.Parameter]]
WIDTH = 40  # a matrix has more than one block of a norm, so a cut may fall into it


class Awkward(nn.Module):
    """A frozen layer, one that is never used, a bare scalar, and matrices of unlike sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.idle, self.middle = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 2 * WIDTH)
        self.last, self.scale = nn.Linear(2 * WIDTH, 1), nn.Parameter(torch.ones(()))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.first(x).tanh()).tanh()
        out: Tensor = self.scale * self.last(self.middle(x).relu())
        return out


class Lamb(torch.optim.Optimizer):
    """Steps by the norm of each whole tensor, so no tensor may be cut."""

    def __init__(self, named: Any, lr: float = 0.01):
        super().__init__(named, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(0.9).add_(p.grad, alpha=0.1)
                trust = (p.norm() + 0.1) / (mean.norm() + 0.1)
                p.sub_(mean * trust * group["lr"])


def groups(named: Named) -> list[dict[str, Any]]:
    """Matrices with weight decay, the rest without and at another rate."""
    matrices = [(n, p) for n, p in named if p.dim() > 1 and p.requires_grad]
    rest = [(n, p) for n, p in named if p.dim() <= 1 and p.requires_grad]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "lr": 0.003}]


OPTIMIZERS: dict[str, Callable[[Named], torch.optim.Optimizer]] = {
    "AdamW": lambda named: torch.optim.AdamW(groups(named), lr=0.01),
    "SGD": lambda named: torch.optim.SGD(groups(named), lr=0.01, momentum=0.9, nesterov=True),
    "Adagrad": lambda named: torch.optim.Adagrad(
        groups(named), lr=0.01, initial_accumulator_value=0.1
    ),
    "Adafactor": lambda named: torch.optim.Adafactor(groups(named), lr=0.01),
    "Lamb": lambda named: Lamb(groups(named)),
}


def awkward(optimizer: str, clip: float | None, scale: float = 1.0) -> shoal.Run:
    """`scale` makes the loss, and so what fp16 may overflow on, larger."""
    inputs = torch.randn(50, 4, generator=torch.Generator().manual_seed(5))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return scale * (output[:, 0] - target).square().mean()

    return dataclasses.replace(
        network(),
        model=Awkward,
        loss=loss,
        optimizer=OPTIMIZERS[optimizer],
        data=shoal.data.tensors(inputs, inputs.sum(1).tanh()),
        clip=clip,
        steps=5,
    )


def train(
    mesh: Mesh, optimizer: str, clip: float | None, scale: float, plan: str
) -> dict[str, Any]:
    """Train on this rank; what came of it, with the whole model on rank 0."""
    run = awkward(optimizer, clip, scale)
    with Trainer(run, resolve(run, plan, mesh.num_ranks), GivenSeat(mesh)) as trainer:
        infos = list(trainer)
        answer = trainer.evaluate(run.data)
        state = sum(
            value.numel()
            for of_one in trainer.optimizer.state.values()
            for value in of_one.values()
            if isinstance(value, Tensor)
        )
        whole = {name: value.clone() for name, value in trainer.whole_model().items()}
    return {
        "losses": [info.loss for info in infos],
        "norms": [info.norm for info in infos],
        "evaluation": answer,
        "model": whole,
        "state": state,
        "loss_scale": trainer.loss_scale.value,
    }
