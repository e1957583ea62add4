"""Small runs with tables: embeddings with sparse gradients, whose rows may live on servers.

Each is a recipe, so that tests name it as a user would: `tabled.py:sgd`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

NUM_SAMPLES, WIDTH, USERS, WORDS = 52, 6, 150, 11


class Reads(nn.Module):
    """Two tables: one looked up twice, with rows that come several times, one with padding."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH, sparse=True)
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=3, sparse=True)
        self.head = nn.Linear(3 * WIDTH, 1)

    def forward(self, users: Tensor, words: Tensor) -> Tensor:
        first, other = self.users(users[:, 0]), self.users(users[:, 1:]).sum(1)
        read = self.words(words).mean(1)
        answer: Tensor = self.head(torch.cat([first, other, read], 1).tanh())
        return answer


class Seldom(Reads):
    """One table is looked up only where a piece holds an even user, the other never."""

    def forward(self, users: Tensor, words: Tensor) -> Tensor:
        even = users[:, 0][users[:, 0] % 2 == 0]
        nobody = self.words(words[:0, 0]).sum(0)
        some = self.users(even).mean(0) if len(even) else torch.zeros(WIDTH)
        answer: Tensor = self.head(torch.cat([some, some.tanh(), nobody]).expand(len(users), -1))
        return answer


class Factors(nn.Module):
    """Nothing but tables: who likes what, as a product of two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH, sparse=True)
        self.words = nn.Embedding(WORDS, WIDTH, sparse=True)

    def forward(self, users: Tensor, words: Tensor) -> Tensor:
        return (self.users(users[:, 0]) * self.words(words[:, 0])).sum(1, keepdim=True)


def samples() -> Any:
    draws = torch.Generator().manual_seed(7)
    users = torch.randint(USERS, (NUM_SAMPLES, 4), generator=draws)
    words = torch.randint(WORDS, (NUM_SAMPLES, 5), generator=draws)
    return [((users[i], words[i]), users[i].float().sin().sum()[None]) for i in range(NUM_SAMPLES)]


def is_table(name: str) -> bool:
    return name.startswith(("users", "words"))


def apart(layers: Callable[..., Any], tables: Callable[..., Any]) -> Callable[..., Any]:
    """Layers by one optimizer, tables by another."""

    def made(named: Any) -> torch.optim.Optimizer:
        return shoal.Optimizers(
            layers([(n, p) for n, p in named if not is_table(n)]),
            tables([(n, p) for n, p in named if is_table(n)]),
        )

    return made


def run_of(model: Callable[[], nn.Module] = Reads, **changes: Any) -> shoal.Run:
    run = shoal.Run(
        model=model,
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=samples(),
        batch_size=12,
        steps=5,
    )
    return dataclasses.replace(run, **changes)


def sgd() -> shoal.Run:
    return run_of(clip=0.5, schedule=shoal.schedules.cosine(warmup=2))


def factors() -> shoal.Run:
    return run_of(Factors, optimizer=lambda named: shoal.RowwiseAdagrad(named, lr=0.1))


def seldom() -> shoal.Run:
    return run_of(Seldom, optimizer=by_rows)


def by_rows(named: Any) -> torch.optim.Optimizer:
    return apart(
        lambda layers: torch.optim.AdamW(layers, lr=1e-2),
        lambda tables: shoal.RowwiseAdagrad(tables, lr=0.1),
    )(named)


def rowwise() -> shoal.Run:
    return run_of(optimizer=by_rows, clip=0.5)


def adam() -> shoal.Run:
    return run_of(
        optimizer=apart(
            lambda layers: torch.optim.AdamW(layers, lr=1e-2),
            lambda tables: torch.optim.SparseAdam([p for _, p in tables], lr=1e-2),
        )
    )


def adagrad() -> shoal.Run:
    return run_of(
        optimizer=lambda named: torch.optim.Adagrad(
            named, lr=0.05, initial_accumulator_value=0.1, foreach=False
        )
    )


class Lazily(Reads):
    """The same with tables whose rows come into being when they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.users = shoal.Table(USERS, WIDTH, std=0.5)
        self.words = shoal.Table(WORDS, WIDTH, padding_idx=3, seed=5)


def lazy() -> shoal.Run:
    return run_of(Lazily, optimizer=by_rows, clip=0.5)


def lazy_sgd() -> shoal.Run:
    return run_of(Lazily)


def lazy_adam() -> shoal.Run:
    return dataclasses.replace(adam(), model=Lazily)


def lazy_adagrad() -> shoal.Run:
    return run_of(Lazily, optimizer=lambda named: torch.optim.Adagrad(named, lr=0.05))


class Often(Reads):
    """A few rows that several lookups of a piece have in common: the order of sums matters."""

    def forward(self, users: Tensor, words: Tensor) -> Tensor:
        return super().forward(users % 5, words)


def often() -> shoal.Run:
    return run_of(Often, optimizer=by_rows)


class Bags(Reads):
    """Rows that are added up where they are looked up: with offsets, weights and padding."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.EmbeddingBag(USERS, WIDTH, mode="sum", sparse=True)
        self.words = nn.EmbeddingBag(WORDS, WIDTH, mode="mean", padding_idx=3, sparse=True)
        self.register_buffer("weights", torch.linspace(0.5, 2.0, 4))

    def forward(self, users: Tensor, words: Tensor) -> Tensor:
        first = self.users(users[:, 0].contiguous(), torch.arange(len(users)))
        other = self.users(users, per_sample_weights=self.weights.expand(users.shape).contiguous())
        answer: Tensor = self.head(torch.cat([first, other, self.words(words)], 1).tanh())
        return answer


def bags() -> shoal.Run:
    return run_of(Bags, optimizer=by_rows, clip=0.5)
