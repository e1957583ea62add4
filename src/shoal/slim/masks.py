"""Masks on weights: which elements stay, and a parametrization that applies them in training.

A mask is never stored. It is a function of what every plan already carries and saves: the weight
itself (magnitude), or scores that are trained beside it (movement, Sanh et al. 2020), and a counter
of steps, a buffer like BatchNorm's. So masks survive checkpoints, recovery and every plan without a
mechanism of their own. The sparsity grows by a cubic ramp (Zhu and Gupta 2017), in each layer by
itself: no rank sees all layers under every plan.

Cost: a selection of the largest elements of each weight in every forward, and for movement as many
scores as weights, with their optimizer state. Read next: `pruning.py`.
"""

import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from shoal.errors import UsageError
from shoal.slim.figures import layers_with_matrices

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PATTERN = re.compile(r"([1-9]\d?):([1-9]\d?)")
WEIGHT = "weight"


class Pattern(NamedTuple):
    """The N largest of every M neighbours along a row stay, as in 2:4."""

    num_kept: int
    num_neighbours: int

    @property
    def sparsity(self) -> float:
        return 1 - self.num_kept / self.num_neighbours


class Ramp(NamedTuple):
    """How the sparsity grows with steps: from 0 at `begin` to all of it at `end`."""

    sparsity: float
    begin: int = 0
    end: int = 0

    def at(self, step: int) -> float:
        """The sparsity at a step: a cubic, quick at first and slow where little is left."""
        if step >= self.end:
            return self.sparsity
        if step <= self.begin:
            return 0.0
        share = (step - self.begin) / (self.end - self.begin)
        return float(self.sparsity * (1 - (1 - share) ** 3))


def read_pattern(how: str) -> Pattern | None:
    """The pattern of a text such as 2:4; None if it is none."""
    found = _PATTERN.fullmatch(how)
    if found is None:
        return None
    pattern = Pattern(int(found[1]), int(found[2]))
    if pattern.num_kept >= pattern.num_neighbours:
        raise UsageError(
            f"--how {how}: of {pattern.num_neighbours} neighbours fewer than all must stay. "
            "2:4 keeps two of every four."
        )
    return pattern


def keep_largest(ranks: Tensor, num_kept: int) -> Tensor:
    """A mask of ones and zeros, with `num_kept` ones where `ranks` is largest."""
    mask = torch.zeros_like(ranks)
    kept = ranks.flatten().topk(num_kept, sorted=False).indices
    mask.view(-1)[kept] = 1
    return mask


def keep_pattern(ranks: Tensor, pattern: Pattern) -> Tensor:
    """A mask with the largest of each group of neighbours."""
    groups = ranks.flatten(1).unflatten(1, (-1, pattern.num_neighbours))
    kept = groups.topk(pattern.num_kept, dim=-1, sorted=False).indices
    return torch.zeros_like(groups).scatter(-1, kept, 1).view(ranks.shape)


class SparseWeight(nn.Module):
    """A parametrization: the weight times its mask at this step.

    With scores the mask is where these are largest, and they get the gradient that the mask would
    have: a score grows where a weight moves away from 0.
    """

    steps: Tensor
    needs_whole_weights = "a mask keeps the largest elements of a whole weight"

    def __init__(self, weight: Tensor, ramp: Ramp, pattern: Pattern | None, has_scores: bool):
        super().__init__()
        self.ramp, self.pattern = ramp, pattern
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.scores = nn.Parameter(torch.zeros_like(weight)) if has_scores else None

    def forward(self, weight: Tensor) -> Tensor:
        step = int(self.steps)
        if self.training:
            self.steps += 1  # the same in every piece of a step, and so is their mean
        ranks = weight.detach().abs() if self.scores is None else self.scores.detach()
        mask = self.mask(ranks, step)
        if self.scores is not None:  # its value is 0, its gradient that of the mask
            mask = mask + (self.scores - self.scores.detach())
        return weight * mask

    def mask(self, ranks: Tensor, step: int) -> Tensor:
        if self.pattern is not None:
            begun = step >= self.ramp.begin
            return keep_pattern(ranks, self.pattern) if begun else torch.ones_like(ranks)
        num_kept = ranks.numel() - round(self.ramp.at(step) * ranks.numel())
        return keep_largest(ranks, num_kept)


class Layers(NamedTuple):
    """The layers of a model that can be pruned, and the names of those that stay as they are."""

    prunable: dict[str, nn.Module]
    kept: list[str]


def find_layers(model: nn.Module, pattern: Pattern | None = None) -> Layers:
    """Linear and convolutional layers whose weight no other module uses."""
    prunable: dict[str, nn.Module] = {}
    uses = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    for name, module in model.named_modules():
        weight = getattr(module, WEIGHT, None)
        if not isinstance(weight, nn.Parameter) or weight.dim() < 2:
            continue
        # Not a subclass: one may use its weight in another way than its forward.
        fits = type(module) in _LAYERS and uses[id(weight)] == 1 and weight.requires_grad
        if pattern is not None:
            fits = fits and weight[0].numel() % pattern.num_neighbours == 0
        if fits:
            prunable[name or WEIGHT] = module
    if not prunable:
        how = rows = ""
        if pattern is not None:
            how = f" {pattern.num_kept}:{pattern.num_neighbours}"
            rows = f", with a multiple of {pattern.num_neighbours} weights for each output"
        raise UsageError(
            f"The model, a {type(model).__name__}, has no layer that can be pruned{how}: a linear "
            f"or convolutional layer of torch.nn whose weight is its own{rows}."
        )
    return Layers(prunable, [n for n in layers_with_matrices(model) if n not in prunable])


def add_masks(model: nn.Module, ramp: Ramp, pattern: Pattern | None, *, has_scores: bool) -> None:
    """Let the layers of a model apply masks to their weights from now on."""
    for module in find_layers(model, pattern).prunable.values():
        assert isinstance(module.weight, Tensor)
        mask = SparseWeight(module.weight, ramp, pattern, has_scores)
        parametrize.register_parametrization(module, WEIGHT, mask)
        mask.steps.zero_()  # torch has called it once


def bake_masks(model: nn.Module) -> nn.Module:
    """The model without masks: its weights are what they left, under their own names."""
    model.eval()
    for module, _ in _masked(model):
        parametrize.remove_parametrizations(module, WEIGHT, leave_parametrized=True)
    return model


def _masked(model: nn.Module) -> Iterator[tuple[nn.Module, SparseWeight]]:
    for module in list(model.modules()):
        if parametrize.is_parametrized(module, WEIGHT):
            for one in module.parametrizations[WEIGHT]:  # type: ignore[index]
                if isinstance(one, SparseWeight):
                    yield module, one


def sparsity_of(layers: dict[str, nn.Module]) -> float:
    """The share of zeros among the weights of layers."""
    weights = [module.weight for module in layers.values() if isinstance(module.weight, Tensor)]
    zeros = sum(int((weight == 0).sum()) for weight in weights)
    return zeros / max(1, sum(weight.numel() for weight in weights))
