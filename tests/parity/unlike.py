"""Small runs over models that are unlike one another, and one for each trait that a plan may miss.

Each is a recipe, so that tests name it as a user would: `unlike.py:tied`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

NUM_SAMPLES, WIDTH, TOKENS = 52, 6, 11  # 52 samples do not fill batches of 12


def features() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(NUM_SAMPLES, WIDTH, generator=generator)
    return inputs, inputs.sin().sum(1, keepdim=True)


def tokens() -> Tensor:
    return torch.randint(TOKENS, (NUM_SAMPLES, 5), generator=torch.Generator().manual_seed(7))


def run_of(model: Callable[[], nn.Module], **changes: Any) -> shoal.Run:
    run = shoal.Run(
        model=model,
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.AdamW(named, lr=1e-2),
        data=shoal.data.tensors(*features()),
        batch_size=12,
        steps=5,
        clip=0.5,
    )
    return dataclasses.replace(run, **changes)


def layers(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 8), *more, nn.ReLU(), nn.Linear(8, 1))


def plain() -> shoal.Run:
    return run_of(layers)


def unclipped() -> shoal.Run:
    return run_of(layers, clip=None)


def noisy() -> shoal.Run:
    """With everything that depends on who computes a piece: dropout, BatchNorm, clipping."""
    return run_of(lambda: layers(nn.BatchNorm1d(8), nn.Dropout(0.2)))


class LaidOut(nn.Module):
    """Weights that do not lie in memory as their elements are numbered."""

    def __init__(self) -> None:
        super().__init__()
        self.look = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter((torch.randn(8, WIDTH) / 3).t())
        both = torch.randn(8, 8) / 3
        self.part, self.rest = nn.Parameter(both[:, :4]), nn.Parameter(both[:, 4:])

    def forward(self, seen: Tensor) -> Tensor:
        pictures = (seen @ self.turned).view(-1, 2, 2, 2)
        found = self.look(pictures).flatten(1).tanh()
        return (found[:, :8] @ self.part + found[:, 8:] @ self.rest).sum(1, keepdim=True)


def laid_out() -> shoal.Run:
    return run_of(LaidOut)


def token_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def over_tokens(model: Callable[[], nn.Module], **changes: Any) -> shoal.Run:
    data = shoal.data.tensors(tokens(), tokens().roll(-1, 1))
    return run_of(model, loss=token_loss, data=data, **changes)


class Tied(nn.Module):
    """One matrix reads tokens and writes them; several of its rows are in no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4 * TOKENS, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 4 * TOKENS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, read: Tensor) -> Tensor:
        written: Tensor = self.head(F.dropout(self.middle(self.embed(read)).tanh(), 0.1))
        return written


class TiedAcross(Tied):
    """With so much between the two that it can be cut there."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Linear(64, WIDTH)) for _ in "1234")
        )


def tied_across() -> shoal.Run:
    return over_tokens(TiedAcross)


def tied() -> shoal.Run:
    """Also a model without a list of blocks, whose dropout is a function."""
    return over_tokens(Tied)


class Attends(nn.Module):
    """Attention over sentences of unlike lengths, with a mask of yes and no."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(TOKENS, 8), nn.Linear(8, 24)
        self.head = nn.Linear(8, TOKENS)

    def forward(self, read: Tensor) -> Tensor:
        lengths = 2 + read[:, :1] % 4
        there = torch.arange(read.shape[1])[None] < lengths
        query, key, value = self.mix(self.embed(read)).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=there[:, None])
        written: Tensor = self.head(mixed)
        return written


def attends() -> shoal.Run:
    return over_tokens(Attends)


class Faint(nn.Module):
    """Ends in a part whose gradient is a millionth of the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.loud, self.faint = layers(), nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        mixed: Tensor = self.loud(inputs) + 1e-6 * self.faint(inputs)
        return mixed


def faint() -> shoal.Run:
    return run_of(Faint, clip=None)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.read = nn.LSTM(WIDTH, 8, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(8, TOKENS)

    def forward(self, read: Tensor) -> Tensor:
        written: Tensor = self.head(self.read(self.embed(read))[0])
        return written


def recurrent() -> shoal.Run:
    return over_tokens(Recurrent)


def frozen() -> shoal.Run:
    def model() -> nn.Module:
        made = layers(nn.LayerNorm(8))
        made[0].requires_grad_(False)
        return made

    return run_of(model)


class Sometimes(nn.Module):
    """One layer is never used, and one only where a piece holds such a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.never = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)
        self.sometimes = nn.Linear(WIDTH, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        output: Tensor = self.always(inputs)
        if (inputs[:, 0] > 1.5).any():
            output = output + self.sometimes(inputs)
        return output


def unused() -> shoal.Run:
    return run_of(Sometimes)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        summed: Tensor = self.left(left) + self.right(right)
        return summed


def named_inputs() -> shoal.Run:
    inputs, target = features()
    samples = [({"right": x, "left": -x}, t) for x, t in zip(inputs, target, strict=True)]
    return run_of(Named, data=samples)


def several_inputs() -> shoal.Run:
    inputs, target = features()
    return run_of(Named, data=shoal.data.tensors((inputs, inputs.cos()), target))


class Mixed(nn.Module):
    """Parameters of two types, one of them without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 8).double()
        self.narrow = nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.wide(inputs.double()) * self.scale
        output: Tensor = self.narrow(hidden.float().tanh())
        return output


def double() -> shoal.Run:
    return run_of(Mixed)


class Narrow(nn.Module):
    """Parameters of two bytes, of both kinds, before one of four."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 9).bfloat16()
        self.second = nn.Linear(9, 4).half()
        self.last = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.first(inputs.bfloat16()).tanh()
        output: Tensor = self.last(self.second(hidden.half()).float())
        return output


def narrow() -> shoal.Run:
    return run_of(Narrow, optimizer=lambda named: torch.optim.SGD(named, lr=1e-2, momentum=0.9))


def grouped_norm() -> shoal.Run:
    def model() -> nn.Module:
        return nn.Sequential(
            nn.Unflatten(1, (1, WIDTH)), nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(),
            nn.Linear(4 * (WIDTH - 2), 1),
        )  # fmt: skip

    return run_of(model)


def groups() -> shoal.Run:
    """Weight decay for matrices only, and a learning rate for each group."""

    def optimizer(named: Any) -> torch.optim.Optimizer:
        matrices = [(name, p) for name, p in named if p.dim() > 1]
        others = [(name, p) for name, p in named if p.dim() <= 1]
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 1e-3}], lr=1e-2
        )

    return run_of(layers, optimizer=optimizer, schedule=shoal.schedules.cosine(warmup=2))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adagrad": lambda named: torch.optim.Adagrad(named, lr=1e-2),
    "momentum": lambda named: torch.optim.SGD(named, lr=1e-2, momentum=0.9, nesterov=True),
    "rmsprop": lambda named: torch.optim.RMSprop(named, lr=1e-3),
    "adam-foreach": lambda named: torch.optim.Adam(named, lr=1e-2, foreach=True, amsgrad=True),
}


def optimized(by: str = "adagrad") -> shoal.Run:
    return run_of(layers, optimizer=OPTIMIZERS[by])


def weighted_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """A sum over the samples that count, and how many do: it differs from piece to piece."""
    counts = (target > 0).float()
    return (counts * (output - target).square()).sum(), counts.sum()


def weighted() -> shoal.Run:
    return run_of(layers, loss=weighted_loss)


def poisoned() -> shoal.Run:
    """One sample whose loss and gradient are not numbers, once in every epoch."""
    inputs, targets = features()
    targets[NUM_SAMPLES // 2] = float("nan")
    data = shoal.data.in_order(shoal.data.tensors(inputs, targets))
    return run_of(layers, data=data)


def padded(pair: bool = False) -> shoal.Run:
    """Epochs of 52 samples in batches of 12, the last one short, so that a piece may be empty."""
    loss = weighted_loss if pair else F.mse_loss
    # Clipping would hide a factor that only some ranks apply.
    return run_of(lambda: layers(nn.Dropout(0.1)), loss=loss, end="pad", steps=6, clip=None)


def explodes() -> shoal.Run:
    """Finite in the first steps only."""
    return run_of(layers, optimizer=lambda named: torch.optim.SGD(named, lr=1e18), clip=None)


def loud() -> shoal.Run:
    """In fp16 its gradients overflow until the loss scale has fallen."""
    return run_of(layers, loss=lambda output, target: F.mse_loss(output.float(), target) * 1e4)


class Lonely(nn.Module):
    """One parameter that counts, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0))

    def forward(self, features: Tensor) -> Tensor:
        return features.sum(1, keepdim=True) * self.scale + self.empty.sum()


def lonely() -> shoal.Run:
    return run_of(Lonely)


class Chaotic(nn.Module):
    """A logistic map after a layer: it doubles a difference again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(WIDTH, 8), nn.Linear(8, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        state = self.read(inputs).sigmoid()
        for _ in range(18):
            state = 3.99 * state * (1 - state)
        written: Tensor = self.write(state)
        return written


def chaotic() -> shoal.Run:
    return run_of(Chaotic, clip=None, batch_size=12)


class Gaps(nn.Module):
    """Some places of its list are empty."""

    def __init__(self) -> None:
        super().__init__()
        block = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh()) for _ in range(3)]
        self.first, self.last = nn.Linear(WIDTH, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList([None, block[0], None, *block[1:]])  # type: ignore[list-item]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x if block is None else x + block(x)
        out: Tensor = self.last(x)
        return out


def gaps() -> shoal.Run:
    return run_of(Gaps)


def compiled(how: str, backend: str = "eager") -> shoal.Run:
    """As a whole (torch.compile, or the model's own method), or block by block."""

    def model() -> nn.Module:
        made = Gaps()
        blocks = [block for block in made.blocks if block is not None]
        match how:
            case "whole":
                return torch.compile(made, backend=backend)  # type: ignore[return-value]
            case "whole-in-place":
                made.compile(backend=backend)
            case "blocks":
                made.blocks = nn.ModuleList(torch.compile(b, backend=backend) for b in blocks)  # type: ignore[misc]
            case "blocks-in-place":
                for block in blocks:
                    block.compile(backend=backend)
        return made

    return run_of(model)


class Mixes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        out: Tensor = self.inner(x) @ table
        return out


class Handed(nn.Module):
    """A table of its own is used at the start, and handed to a submodule near the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, WIDTH))
        block = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
        self.blocks, self.mixes, self.last = nn.ModuleList(block), Mixes(), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.table
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(self.mixes(x, self.table))
        return out


def handed() -> shoal.Run:
    return run_of(Handed)
