"""Unlike runs for parity tests, and a seat that gives a trainer the pool's group."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.mesh import LauncherSeat, Mesh
from shoal.numerics import schedules
from shoal.training.run import resolve
from shoal.training.trainer import Trainer
from shoal.world import World

NUM_SAMPLES = 50


class GivenSeat(LauncherSeat):
    """A seat in a group that stands already and is not ours to leave."""

    def __init__(self, mesh: Mesh):
        super().__init__(World(mesh.rank, mesh.num_ranks, mesh.rank, mesh.num_ranks, "pool"))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.cell = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.cell(self.embed(tokens))[0])
        return out


def network(**changes: Any) -> shoal.Run:
    """Convolution, BatchNorm and dropout."""
    draws = torch.Generator().manual_seed(5)
    images = torch.randn(NUM_SAMPLES, 1, 6, 6, generator=draws)
    labels = torch.randint(0, 3, (NUM_SAMPLES,), generator=draws)
    run = shoal.Run(
        model=lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Flatten(),
            nn.Linear(64, 3),
        ),
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        data=shoal.data.tensors(images, labels),
        batch_size=12,
        steps=8,
    )
    return dataclasses.replace(run, **changes)


def broad() -> shoal.Run:
    """With a matrix that a codec packs."""
    return network(
        model=lambda: nn.Sequential(
            nn.Flatten(), nn.Linear(36, 64), nn.ReLU(), nn.Linear(64, 3, bias=False)
        )
    )


def clipped() -> shoal.Run:
    return network(clip=0.3, schedule=schedules.cosine(warmup=3))


def padded() -> shoal.Run:
    """The last batch of an epoch has 2 samples for 12 places, so some pieces are empty."""
    images = torch.randn(NUM_SAMPLES, 4, generator=torch.Generator().manual_seed(5))
    labels = images.sum(dim=1)
    return network(
        model=lambda: nn.Linear(4, 1),
        loss=lambda output, target: F.mse_loss(output[:, 0], target),
        data=shoal.data.tensors(images, labels),
        end="pad",
    )


def tokens() -> shoal.Run:
    """Tied weights, and a loss that is a sum over a number of tokens that differs by piece."""
    draws = torch.Generator().manual_seed(5)
    text = torch.randint(0, 11, (NUM_SAMPLES, 7), generator=draws)
    lengths = torch.randint(2, 7, (NUM_SAMPLES, 1), generator=draws)
    target = text[:, 1:].masked_fill(torch.arange(6) >= lengths, -1)

    def loss(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        sum_ = F.cross_entropy(
            logits.flatten(0, 1), target.flatten(), ignore_index=-1, reduction="sum"
        )
        return sum_, (target >= 0).sum()

    return network(model=Recurrent, loss=loss, data=shoal.data.tensors(text[:, :-1], target))


def train(mesh: Mesh, recipe: str, plan: str) -> dict[str, Any]:
    """Train on this rank; what came of it, and an evaluation at the end."""
    run: shoal.Run = RECIPES[recipe]()
    resolved = resolve(run, plan, mesh.num_ranks)
    with Trainer(run, resolved, GivenSeat(mesh)) as trainer:
        infos = list(trainer)
        answer = trainer.evaluate(run.data)
    return {
        "losses": [info.loss for info in infos],
        "norms": [info.norm for info in infos],
        "rates": [info.rate for info in infos],
        "steps": [info.step for info in infos],
        "bytes": sum(info.bytes_sent for info in infos),
        "model": trainer.model.state_dict(),
        "evaluation": answer,
    }


def check_same(found: Any, steps: int) -> None:
    """What `verify` found: so many steps, and the same bits."""
    assert found.exit_code == 0, found.errors
    assert found.verdict["passed"] and found.verdict["num_steps"] == steps
    assert found.verdict["identical"], found.errors


RECIPES = {
    "network": network,
    "broad": broad,
    "clipped": clipped,
    "padded": padded,
    "tokens": tokens,
}
