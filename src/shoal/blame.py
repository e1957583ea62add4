"""Which samples are to blame when a step is not finite."""

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shoal.data.loader import Batches
from shoal.errors import NotFinite
from shoal.sync.strategy import Agreed

_NAMED = 20


def weights_are_finite(model: nn.Module) -> bool:
    held = (p._local_tensor if isinstance(p, DTensor) else p for p in model.parameters())
    return all(bool(torch.isfinite(p).all()) for p in held)


def not_finite(batches: Batches, step: int, agreed: Agreed, model: nn.Module) -> NotFinite:
    """The error for a step whose loss or gradient is not finite.

    If the weights are spoilt already, it was the gradient of the step before.
    """
    bad = [piece for piece, value in enumerate(agreed.sums) if not math.isfinite(value)]
    if bad and step and not weights_are_finite(model):
        step, bad = step - 1, []
    what = f"its loss is {agreed.loss}" if bad else "its loss is finite, its gradient is not"
    known = bad and len(agreed.sums) == batches.num_pieces
    pieces = bad if known else range(batches.num_pieces)
    batch = batches.at(step)
    ids = [int(i) for piece in pieces for i in batch.ids_of(piece)]
    named = ", ".join(map(str, ids[:_NAMED]))
    if len(ids) > _NAMED:
        named += f" and {len(ids) - _NAMED} more"
    return NotFinite(
        f"Step {step + 1} is not finite: {what}. It saw the samples {named}. Look at those "
        "samples, lower the learning rate, or clip the gradient (clip=1.0)."
    )
