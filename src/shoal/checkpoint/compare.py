"""Compare two checkpoints: tensor by tensor, and the entries of their manifests.

The two may have been saved under different plans, so boxes are compared, not files: each chunk of
the first with the same box of the second. Tensors whose chunks have equal boxes and equal hashes
are equal without being read; all bytes that are read are verified. Costs the memory of a few
chunks.
"""

import math
from collections.abc import Iterator
from typing import Any

import msgspec
import torch
from torch import Tensor

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.load import CheckpointReader
from shoal.errors import BadCheckpoint
from shoal.parallel.layout import Slice

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class ValueDistance(msgspec.Struct, frozen=True):
    """How far two tensors of one shape and dtype are apart.

    An element differs if its bits differ. A difference to NaN counts as infinite.
    """

    num_elements: int
    num_different: int
    largest_absolute: float
    largest_relative: float  # to the larger of the two


class TensorDifference(msgspec.Struct, frozen=True):
    """A tensor that differs; `a` and `b` are its dtype and shape, None where it is missing."""

    name: str
    kind: str  # "only in a", "only in b", "type", "shape" or "values"
    a: str | None = None
    b: str | None = None
    values: ValueDistance | None = None


class ValueDifference(msgspec.Struct, frozen=True):
    """An entry of the manifest that differs and is no tensor, such as `progress.step`."""

    name: str
    a: Any = None
    b: Any = None
    only_in: str = ""  # "a" or "b" if the other has none


class Differences(msgspec.Struct, frozen=True):
    """All differences, and the number of equal tensors."""

    num_equal: int
    tensors: list[TensorDifference]
    entries: list[ValueDifference]

    def __bool__(self) -> bool:
        return bool(self.tensors or self.entries)


def compare_checkpoints(a: CheckpointReader, b: CheckpointReader) -> Differences:
    """Find all differences. Raises BadCheckpoint for bytes that are not those saved."""
    names = sorted({*a, *b})
    tensors = [found for name in names if (found := _compare_tensor(a, b, name)) is not None]
    entries = [
        found
        for part in ("progress", "origin", "plain")
        for found in _compare_entry(part, *(_plain(one, part) for one in (a, b)))
    ]
    return Differences(len(names) - len(tensors), tensors, entries)


def _compare_tensor(a: CheckpointReader, b: CheckpointReader, name: str) -> TensorDifference | None:
    if name not in b:
        return TensorDifference(name, "only in a", a=_described(a, name))
    if name not in a:
        return TensorDifference(name, "only in b", b=_described(b, name))
    described = (_described(a, name), _described(b, name))
    if a.dtype(name) != b.dtype(name):
        return TensorDifference(name, "type", *described)
    if a.shape(name) != b.shape(name):
        return TensorDifference(name, "shape", *described)
    ours, others = a.tensor(name), b.tensor(name)
    if _hashes(ours) == _hashes(others):
        return None
    values = _compare_values(a, b, ours)
    return TensorDifference(name, "values", *described, values) if values.num_different else None


def _described(opened: CheckpointReader, name: str) -> str:
    tensor = opened.tensor(name)
    return f"{tensor.dtype} {list(tensor.shape)}"


def _hashes(tensor: manifests.TensorEntry) -> dict[tuple[tuple[int, ...], tuple[int, ...]], str]:
    return {(chunk.offset, chunk.shape): chunk.hash for chunk in tensor.chunks}


def _compare_values(
    a: CheckpointReader, b: CheckpointReader, tensor: manifests.TensorEntry
) -> ValueDistance:
    different, absolute, relative = 0, 0.0, 0.0
    for chunk in tensor.chunks:
        ours, others = (torch.empty(chunk.shape, dtype=a.dtype(tensor.name)) for _ in range(2))
        for side, opened, made in (("a", a, ours), ("b", b, others)):
            try:
                opened.fill(tensor.name, [Slice(made, tensor.shape, chunk.offset)])
            except BadCheckpoint as bad:
                raise BadCheckpoint(f"{side}: {bad}") from None
        differs = _bits(ours) != _bits(others)
        count = int(differs.sum())
        if count:
            furthest = _largest_difference(ours.reshape(-1)[differs], others.reshape(-1)[differs])
            different += count
            absolute, relative = max(absolute, furthest[0]), max(relative, furthest[1])
    return ValueDistance(math.prod(tensor.shape), different, absolute, relative)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(_BITS[tensor.element_size()])


def _largest_difference(ours: Tensor, others: Tensor) -> tuple[float, float]:
    """The largest absolute and relative difference."""
    wide = torch.int64  # whole numbers as such: doubles do not hold all of 64 bits
    if ours.is_complex():
        wide = torch.complex128
    elif ours.is_floating_point():
        wide = torch.float64
    ours, others = ours.to(wide), others.to(wide)
    apart = (ours - others).abs().double().nan_to_num(nan=math.inf, posinf=math.inf)
    apart[ours.isnan() & others.isnan()] = 0.0
    larger = torch.maximum(ours.abs().double(), others.abs().double())
    share = (apart / larger).nan_to_num(nan=math.inf, posinf=math.inf)
    share[apart == 0] = 0.0
    return float(apart.max()), float(share.max())


def _plain(opened: CheckpointReader, part: str) -> Any:
    return msgspec.to_builtins(getattr(opened.manifest, part))


def _compare_entry(name: str, a: Any, b: Any) -> Iterator[ValueDifference]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b}):
            if key not in b:
                yield ValueDifference(f"{name}.{key}", a=a[key], only_in="a")
            elif key not in a:
                yield ValueDifference(f"{name}.{key}", b=b[key], only_in="b")
            else:
                yield from _compare_entry(f"{name}.{key}", a[key], b[key])
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for place, pair in enumerate(zip(a, b)):
            yield from _compare_entry(f"{name}[{place}]", *pair)
    elif a != b or type(a) is not type(b):
        yield ValueDifference(name, a=a, b=b)
