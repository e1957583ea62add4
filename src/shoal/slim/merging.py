"""Models of one shape made into one: the arithmetic of averages, task vectors and arcs.

All are pure functions of tensors that have one name in every model. They compute in double
precision and give the dtype of the first. What is no floating-point number (a counter of batches)
cannot be averaged, and is the first model's.

Averages: Izmailov et al. 2018, arXiv 1803.05407; soups: Wortsman et al. 2022, arXiv 2203.05482;
task arithmetic: Ilharco et al. 2023, arXiv 2212.04089; TIES: Yadav et al. 2023, arXiv 2306.01708.
Cost: the tensor once in doubles for each model. Read next: `fusing.py`, which chooses among them.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from shoal.errors import BadCheckpoint
from shoal.formats.match import match_tensors
from shoal.formats.open_weights import open_weights
from shoal.formats.weights import ModelWeights
from shoal.training.run import Run

State = dict[str, Tensor]

NEARLY_PARALLEL = 1e-6  # of an angle in radians, below which a rotation is a straight line


def average(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The weighted mean; `weights` need not add up to 1."""
    if not values[0].is_floating_point():
        return values[0].clone()
    total = sum(weights)
    mean = sum(v.double() * (w / total) for v, w in zip(values, weights, strict=True))
    assert isinstance(mean, Tensor)
    return mean.to(values[0].dtype)


def add_task_vectors(base: Tensor, values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """`base` and what each model learnt beyond it, times its weight."""
    if not base.is_floating_point():
        return base.clone()
    start = base.double()
    learnt = sum((v.double() - start) * w for v, w in zip(values, weights, strict=True))
    return (start + learnt).to(base.dtype)


def merge_ties(
    base: Tensor, values: Sequence[Tensor], weights: Sequence[float], density: float
) -> Tensor:
    """Task vectors without what disturbs: of each only its largest `density`, and of these only
    those of the sign that most of the sum has. The mean of what remains, times the mean weight."""
    if not base.is_floating_point():
        return base.clone()
    start = base.double()
    learnt = torch.stack([_largest(v.double() - start, density) for v in values])
    scaled = learnt * torch.tensor(weights, dtype=torch.float64).view(-1, *[1] * base.dim())
    sign = scaled.sum(0).sign()
    agrees = (learnt.sign() == sign) & (learnt != 0)
    count = agrees.sum(0).clamp(min=1)
    return (start + (scaled * agrees).sum(0) / count).to(base.dtype)


def interpolate_on_sphere(one: Tensor, other: Tensor, share: float) -> Tensor:
    """Between two tensors along the arc (SLERP): `share` 0 is the one, 1 the other.

    Length and direction change evenly, while those of a straight line are shorter in the middle.
    """
    if not one.is_floating_point():
        return one.clone()
    a, b = one.double().flatten(), other.double().flatten()
    lengths = float(a.norm()), float(b.norm())
    angle = 0.0
    if all(lengths):
        angle = math.acos(max(-1.0, min(1.0, float(a @ b) / (lengths[0] * lengths[1]))))
    if angle < NEARLY_PARALLEL or math.pi - angle < NEARLY_PARALLEL:
        mixed = a * (1 - share) + b * share
    else:
        mixed = (a * math.sin((1 - share) * angle) + b * math.sin(share * angle)) / math.sin(angle)
    return mixed.view_as(one).to(one.dtype)


def decayed_weights(count: int, decay: float) -> list[float]:
    """Of an exponential moving average over `count` models, the oldest first."""
    kept = [(1 - decay) * decay ** (count - 1 - i) for i in range(count)]
    kept[0] = decay ** (count - 1)
    return kept


def _largest(vector: Tensor, density: float) -> Tensor:
    """The vector with all but its largest elements set to 0."""
    count = max(1, round(density * vector.numel()))
    if count >= vector.numel():
        return vector
    flat = vector.flatten()
    kept = torch.zeros_like(flat)
    largest = flat.abs().topk(count).indices
    kept[largest] = flat[largest]
    return kept.view_as(vector)


class MergedTensors(NamedTuple):
    """The tensors of one model by the names of a recipe's, read one at a time."""

    place: str
    names: list[str]
    read: Callable[[str], Tensor]

    @classmethod
    def open(cls, place: str | None, run: Run) -> Self:
        """A checkpoint or other weights; with None, what the recipe begins with."""
        model = run.make_model()
        if place is None:
            state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
            return cls("the recipe's first weights", list(state), state.__getitem__)
        weights = ModelWeights(open_weights(place).weights)
        found = match_tensors(weights, model)
        if problems := found.problems():
            raise BadCheckpoint(
                f"{place} is not of the recipe's model ({problems}). Models of one shape can be "
                "merged; for unlike ones there are --how ensemble and --how stack."
            )
        source = found.source_names
        return cls(place, list(source), lambda name: weights.whole(source[name]))


def set_state(model: nn.Module, state: State) -> None:
    """Copy merged tensors into a model."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(tensor)
