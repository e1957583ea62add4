"""A GAN that draws digits: a step of one's own, with two losses and two optimizers.

    shoal train examples/gan.py:small --plan "data=2"
    shoal verify examples/gan.py:small --plan "data=2 zero=1" --steps 8

What it shows: `Run(step=...)` makes a step of two phases, each with a loss, an optimizer and an
update of its own; draws of noise that are the same on any number of ranks; BatchNorm and dropout in
parts of the model that are called in both phases; and an evaluation by metrics alone. The digits
are 14x14, so that it takes some seconds on a CPU: `distance`, how far the mean drawn digit is from
the mean real one, falls from 5.7 to about 1, and `spread`, how much drawn ones differ from each
other, rises from 0.02 to above 0.1 (real ones: 0.17).
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

SIDE, NOISE = 14, 16


class GAN(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.generator = nn.Sequential(
            *(nn.Linear(NOISE, width), nn.BatchNorm1d(width), nn.ReLU()),
            *(nn.Linear(width, 2 * width), nn.BatchNorm1d(2 * width), nn.ReLU()),
            *(nn.Linear(2 * width, SIDE * SIDE), nn.Sigmoid()),
        )
        self.discriminator = nn.Sequential(
            *(nn.Linear(SIDE * SIDE, 2 * width), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
            *(nn.Linear(2 * width, width), nn.LeakyReLU(0.2)),
            nn.Linear(width, 1),
        )
        self.register_buffer("examples", torch.randn(64, NOISE))

    def draw(self, count: int) -> Tensor:
        drawn: Tensor = self.generator(torch.randn(count, NOISE))
        return drawn

    def forward(self, digits: Tensor) -> Tensor:
        """For evaluations: some drawn digits, always of the same noise."""
        drawn: Tensor = self.generator(self.examples)
        return drawn


def judged(logits: Tensor, as_real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(as_real)))


def discriminator_loss(model: GAN, digits: Tensor, target: Tensor) -> dict[str, Tensor]:
    real = judged(model.discriminator(digits), as_real=True)
    drawn = judged(model.discriminator(model.draw(len(digits)).detach()), as_real=False)
    return {"loss": real + drawn, "real": real, "drawn": drawn}


def generator_loss(model: GAN, digits: Tensor, target: Tensor) -> Tensor:
    return judged(model.discriminator(model.draw(len(digits))), as_real=True)


def step(batch: shoal.StepBatch) -> None:
    batch.minimize(discriminator_loss, of="discriminator")
    batch.minimize(generator_loss, of="generator")


def optimizer(named: list[tuple[str, nn.Parameter]]) -> shoal.Optimizers:
    def adam(part: str) -> torch.optim.Adam:
        own = [(n, p) for n, p in named if n.startswith(part)]
        return torch.optim.Adam(own, lr=1e-3, betas=(0.5, 0.999))

    return shoal.Optimizers(generator=adam("generator"), discriminator=adam("discriminator"))


def distance(drawn: Tensor, target: Tensor) -> Tensor:
    return (drawn.mean(0) - MEAN).norm()


def spread(drawn: Tensor, target: Tensor) -> Tensor:
    return drawn.std(0).mean()


images, labels = shoal.data.catalog.digits()
DIGITS = F.avg_pool2d(images, 2).flatten(1)
MEAN = DIGITS.mean(0)


def small(width: int = 64, steps: int = 400) -> shoal.Run:
    return shoal.Run(
        model=lambda: GAN(width),
        step=step,
        optimizer=optimizer,
        data=shoal.data.tensors(DIGITS, labels),
        evaluate=shoal.data.tensors(DIGITS[:1], labels[:1]),  # one call of the model
        metrics={"distance": distance, "spread": spread},
        evaluate_every=100,
        batch_size=64,
        steps=steps,
    )
