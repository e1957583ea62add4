"""The statistics of BatchNorm, taken again for weights that no training step has seen.

Means and variances that layers of several models kept are not those of their merged weights
(Izmailov et al. 2018, arXiv 1803.05407). They are taken again on the recipe's training data: plain
means over up to 100 batches, in evaluation mode but for these layers. Cost: as many forwards.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from shoal.data.batches import LoadOptions
from shoal.data.pieces import pieces_in_order
from shoal.training.run import Run, call_model

NUM_BATCHES = 100


@torch.no_grad()
def refresh_statistics(run: Run, model: nn.Module) -> str:
    """Take them again, if the model has any; says so."""
    layers = list(_layers(model))
    if not layers:
        return ""
    model.eval()
    momenta = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a plain mean over all batches
        layer.train()
    count = call_on_samples(run, model)
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum
    model.eval()
    what = f"The statistics of {len(layers)} normalisation layers"
    return f"{what} were taken again, on {count} batches."


def call_on_samples(run: Run, model: nn.Module) -> int:
    """Call a model with up to 100 batches of the run's data, evenly over it, since it may be
    sorted; how many they were."""
    pieces = pieces_in_order(run.data, max(2, run.batch_size), LoadOptions(run.collate))
    num_tried = min(NUM_BATCHES, len(pieces))
    count = 0
    for number in range(num_tried):
        piece = pieces[number * len(pieces) // num_tried]
        if piece.num_samples > 1:
            call_model(model, piece.inputs)
            count += 1
    return count


def _layers(model: nn.Module) -> Iterator[_NormBase]:
    for module in model.modules():
        if isinstance(module, _NormBase) and module.track_running_stats:
            yield module
