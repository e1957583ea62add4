"""What will a user think of a film? Ratings of MovieLens 100k, from a row for each of the two.

    shoal train recipes/movielens.py:small
    shoal train recipes/movielens.py:small --plan "data=2 sync=server servers=2"
    shoal verify recipes/movielens.py:small --plan "data=2 sync=server servers=2"

Users and films are tables: a step touches the rows of its batch alone, and with `sync=server` they
stay on the servers. Rows are stepped on by row-wise Adagrad, the layers above them by AdamW. The
loss is the mean square of what the guess is off; that of guessing the mean rating is 1.27.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

MEAN = 3.53  # of all ratings, which are 1 to 5
TABLES = ("users.weight", "films.weight")


class Taste(nn.Module):
    def __init__(self, users: int, films: int, width: int):
        super().__init__()
        self.users = nn.Embedding(users, width, sparse=True)
        self.films = nn.Embedding(films, width, sparse=True)
        for table in (self.users, self.films):
            nn.init.normal_(table.weight, std=0.1)
        self.judge = nn.Sequential(
            nn.Linear(2 * width, 2 * width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(2 * width, 1)
        )

    def forward(self, pairs: Tensor) -> Tensor:
        user, film = self.users(pairs[:, 0]), self.films(pairs[:, 1])
        guess: Tensor = self.judge(torch.cat([user, film], 1)).squeeze(1)
        return MEAN + guess + (user * film).sum(1)


def within_a_star(guess: Tensor, rating: Tensor) -> Tensor:
    """The share of guesses that are off by less than one."""
    return ((guess - rating).abs() < 1).float().mean()


def optimizer(named: Any) -> torch.optim.Optimizer:
    tables = [(name, p) for name, p in named if name in TABLES]
    layers = [(name, p) for name, p in named if name not in TABLES]
    return shoal.Optimizers(
        torch.optim.AdamW(layers, lr=1e-3), shoal.RowwiseAdagrad(tables, lr=0.02)
    )


def small(width: int = 32, epochs: int = 3) -> shoal.Run:
    ratings = shoal.data.catalog.ratings()
    pairs, stars = ratings[:, :2] - 1, ratings[:, 2].float()
    mixed = torch.randperm(len(ratings), generator=torch.Generator().manual_seed(0))
    train, held_out = mixed[len(mixed) // 10 :], mixed[: len(mixed) // 10]
    num_users, num_films = (int(numbers.max()) + 1 for numbers in pairs.unbind(1))
    return shoal.Run(
        model=lambda: Taste(num_users, num_films, width),
        loss=F.mse_loss,
        optimizer=optimizer,
        schedule=shoal.schedules.cosine(warmup=20),
        data=shoal.data.tensors(pairs[train], stars[train]),
        evaluate=shoal.data.tensors(pairs[held_out], stars[held_out]),
        metrics={"within_a_star": within_a_star},
        batch_size=128,
        epochs=epochs,
    )
