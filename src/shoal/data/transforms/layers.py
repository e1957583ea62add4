"""Layers: what all sources have in common that are made of one other source, sample for sample.

A layer keeps the order and the policy for bad samples of what lies below. It has `take`, `many` and
`vary` only where they make sense, since a loader looks for them: they are attributes of the object,
set when it is made.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from shoal.data.orders import Order
from shoal.data.readers.records import Many
from shoal.data.sources import LeavesOut, Pass, Source, Varied, as_source

_BLOCK = 256  # samples that are asked for at once


class Layer:
    """A source over another one of the same length."""

    def __init__(self, source: Any):
        self.source: Source = as_source(source)
        order = getattr(source, "order", None)
        if isinstance(order, Order):
            self.order = order
        if isinstance(source, LeavesOut):
            self.record = source.record

    def __len__(self) -> int:
        return len(self.source)


def place_of(index: int, length: int) -> int:
    """The index counted from the front; an IndexError, which ends iteration, if there is none."""
    if not -length <= index < length:
        raise IndexError(f"sample {index} of {length}")
    return int(index) % length


def sample_of(source: Source, index: int, of: Pass | None) -> Any:
    """A sample as it is in a pass, if one is given and the source tells them apart."""
    if of is not None and isinstance(source, Varied):
        return source.vary(index, of)
    return source[index]


def loads(source: Source, indices: range) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Each index, and a function that loads its sample; many are asked for at once if possible."""
    for start in range(indices.start, indices.stop, _BLOCK):
        block = range(start, min(start + _BLOCK, indices.stop))
        found = _many(source, block)
        for offset, index in enumerate(block):
            if found is None:
                yield index, partial(source.__getitem__, index)
            else:
                yield index, partial(found.__getitem__, offset)


def _many(source: Source, block: range) -> list[Any] | None:
    if not isinstance(source, Many):
        return None
    try:
        return source.many(np.arange(block.start, block.stop, dtype=np.int64))
    except Exception:  # noqa: BLE001 (asked for one by one, the one that fails is known)
        return None


def below(source: Any) -> list[Any]:
    """The sources that a source is made of."""
    several = getattr(source, "sources", ())
    found = list(several) if isinstance(several, list | tuple) else []
    one = getattr(source, "source", None)
    return [*found, one] if isinstance(one, Source) else found
