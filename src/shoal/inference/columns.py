"""What a model answers for a batch, as named columns with a row for each sample. Pure.

A tensor is the column `output`. Of a dict, a tuple or what transformers return, each tensor is a
column under its name or number (`logits`, `1`, `hidden.0`). What has no row for each sample, such
as a loss or a cache, is left out.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from shoal.errors import RecipeError

Columns = dict[str, Tensor]
ONLY = "output"  # the column of a model that answers with one tensor
SAMPLE = "sample"  # the column of samples' numbers


def columns_of(output: Any, num_samples: int) -> Columns:
    """The tensors of an output that have a row for each of its samples."""
    found = dict(_named(output, ""))
    kept = {name: t for name, t in found.items() if t.dim() and t.shape[0] == num_samples}
    if not kept:
        shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in found.items())
        raise RecipeError(
            f"For {num_samples} samples the model answered with {shapes or type(output).__name__}: "
            f"no tensor of it has {num_samples} rows, one for each sample. Let it return one."
        )
    if SAMPLE in kept:
        raise RecipeError(
            f"The model calls one of its outputs {SAMPLE!r}, which is the name of the samples' "
            "numbers. Call it otherwise."
        )
    return kept


def row_of(columns: Columns, row: int) -> Any:
    """A sample's answer: a tensor if the model gives one, else a dict of them."""
    if columns.keys() == {ONLY}:
        return columns[ONLY][row]
    return {name: column[row] for name, column in columns.items()}


def _named(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path or ONLY, value
        return
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, tuple | list):
        value = dict(enumerate(value))
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        yield from _named(inner, f"{path}.{key}" if path else str(key))
