"""Padding: samples of unlike lengths in one batch, each filled up to the longest of its piece.

    Run(collate=shoal.data.pad(), loss=...)                   inputs with 0, targets with -100
    Run(collate=shoal.data.pad(value=pad_id, mask="attention_mask"))    model(..., attention_mask=)

How long a batch is depends on its piece, and so on the plan. What is trained does not, if the model
looks away from what is filled in (a mask) and the loss leaves it out and returns a pair (sum,
weight): sums and weights of all pieces are added up before the one division. `-100` is what torch's
cross entropy leaves out; `shoal.losses` returns such pairs.

Not for batches of like lengths, of which little is filled: `shoal.data.by_length` makes them.
Cost: a copy of each tensor that is shorter than the longest. Next: `collating.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import default_collate

from shoal.data.sources import tensor_from_array
from shoal.data.validate import require_whole
from shoal.errors import RecipeError, UsageError

_SEQUENCES = (Tensor, np.ndarray, list)


def pad(
    value: float = 0, *, target: float = -100, mask: str | bool = False, multiple: int = 1
) -> Callable[[list[Any]], tuple[Any, Any]]:
    """A `collate` that fills tensors up to the longest of their place, at the end of each dim.

    Inputs are filled with `value`, targets with `target`. Tensors and lists of numbers are padded,
    in tuples and dicts too; numbers are put together as they are. With `mask`, inputs get one more
    tensor, [samples, longest] of bool, which is True where a sample has a value of its own: under
    that name in a dict, as the last one of a tuple. Lengths become a multiple of `multiple`.
    """
    require_whole(multiple, "pad(multiple=...)")
    if multiple < 1:
        raise UsageError(f"pad(multiple={multiple}): lengths are a multiple of at least 1.")

    def collate(samples: list[Any]) -> tuple[Any, Any]:
        for sample in samples:
            if not isinstance(sample, tuple | list) or len(sample) != 2:
                raise RecipeError(
                    f"pad() was given a sample that is a {type(sample).__name__}. It takes pairs "
                    "(inputs, target)."
                )
        inputs, targets = ([sample[part] for sample in samples] for part in (0, 1))
        batch = _padded(inputs, value, multiple)
        if mask:
            batch = _with_mask(batch, _mask(inputs, multiple), mask)
        return batch, _padded(targets, target, multiple)

    return collate


def _padded(values: list[Any], fill: float, multiple: int) -> Any:
    first = values[0]
    if isinstance(first, Mapping):
        return {name: _padded([v[name] for v in values], fill, multiple) for name in first}
    if isinstance(first, tuple):
        return tuple(_padded(list(parts), fill, multiple) for parts in zip(*values, strict=True))
    if isinstance(first, _SEQUENCES):
        return _stacked([_tensor(value) for value in values], fill, multiple)
    return default_collate(values)


def _stacked(tensors: Sequence[Tensor], fill: float, multiple: int) -> Tensor:
    dims, kinds = {t.dim() for t in tensors}, {t.dtype for t in tensors if t.numel()}
    if len(dims) > 1 or len(kinds) > 1:
        raise RecipeError(
            f"pad() fits tensors of one type and number of dimensions together, and was given "
            f"{_described(tensors[0])} and {_described(_odd_one(tensors))}."
        )
    sizes = [max(lengths) for lengths in zip(*(t.shape for t in tensors), strict=True)]
    if sizes:
        sizes[0] = -(-sizes[0] // multiple) * multiple
    kind = next(iter(kinds), tensors[0].dtype)
    return torch.stack([_filled(t.to(kind), sizes, fill) for t in tensors])


def _filled(tensor: Tensor, sizes: Sequence[int], fill: float) -> Tensor:
    missing = [size - own for size, own in zip(sizes, tensor.shape, strict=True)]
    if not any(missing):
        return tensor
    return F.pad(tensor, [n for size in reversed(missing) for n in (0, size)], value=fill)


def _mask(inputs: list[Any], multiple: int) -> Tensor:
    """By the first of a sample's values that is a sequence."""
    ones = [torch.ones(len(_sequence(value)), dtype=torch.bool) for value in inputs]
    return _stacked(ones, False, multiple)


def _sequence(value: Any) -> Any:
    while isinstance(value, Mapping | tuple):
        parts = list(value.values()) if isinstance(value, Mapping) else value
        value = next((part for part in parts if isinstance(part, _SEQUENCES)), None)
    if not isinstance(value, _SEQUENCES) or (isinstance(value, Tensor) and not value.dim()):
        raise RecipeError(
            f"pad(mask=...) looks at the length of the inputs, and they are a "
            f"{type(value).__name__}. Leave mask out, or give sequences."
        )
    return value


def _with_mask(batch: Any, mask: Tensor, name: str | bool) -> Any:
    if isinstance(batch, Mapping):
        if not isinstance(name, str):
            raise RecipeError(
                "pad(mask=True) was given inputs that are a dict. Give the name that the mask is "
                'to have there, such as mask="attention_mask".'
            )
        return {**batch, name: mask}
    return (*batch, mask) if isinstance(batch, tuple) else (batch, mask)


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    return tensor_from_array(value) if isinstance(value, np.ndarray) else torch.tensor(value)


def _odd_one(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    unlike = (t for t in tensors if t.dim() != first.dim() or t.dtype != first.dtype)
    return next(unlike, first)


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
