"""Tabular data with a rare class: who will dislike a film? Balanced draws, and k folds.

    python examples/tabular.py

What it shows: `shoal.data.fold` cuts a table into folds that each have their share of the rare
class, and `shoal.data.balanced` draws both classes alike often. A row is a rating of MovieLens, its
columns say how its user and its film were rated in other ratings, and the class is whether it has
one star, which 6 % have. A model that sees rows as they come finds hardly any of these; with
balanced draws it finds most of them, at the price of false alarms.
"""

from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

FOLDS = 3


@cache
def table() -> tuple[Tensor, Tensor]:
    """A row for each rating of one half; what the columns tell comes from the other half."""
    ratings = shoal.data.catalog.ratings()
    mixed = torch.randperm(len(ratings), generator=torch.Generator().manual_seed(0))
    past, rows = ratings[mixed].chunk(2)
    columns = []
    for column in (0, 1):  # of users, then of films
        size = int(ratings[:, column].max()) + 1
        count = past[:, column].bincount(minlength=size)
        for stars in (past[:, 2].float(), (past[:, 2] == 1).float()):
            total = past[:, column].bincount(stars, minlength=size)
            # Five ratings of the usual kind are added, for those who have few.
            mean = (total + 5 * stars.mean()) / (count + 5)
            columns.append(mean[rows[:, column]])
        columns.append(count[rows[:, column]].add(1).log())
    found = torch.stack(columns, 1).float()
    return (found - found.mean(0)) / found.std(0), (rows[:, 2] == 1).long()


def found(logits: Tensor, is_rare: Tensor) -> tuple[Tensor, Tensor]:
    """Of the rare ones, how many are called so. A pair: the sum, and what it counts for."""
    return (logits.argmax(1) * is_rare).sum(), is_rare.sum()


def false_alarms(logits: Tensor, is_rare: Tensor) -> tuple[Tensor, Tensor]:
    return (logits.argmax(1) * (1 - is_rare)).sum(), (1 - is_rare).sum()


def small(fold: int = 0, balanced: bool = True, width: int = 32) -> shoal.Run:
    rows, is_rare = table()
    source = shoal.data.tensors(rows, is_rare)
    train, held_out = shoal.data.fold(source, FOLDS, fold, is_rare)
    return shoal.Run(
        model=lambda: nn.Sequential(
            nn.Linear(rows.shape[1], width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 2)
        ),
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3),
        schedule=shoal.schedules.cosine(),
        data=shoal.data.balanced(train, is_rare[train.kept]) if balanced else train,
        evaluate=held_out,
        metrics={"found": found, "false_alarms": false_alarms},
        batch_size=256,
        steps=200,
    )


def main() -> None:
    for balanced in (False, True):
        outcomes = [
            shoal.train(small, "data=1", settings={"fold": i, "balanced": balanced}, progress=False)
            for i in range(FOLDS)
        ]
        shares = torch.tensor([[o.metrics["found"], o.metrics["false_alarms"]] for o in outcomes])
        (hits, alarms), (spread, _) = shares.mean(0), shares.std(0)
        name = "balanced draws" if balanced else "as they come"
        print(f"{name:15} {hits:.1%} found (+- {spread:.1%}), {alarms:.1%} false alarms")


if __name__ == "__main__":
    main()
