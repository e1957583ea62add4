"""Models by hand, with traits that those of packages do not have; each is a recipe.

They were written to break plans, and some of them did: `unseen.py:coded`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shoal

NUM_SAMPLES, WIDTH, KINDS, TOKENS = 24, 6, 3, 30


def normal(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(NUM_SAMPLES, *shape, generator=torch.Generator().manual_seed(seed))


def integers(most: int, *shape: int, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(most, (NUM_SAMPLES, *shape), generator=generator)


def run_of(model: Any, loss: Any, inputs: Any, target: Any = None) -> shoal.Run:
    target = integers(KINDS) if target is None else target
    return shoal.Run(
        model=model,
        loss=loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        data=shoal.data.tensors(inputs, target),
        batch_size=8,
        steps=5,
    )


def of_text(model: Any, length: int = 9) -> shoal.Run:
    tokens = integers(TOKENS, length)

    def loss(output: Any, target: Tensor) -> Tensor:
        logits, more = output if isinstance(output, tuple) else (output, 0.0)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()) + 0.01 * more

    return run_of(model, loss, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def layers(count: int, width: int = WIDTH) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count))


class Coded(nn.Module):
    """A codebook whose codes are chosen by argmin: only its own part of the loss leads to it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = layers(5), layers(5)
        self.codes = nn.Parameter(torch.randn(7, WIDTH))
        self.head = nn.Linear(WIDTH, KINDS)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.before:
            x = layer(x)
        chosen = self.codes[torch.cdist(x, self.codes).argmin(-1)]
        apart = (chosen - x.detach()).square().mean(-1)
        x = x + (chosen - x).detach()
        for layer in self.after:
            x = layer(x)
        return self.head(x), apart


def coded() -> shoal.Run:
    def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(output[0], target) + output[1].mean()

    return run_of(Coded, loss, normal(WIDTH))


class Hyper(nn.Module):
    """Its weights come from another network; a layer is also called with others than its own."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(
            nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 8 * WIDTH + KINDS * 8)
        )
        self.base = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor, about: Tensor) -> Tensor:
        first, second = self.maker(about).split([8 * WIDTH, KINDS * 8], -1)
        hidden = torch.bmm(x[:, None], first.view(-1, WIDTH, 8))[:, 0] + self.base(x)
        halved = {"weight": self.base.weight * 0.5, "bias": self.base.bias}
        hidden = torch.tanh(hidden) + torch.func.functional_call(self.base, halved, (x,))
        return torch.einsum("bo,bok->bk", hidden, second.view(-1, 8, KINDS))


def hyper() -> shoal.Run:
    return run_of(Hyper, F.cross_entropy, (normal(WIDTH), normal(4, seed=6)))


class Forces(nn.Module):
    """An energy and its gradient, which is trained too."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, 16), nn.Softplus(), nn.Linear(16, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.detach().requires_grad_()
        energy = self.energy(x)
        force = torch.autograd.grad(energy.sum(), x, create_graph=True)[0]
        return torch.cat([energy, force], 1)


def forces() -> shoal.Run:
    return run_of(Forces, F.mse_loss, normal(WIDTH), normal(WIDTH + 1, seed=9))


class Tangent(nn.Module):
    """A layer and its derivative in one direction, by torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, KINDS))

    def forward(self, x: Tensor) -> Tensor:
        out, along = torch.func.jvp(self.inner, (x,), (torch.ones_like(x),))
        return out + along


def tangent() -> shoal.Run:
    return run_of(Tangent, F.cross_entropy, normal(WIDTH))


class Warped(nn.Module):
    """Turned images, with channels last on the way: gradients lie otherwise than weights."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 16), nn.ReLU(), nn.Linear(16, 6))
        self.first, self.last = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.norm, self.deep = nn.LayerNorm(16), nn.Conv2d(16, 16, 3, padding=1, groups=16)

    def forward(self, x: Tensor) -> Tensor:
        upright = torch.tensor([1.0, 0, 0, 0, 1.0, 0])
        grid = F.affine_grid((self.turn(x) * 0.1 + upright).view(-1, 2, 3), list(x.shape))
        h = self.first(F.grid_sample(x, grid)).permute(0, 2, 3, 1)
        h = F.hardswish(self.deep(self.norm(h).permute(0, 3, 1, 2)))
        return F.avg_pool2d(self.last(F.pixel_shuffle(h, 2)), 2)


def warped() -> shoal.Run:
    return run_of(Warped, F.mse_loss, normal(3, 8, 8), normal(3, 8, 8, seed=9))


class Halved(nn.Module):
    """Each gradient is changed once it is there, by a hook of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = layers(6), nn.Linear(WIDTH, KINDS)
        for p in self.parameters():
            p.register_post_accumulate_grad_hook(self._halve)

    @staticmethod
    def _halve(p: Tensor) -> None:
        assert p.grad is not None
        p.grad *= 0.5

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def halved() -> shoal.Run:
    return run_of(Halved, F.cross_entropy, normal(WIDTH))


class Against(nn.Module):
    """Two heads, one of which pushes what is before it the other way, by a hook on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32))
        self.head, self.other = nn.Linear(32, KINDS), nn.Sequential(nn.Linear(32, 32), nn.Tanh())
        self.other.register_full_backward_hook(self._turn)

    @staticmethod
    def _turn(module: nn.Module, given: Any, _: Any) -> Any:
        return tuple(-0.5 * gradient for gradient in given)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return self.head(x) + self.head(self.other(x))


def against() -> shoal.Run:
    return run_of(Against, F.cross_entropy, normal(WIDTH))


class Empty(nn.Module):
    """With a parameter that has no elements, and one without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = layers(3), nn.Linear(WIDTH, KINDS)
        self.none, self.scale = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale + self.none.sum()


def empty() -> shoal.Run:
    return run_of(Empty, F.cross_entropy, normal(WIDTH))


class Again(nn.Module):
    """Computes a layer with BatchNorm again in backward, by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return torch.relu(self.norm(self.layer(x)))

        out: Tensor = x + checkpoint(inner, x, use_reentrant=False)
        return out


def again() -> shoal.Run:
    model = lambda: nn.Sequential(Again(), Again(), Again(), nn.Linear(WIDTH, KINDS))  # noqa: E731
    return run_of(model, F.cross_entropy, normal(WIDTH))


class Experts(nn.Module):
    """Two of four experts for each token, added up by index_add_, and a loss that balances them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.table, self.gate = nn.Embedding(TOKENS, width), nn.Linear(width, 4, bias=False)
        make = [nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)]
        self.experts = nn.ModuleList(
            nn.Sequential(*(type(m)(m.in_features, m.out_features) if hasattr(m, "weight") else m
                            for m in make)) for _ in range(4)
        )  # fmt: skip
        self.head = nn.Linear(width, TOKENS)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.table(ids).flatten(0, 1)
        share = self.gate(x).softmax(-1)
        weight, chosen = share.topk(2, -1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            out.index_add_(0, rows, expert(x[rows]) * weight[rows, place, None])
        load = F.one_hot(chosen, 4).float().mean((0, 1))
        return self.head((x + out).view(*ids.shape, -1)), (load * share.mean(0)).sum()


def experts() -> shoal.Run:
    return of_text(Experts)


class Graphs(nn.Module):
    """Messages along edges: scatter_add, index_add_, scatter_reduce, a GRU cell."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.into, self.message = nn.Linear(4, width), nn.Linear(2 * width, width)
        self.step, self.out = nn.GRUCell(width, width), nn.Linear(2 * width, KINDS)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        count, each, _ = nodes.shape
        start, end = (edges + torch.arange(count)[:, None, None] * each).flatten(0, 1).unbind(-1)
        h = torch.relu(self.into(nodes.flatten(0, 1)))
        for _ in range(2):
            sent = torch.relu(self.message(torch.cat([h[start], h[end]], -1)))
            there = torch.zeros_like(h).scatter_add(0, end[:, None].expand_as(sent), sent)
            h = self.step(there, h)
        graph = torch.arange(count).repeat_interleave(each)
        mean = torch.zeros(count, h.shape[1]).index_add_(0, graph, h) / each
        most = torch.full_like(mean, -9.0).scatter_reduce(0, graph[:, None].expand_as(h), h, "amax")
        return self.out(torch.cat([mean, most], -1))


def graphs() -> shoal.Run:
    return run_of(Graphs, F.cross_entropy, (normal(5, 4), integers(5, 9, 2)))


class Masked(nn.Module):
    """Patches that are left out at random, by argsort, gather, scatter and writes by a mask."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, width), nn.Linear(width, 4)
        self.place, self.gap = nn.Parameter(torch.randn(8, width)), nn.Parameter(torch.zeros(width))
        self.encoder, self.decoder = (
            nn.TransformerEncoderLayer(width, 4, 32, 0.1, batch_first=True) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.into(x) + self.place
        kept = torch.rand(h.shape[:2]).argsort(1)[:, :4, None].expand(-1, -1, h.shape[2])
        full = self.gap.expand_as(h).clone().scatter(1, kept, self.encoder(h.gather(1, kept)))
        is_gap = torch.ones(h.shape[:2], dtype=torch.bool).scatter(1, kept[..., 0], False)
        full[is_gap] = full[is_gap] + self.gap
        out: Tensor = self.out(self.decoder(full + self.place))
        return out


def masked() -> shoal.Run:
    return run_of(Masked, F.mse_loss, normal(8, 4), normal(8, 4))


class Methods(nn.Module):
    """Calls methods of a submodule that are not its forward."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, 32), nn.Linear(32, 32)
            self.scale, self.head = nn.Parameter(torch.ones(32)), nn.Linear(32, KINDS)

        def features(self, x: Tensor) -> Tensor:
            return torch.relu(self.second(torch.relu(self.first(x)))) * self.scale

        def classify(self, x: Tensor) -> Any:
            return self.head(x)

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.mix = self.Inner(), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Any:
        x = self.inner.features(x)
        return self.inner.classify(x + torch.tanh(self.mix(x)))


def methods() -> shoal.Run:
    return run_of(Methods, F.cross_entropy, normal(WIDTH))


def scripted() -> shoal.Run:
    """What torch.jit made of a model."""

    def model() -> Any:
        return torch.jit.script(nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, KINDS)))

    return run_of(model, F.cross_entropy, normal(WIDTH))


class Called(nn.Module):
    """Replaces what calls a forward, with its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = layers(3), nn.Linear(WIDTH, KINDS)

    def __call__(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def called() -> shoal.Run:
    return run_of(Called, F.cross_entropy, normal(WIDTH))
