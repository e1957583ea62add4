"""Small runs whose steps are their own: a GAN, and an actor with a critic on a common trunk."""

import dataclasses
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.mesh import Mesh
from shoal.errors import ShoalError
from shoal.training.run import resolve
from shoal.training.trainer import Trainer
from tests.parity.runs import GivenSeat

NUM_SAMPLES, NOISE, SIZE = 48, 3, 5


class GAN(nn.Module):
    """BatchNorm in what draws, dropout in what judges."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, SIZE)
        )
        self.discriminator = nn.Sequential(
            nn.Linear(SIZE, 8), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(8, 1)
        )

    def forward(self, real: Tensor) -> Tensor:
        judged: Tensor = self.discriminator(real)
        return judged

    def draw(self, count: int) -> Tensor:
        drawn: Tensor = self.generator(torch.randn(count, NOISE))
        return drawn


def judged(logits: Tensor, as_real: bool) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(as_real)))


def discriminator_loss(model: GAN, real: Tensor, target: Tensor) -> dict[str, Tensor]:
    known = judged(model.discriminator(real), True)
    drawn = judged(model.discriminator(model.draw(len(real)).detach()), False)
    return {"loss": known + drawn, "real": known, "drawn": drawn}


def generator_loss(model: GAN, real: Tensor, target: Tensor) -> Tensor:
    return judged(model.discriminator(model.draw(len(real))), True)


def parts(named: Any, **rates: float) -> shoal.Optimizers:
    """An Adam for each part of the model, with a rate of its own."""
    named = list(named)
    return shoal.Optimizers(
        **{
            part: torch.optim.Adam([(n, p) for n, p in named if n.startswith(part)], lr=rate)
            for part, rate in rates.items()
        }
    )


def take_turns(batch: shoal.StepBatch) -> None:
    """The generator has every second step, and where the discriminator does well."""
    loss = batch.minimize(discriminator_loss, of="discriminator")
    if batch.step % 2 == 0 or loss < 1.2:
        batch.minimize(generator_loss, of="generator")


def gan(**changes: Any) -> shoal.Run:
    draws = torch.Generator().manual_seed(5)
    real = torch.randn(NUM_SAMPLES, SIZE, generator=draws) * 0.5 + 1
    run = shoal.Run(
        model=GAN,
        step=take_turns,
        optimizer=lambda named: parts(named, generator=1e-2, discriminator=5e-3),
        data=shoal.data.tensors(real, torch.zeros(NUM_SAMPLES)),
        metrics={"judged": lambda output, target: output.mean()},
        batch_size=12,
        steps=8,
    )
    return dataclasses.replace(run, **changes)


def clipped() -> shoal.Run:
    return gan(clip=0.1, schedule=shoal.schedules.cosine(warmup=3))


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(SIZE, 12), nn.Tanh())
        self.actor, self.critic = nn.Linear(12, 4), nn.Linear(12, 1)

    def forward(self, state: Tensor) -> Tensor:
        actions: Tensor = self.actor(self.trunk(state))
        return actions


def critic_loss(model: ActorCritic, state: Tensor, rewards: Tensor) -> Tensor:
    return F.mse_loss(model.critic(model.trunk(state))[:, 0], rewards.mean(1))


def actor_loss(model: ActorCritic, state: Tensor, rewards: Tensor) -> tuple[Tensor, Tensor]:
    """A sum, over actions that are drawn; those that are worth nothing do not count."""
    seen = model.trunk(state)
    chances = F.log_softmax(model.actor(seen), dim=1)
    action = torch.multinomial(chances.detach().exp(), 1)
    gain = rewards.gather(1, action) - model.critic(seen).detach()
    counts = rewards.gather(1, action) != 0
    return -(chances.gather(1, action) * gain * counts).sum(), counts.sum()


def learn(batch: shoal.StepBatch) -> None:
    for _ in range(2):
        batch.minimize(critic_loss, of=["trunk", "critic"], name="value")
    batch.minimize(actor_loss, of=("trunk", "actor"), name="policy")


def bandit() -> shoal.Run:
    draws = torch.Generator().manual_seed(6)
    states = torch.randn(NUM_SAMPLES, SIZE, generator=draws)
    rewards = torch.randint(0, 3, (NUM_SAMPLES, 4), generator=draws).float()
    return gan(
        model=ActorCritic,
        step=learn,
        optimizer=lambda named: parts(named, trunk=1e-2, actor=2e-2, critic=1e-2),
        data=shoal.data.tensors(states, rewards),
        loss=lambda output, rewards: F.mse_loss(output, rewards),
        clip=0.5,
    )


def penalized_loss(model: GAN, real: Tensor, target: Tensor) -> Tensor:
    """With a gradient in the loss; and it writes to what it was given."""
    drawn = model.draw(len(real)).detach()
    mixed = real.mul_(0.5).add(drawn).requires_grad_()
    (slope,) = torch.autograd.grad(model.discriminator(mixed).sum(), mixed, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    return model.discriminator(drawn).mean() - model.discriminator(real).mean() + penalty


def criticize(batch: shoal.StepBatch) -> None:
    for _ in range(3):
        batch.minimize(penalized_loss, of="discriminator", name="critic")
    batch.minimize(generator_loss, of="generator")


def wasserstein() -> shoal.Run:
    """Samples one by one, loaded ahead."""
    run = gan(step=criticize)
    return dataclasses.replace(run, data=[run.data[i] for i in range(NUM_SAMPLES)], loaders=1)


def together(batch: shoal.StepBatch) -> None:
    """Without names: all parameters, by one optimizer."""
    batch.minimize(lambda model, real, target: judged(model.discriminator(real), True))


def whole() -> shoal.Run:
    return gan(step=together, optimizer=lambda named: torch.optim.SGD(named, lr=0.1))


RECIPES = {
    "gan": gan,
    "clipped": clipped,
    "bandit": bandit,
    "whole": whole,
    "wasserstein": wasserstein,
}


def train(mesh: Mesh, recipe: str, plan: str) -> dict[str, Any]:
    """Train on this rank; what came of it, and an evaluation at the end."""
    run: shoal.Run = RECIPES[recipe]()
    with Trainer(run, resolve(run, plan, mesh.num_ranks), GivenSeat(mesh)) as trainer:
        infos = list(trainer)
        answer = trainer.evaluate(run.data)
    return {
        "losses": [info.loss for info in infos],
        "parts": [info.parts for info in infos],
        "norms": [info.norm for info in infos],
        "steps": [info.step for info in infos],
        "bytes": sum(info.bytes_sent for info in infos),
        "model": trainer.model.state_dict(),
        "evaluation": answer,
    }


def misbehave(mesh: Mesh, how: str) -> str:
    """What is said of a step function that does what it must not."""

    def step(batch: shoal.StepBatch) -> None:
        if how == "silent":
            return
        if how == "unlike order":
            order = [discriminator_loss, generator_loss]
            for loss in order[:: -1 if mesh.rank else 1]:
                batch.minimize(loss)
        if how in ("one more", "one more at the end"):
            batch.minimize(discriminator_loss, of="discriminator")
            at = 7 if how == "one more at the end" else 2
            if mesh.rank == 1 and batch.step == at:
                batch.minimize(generator_loss, of="generator")
        if how == "caught":
            with suppress(ZeroDivisionError):
                batch.minimize(lambda *given: 1 / 0)
        if how == "detached":
            batch.minimize(discriminator_loss, of="generator")
        if how == "misspelt":
            batch.minimize(discriminator_loss, of="discriminater")

    run = gan(step=step)
    plan = resolve(run, f"data={mesh.num_ranks}", mesh.num_ranks)
    try:
        with Trainer(run, plan, GivenSeat(mesh)) as trainer:
            list(trainer)
    except (ShoalError, ArithmeticError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
