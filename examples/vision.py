"""Vision: a convolutional network that stops by itself, keeps its best weights and averages them.

    python examples/vision.py
    shoal verify examples/vision.py:small --plan "data=2" --steps 130

What it shows: `Run(callbacks=[...])`. `EMA` averages the weights and measures the average beside
them, `ReduceOnPlateau` lowers the rate where the loss no longer falls, `BestCheckpoint` saves after
the best evaluation, and `EarlyStopping` ends the run after some 500 of at most 1,875 steps, with
97 % of the held-out digits read correctly. The reference of `shoal verify` runs all four as well;
130 steps hold two evaluations, which three of them follow.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.callbacks import EMA, BestCheckpoint, EarlyStopping, ReduceOnPlateau


def network(channels: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, channels, 5, stride=2, padding=2), nn.BatchNorm2d(channels), nn.ReLU()),
        *(nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(2 * channels * 7 * 7, 10)),
    )


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(1) == labels).float().mean()


def small(channels: int = 16, most_epochs: int = 30) -> shoal.Run:
    images, labels = shoal.data.catalog.digits()
    train, held_out = shoal.data.fold(shoal.data.tensors(images, labels), 5, 0, labels)
    return shoal.Run(
        model=lambda: network(channels),
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.AdamW(named, lr=3e-3),
        data=train,
        evaluate=held_out,
        evaluate_every="epoch",
        metrics={"accuracy": accuracy},
        batch_size=64,
        epochs=most_epochs,
        callbacks=[
            EMA(0.98, evaluate=True),  # measures ema_loss and ema_accuracy, too
            ReduceOnPlateau("loss", factor=0.3, patience=1),
            BestCheckpoint("ema_loss"),
            EarlyStopping("ema_loss", patience=3, min_delta=1e-3),
        ],
    )


def main() -> None:
    outcome = shoal.train(small, "data=2")
    last = outcome.metrics
    averaged = shoal.load(outcome.run_dir, small, weights="ema")
    images, labels = shoal.data.catalog.digits()
    with torch.no_grad():
        of_all = accuracy(averaged.eval()(images), labels)
    print(f"steps       {outcome.steps}, until the loss no longer fell")
    print(f"weights     {last['accuracy']:.1%} of the held-out digits are read correctly")
    print(f"average     {last['ema_accuracy']:.1%} with the average of the weights")
    print(f"all digits  {of_all:.1%} by the average, those of the training among them")
    print(f"best        {outcome.run_dir}/checkpoints: the one with the tag `best`")


if __name__ == "__main__":
    main()
