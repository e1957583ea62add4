"""A model for each bucket of the data, and one of all of them afterwards.

    python examples/buckets.py

What it shows: `shoal.data.fold` deals the data to buckets, as if each lay with somebody who will
not give it away; `shoal.train` trains the same recipe on each; and `shoal.slim.fuse` makes one
model of what they left. `average` merges their weights, which works because all of them began at
the same place and went a short way; `ensemble` averages their answers and keeps every model. A
model that saw all data, in as many steps, is what both are measured against.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

BUCKETS = 4
ALL = -1


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return (logits.argmax(1) == labels).float().mean()


def small(bucket: int = ALL) -> shoal.Run:
    images, labels = shoal.data.catalog.digits()
    digits = shoal.data.tensors(images.flatten(1), labels)
    known, held_out = shoal.data.fold(digits, 5, 0, labels)
    if bucket != ALL:
        _, known = shoal.data.fold(known, BUCKETS, bucket)
    return shoal.Run(
        model=lambda: nn.Sequential(nn.Linear(28 * 28, 64), nn.ReLU(), nn.Linear(64, 10)),
        loss=F.cross_entropy,
        optimizer=lambda named: torch.optim.AdamW(named, lr=2e-3),
        data=known,
        evaluate=held_out,
        metrics={"accuracy": accuracy},
        batch_size=64,
        steps=300,
    )


def main() -> None:
    buckets = [
        shoal.train(small, "data=1", settings={"bucket": bucket}, progress=False)
        for bucket in range(BUCKETS)
    ]
    whole = shoal.train(small, "data=1", progress=False)
    places = [outcome.run_dir for outcome in buckets]
    out = Path(places[-1])
    merged = shoal.slim.fuse(small, places, how="average", out=out / "average")
    asked = shoal.slim.fuse(small, places, how="ensemble", out=out / "ensemble.pt2")

    results = {f"bucket {bucket}": one.metrics for bucket, one in enumerate(buckets)}
    results |= {"average": merged.after.metrics, "ensemble": asked.after.metrics}
    results["all data"] = whole.metrics
    for name, metrics in results.items():
        print(f"{name:9} loss {metrics['loss']:.3f}  accuracy {metrics['accuracy']:.1%}")


if __name__ == "__main__":
    main()
