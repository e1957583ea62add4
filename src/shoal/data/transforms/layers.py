"""Layers: what all sources have in common that are made of one other source, sample for sample.

A layer keeps the order and the policy for bad samples of what lies below. It has `take`, `many` and
`vary` only where they make sense, since a loader looks for them: they are attributes of the object,
set when it is made.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from shoal.data.orders import order_among
from shoal.data.readers.records import Many, ask_many
from shoal.data.sources import (
    FetchesAhead,
    Ids,
    LeavesOut,
    Pass,
    Source,
    Takes,
    Varied,
    as_source,
    is_of_sample,
    is_outage,
    not_reached,
    position,
)
from shoal.data.transforms.drawing import Change, name_of
from shoal.data.waiting import WAITING
from shoal.errors import RecipeError, UsageError

ANY_PASS = Pass(0, 0)
"""The pass of `source[i]`, which is the same each time: evaluation, statistics, a look at it."""

_BLOCK = 256  # samples that are asked for at once


class Layer:
    """A source over another one. A kind of layer says what it does to a sample (`_change`), and
    which sample of the source below is meant by an index (`_below`)."""

    def __init__(self, source: Any):
        self.source: Source = as_source(source)
        if getattr(source, "order", None) is not None:
            self.order = source.order
        if isinstance(source, LeavesOut):
            self.record = self._record
        if isinstance(source, Varied):
            self.vary = self._vary
        if isinstance(source, Many):
            self.many = self._many
        if isinstance(source, FetchesAhead):
            self.fetch_ahead = self._fetch_ahead

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self._sample(index, None)

    def _vary(self, index: int, of: Pass) -> Any:
        return self._sample(index, of)

    def _sample(self, index: int, of: Pass | None) -> Any:
        at = self._below(position(index, len(self)))
        vary = None if of is None else getattr(self.source, "vary", None)
        sample = self.source[at] if vary is None else vary(at, of)
        return self._change(sample, at, of or ANY_PASS)

    def _many(self, ids: Ids) -> list[Any]:
        assert isinstance(self.source, Many)
        places = [self._below(int(index)) for index in ids]
        samples = self.source.many(np.array(places, dtype=np.int64))
        found = zip(samples, places, strict=True)
        return [self._change(sample, at, ANY_PASS) for sample, at in found]

    def _fetch_ahead(self, ids: Ids) -> int:
        assert isinstance(self.source, FetchesAhead)
        return self.source.fetch_ahead(ids)

    def _record(self, index: int, error: Exception) -> None:
        assert isinstance(self.source, LeavesOut)
        self.source.record(self._below(index), error)

    def _below(self, index: int) -> int:
        return index

    def _change(self, sample: Any, index: int, of: Pass) -> Any:
        """The sample as it is in a pass; `index` is its number in the source below."""
        return sample


class Part(Layer):
    """Those samples of a source that are kept: sample i is number `kept[i]` below."""

    def __init__(self, source: Source, kept: Ids):
        super().__init__(source)
        self.kept = kept
        if hasattr(self, "order"):
            self.order = order_among(self.order, kept)
        if isinstance(source, Takes):
            self.take = self._take

    def __len__(self) -> int:
        return len(self.kept)

    def _below(self, index: int) -> int:
        return int(self.kept[index])

    def _take(self, ids: Ids) -> tuple[Any, Any]:
        assert isinstance(self.source, Takes)
        return self.source.take(self.kept[ids])

    def _fetch_ahead(self, ids: Ids) -> int:
        return super()._fetch_ahead(self.kept[ids])


def applied(function: Change, index: int, *arguments: Any) -> Any:
    """What a function makes of a sample; an error that names both if it fails."""
    try:
        return function(*arguments)
    except RecipeError as error:
        raise RecipeError(f"sample {index}: {name_of(function)}: {error}") from error
    except UsageError as error:  # it was given something wrong, whatever the sample
        raise UsageError(f"{name_of(function)}: {error}") from error
    except BaseException as error:
        if not is_of_sample(error):
            raise
        if is_outage(error):
            raise not_reached(index, error) from error
        what = f"{type(error).__name__}: {error}"
        raise RecipeError(f"sample {index}: {name_of(function)} failed: {what}") from error


def loads(source: Source, indices: range) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Each index, and a function that loads its sample; many are asked for at once if possible."""
    for start in range(indices.start, indices.stop, _BLOCK):
        block = range(start, min(start + _BLOCK, indices.stop))
        with _waiting(block):
            found = ask_many(source, block)
        for offset, index in enumerate(block):
            with _waiting(range(index, index + 1)):  # until the next is asked for
                if found is None:
                    yield index, partial(source.__getitem__, index)
                else:
                    yield index, partial(found.__getitem__, offset)


def _waiting(indices: range) -> AbstractContextManager[None]:
    """Note what is waited for, so that a source that hangs is found out; for one thread."""
    if threading.current_thread() is not threading.main_thread():
        return nullcontext()
    return WAITING.on(np.arange(indices.start, indices.stop, dtype=np.int64))


def below(source: Any) -> list[Any]:
    """The sources that a source is made of."""
    several = getattr(source, "sources", ())
    found = list(several) if isinstance(several, list | tuple) else []
    one = getattr(source, "source", None)
    return [*found, one] if isinstance(one, Source) else found
