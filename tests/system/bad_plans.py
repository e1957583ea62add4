"""Models that some plans cannot cut, or only just can, for the tests of bad plans."""

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shoal

WIDTH = 16


def run_of(model: Any, **changes: Any) -> shoal.Run:
    draws = torch.Generator().manual_seed(3)
    inputs = torch.randn(32, WIDTH, generator=draws)
    settings: dict[str, Any] = {"batch_size": 16, "steps": 3, **changes}
    return shoal.Run(
        model=model,
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.AdamW([(n, p) for n, p in named if p.requires_grad]),
        data=shoal.data.tensors(inputs, inputs.roll(1, 1).tanh()),
        **settings,
    )


def layers(count: int) -> list[nn.Linear]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(count)]


def plain(end: str = "drop", batch_size: int = 16) -> shoal.Run:
    return run_of(lambda: nn.Sequential(*layers(4)), end=end, batch_size=batch_size)


def weighs() -> shoal.Run:
    """Its loss is a sum, and what it weighs."""

    def loss(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
        return (output - target).square().sum(), output.numel()

    run = run_of(lambda: nn.Sequential(*layers(4)), batch_size=12)
    return dataclasses.replace(run, loss=loss)


class Wavers(nn.Module):
    """Takes another path for other data, at its top level."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if x.mean() > 0:
                x = x.tanh()
        return x


def wavers() -> shoal.Run:
    return run_of(Wavers)


class Repeats(nn.Module):
    """One module with running statistics after every layer."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers(4))
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.norm(layer(x)).relu()
        return x


def shared_statistics() -> shoal.Run:
    return run_of(lambda: Repeats(nn.BatchNorm1d(WIDTH)))


def shared_norm() -> shoal.Run:
    """The same without statistics."""
    return run_of(lambda: Repeats(nn.LayerNorm(WIDTH)))


class Counts(nn.Module):
    """Counts its calls in a buffer that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers(4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            x = layer(x).relu() / self.calls.sqrt()
        return x


def counts() -> shoal.Run:
    return run_of(Counts)


class Tracks(nn.Module):
    """Keeps a running mean of what its first layer says, and takes it off after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers(4))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x).relu()
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        for layer in self.layers[1:]:
            x = layer(x).relu()
        return x - self.mean


def tracks() -> shoal.Run:
    return run_of(Tracks)


def half_frozen() -> shoal.Run:
    """The first half is not trained, so the first of two stages has nothing to train."""

    def model() -> nn.Module:
        frozen = [layer.requires_grad_(False) for layer in layers(3)]
        return nn.Sequential(*frozen, nn.ReLU(), *layers(3))

    return run_of(model)


class Tied(nn.Module):
    """The first layer's matrix is the last one's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers(4))
        self.layers[-1].weight = self.layers[0].weight

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def tied() -> shoal.Run:
    return run_of(Tied)


def bare() -> shoal.Run:
    """No list of blocks."""
    return run_of(lambda: nn.Linear(WIDTH, WIDTH))


def single() -> shoal.Run:
    """One layer with parameters: a second rank would have none."""
    return run_of(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Softsign()))


def shrinks() -> shoal.Run:
    """A table that is written to by its own lookup."""
    return looks_up(max_norm=1.0)


def sparse() -> shoal.Run:
    return stepped(looks_up(sparse=True), torch.optim.SGD, lr=0.1)


def sparse_in_a_block() -> shoal.Run:
    inner = sparse().model

    def model() -> nn.Module:
        return nn.Sequential(inner(), nn.Linear(WIDTH, WIDTH))

    return stepped(run_of(model), torch.optim.SGD, lr=0.1)


def sparse_by_adam() -> shoal.Run:
    return stepped(sparse(), torch.optim.AdamW)


def sparse_by_fused() -> shoal.Run:
    return stepped(sparse(), torch.optim.SGD, lr=0.1, fused=True)


def sparse_by_momentum() -> shoal.Run:
    return stepped(sparse(), torch.optim.SGD, lr=0.1, momentum=0.9)


def sparse_shrinks() -> shoal.Run:
    return stepped(looks_up(sparse=True, max_norm=1.0), torch.optim.SGD, lr=0.1)


def sparse_and_tied() -> shoal.Run:
    def model() -> nn.Module:
        made = nn.Sequential(nn.Embedding(8, WIDTH, sparse=True), nn.Linear(WIDTH, 8, bias=False))
        made[1].weight = made[0].weight
        return made

    return stepped(run_of(model), torch.optim.SGD, lr=0.1)


def bag() -> shoal.Run:
    return stepped(run_of(lambda: nn.EmbeddingBag(8, WIDTH, sparse=True)), torch.optim.SGD, lr=0.1)


def stepped(run: shoal.Run, kind: Any, **how: Any) -> shoal.Run:
    return dataclasses.replace(run, optimizer=lambda named: kind(named, **how))


def looks_up(**how: Any) -> shoal.Run:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(8, WIDTH, **how), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            read: Tensor = self.head(self.table((x > 0).long()).mean(1))
            return read

    return run_of(Reads)


class Writes(nn.Module):
    """Keeps a parameter of its own within bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.scale.clamp_(max=0.9)
        return x * self.scale


def writes() -> shoal.Run:
    return run_of(lambda: nn.Sequential(*layers(2), Writes(), *layers(2)))


class Limits(nn.Linear):
    """Limits its weight without autograd's knowledge, in its place or by another in its place."""

    def __init__(self, in_place: bool):
        super().__init__(WIDTH, WIDTH)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            self.weight.data.clamp_(-0.1, 0.1)
        else:
            self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.2)
        return super().forward(x)


def limits(in_place: bool = False) -> shoal.Run:
    return run_of(lambda: nn.Sequential(*layers(2), Limits(in_place), *layers(2)))


class Limited(nn.Module):
    """Limits the weight of a block before the block runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Sequential(*layers(2)), nn.Sequential(*layers(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last[0].weight.clamp_(-0.1, 0.1)
        out: Tensor = self.last(self.first(x))
        return out


def limited() -> shoal.Run:
    return run_of(Limited)


class Replaces(nn.Module):
    """Makes its parameter anew in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight = nn.Parameter(self.layer.weight.detach().clone())
        out: Tensor = self.layer(x)
        return out


def replaces() -> shoal.Run:
    return run_of(lambda: nn.Sequential(*layers(2), Replaces(), *layers(2)))


class Teaches(nn.Module):
    """Follows itself: a copy that is moved towards it in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.copy = nn.Sequential(*layers(2)), nn.Sequential(*layers(2))
        self.copy.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mean, p in zip(self.copy.parameters(), self.own.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        out: Tensor = self.own(x) + self.copy(x)
        return out


def teaches() -> shoal.Run:
    return run_of(Teaches)


class Mixed(nn.Module):
    """One of its layers computes in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = layers(3)
        self.second.double()

    def forward(self, x: Tensor) -> Tensor:
        read: Tensor = self.third(self.second(self.first(x).double()).float())
        return read


def mixed() -> shoal.Run:
    return run_of(Mixed)


class Decays(nn.Module):
    """Adds the squares of its blocks' weights to what it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        squares = torch.stack([layer.weight.square().mean() for layer in self.layers])
        return x + 0.01 * squares.sum()


def decays() -> shoal.Run:
    return run_of(Decays)


class Steep(nn.Module):
    """Adds its own slope to what it returns, as a penalty on gradients does."""

    def __init__(self) -> None:
        super().__init__()
        self.widen, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y: Tensor = self.narrow(self.widen(x).tanh())
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope


def steep() -> shoal.Run:
    return run_of(Steep)


class Remembers(nn.Module):
    """Checkpoints its layers by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.wide, x, use_reentrant=False)
        return x + y


def remembers() -> shoal.Run:
    return run_of(Remembers)


class Experts(nn.Module):
    """Runs the layers that some sample asks for, or, if it `drops`, those that chance leaves."""

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.first, self.last, *experts = layers(8)
        self.experts, self.drops = nn.ModuleList(experts), drops

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        asked = x.argmax(dim=1) % len(self.experts)
        for number, expert in enumerate(self.experts):
            rows = (asked == number).nonzero().squeeze(1)
            if torch.rand(()) < 0.5 if self.drops else rows.numel():
                x = x.index_add(0, rows, expert(x[rows]))
        return self.last(x)


def experts(drops: bool = False) -> shoal.Run:
    held_out = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(4))
    evaluate = shoal.data.tensors(held_out, held_out)
    return run_of(lambda: Experts(drops), evaluate=evaluate)


class Product(torch.autograd.Function):
    """A product with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.t(), x.t() @ grads[0]


class Multiplies(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 4 * WIDTH) / 4)
        self.wide = nn.Sequential(
            nn.Linear(4 * WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        product = Product.apply(x, self.weight)  # type: ignore[no-untyped-call]
        y: Tensor = self.wide(product)
        return y


def multiplies() -> shoal.Run:
    return run_of(Multiplies)
