"""How the tensors of a source and of a model go together, by name.

One rule for all who put weights into a model: names and shapes agree, and fractions do not become
whole numbers. A tensor that the model has under several names may come under any of them; buffers
that it can make again may be there or not.
"""

from typing import NamedTuple

import torch
from torch import nn

from shoal.checkpoint.types import first_names
from shoal.formats.weights import Model

_NAMED = 5


class Match(NamedTuple):
    """What goes where, and what does not."""

    taken: dict[str, str]  # of the model -> of the source
    missing: list[str]  # in the source
    strange: list[str]  # to the model
    other_shape: list[str]
    other_kind: list[str]  # whole numbers here, fractions there, or complex ones

    def problems(self) -> str:
        """What does not go together, in words; empty if all does."""
        told = (
            ("not in it", self.missing),
            ("not in the model", self.strange),
            ("of another shape", self.other_shape),
            ("of another kind of numbers", self.other_kind),
        )
        return "; ".join(f"{what}: {_some(names)}" for what, names in told if names)


def match(source: Model, model: nn.Module) -> Match:
    """Look at names, shapes and types, not at a byte."""
    first, own = first_names(model), model.state_dict()
    taken: dict[str, str] = {}
    other_shape, other_kind = [], []
    for name in source.names:
        if name not in first:
            continue
        if source.shape(name) != tuple(own[name].shape):
            other_shape.append(name)
        elif _kind(source.dtype(name)) != _kind(own[name].dtype):
            other_kind.append(name)
        else:
            taken.setdefault(first[name], name)
    told = {first[name] for name in (*other_shape, *other_kind)}
    missing = sorted(set(first.values()) - taken.keys() - told)
    strange = sorted(set(source.names) - first.keys() - made_again(model))
    return Match(taken, missing, strange, other_shape, other_kind)


def made_again(model: nn.Module) -> set[str]:
    """The buffers that a model does not count as its state."""
    return {name for name, _ in model.named_buffers()} - model.state_dict().keys()


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
