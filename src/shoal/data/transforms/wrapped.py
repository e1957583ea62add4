"""Wrapped sources: the base of all sources that are made of one other source, sample for sample.

A wrapper keeps the order and the policy for bad samples of the source below. It has `take`, `many`
and `vary` only where they make sense, since a loader looks for them: they are attributes of the
object, set when it is made. Next: `mapping.py`, the simplest of them.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from shoal.data.orders import restrict_order
from shoal.data.readers.records import BulkSource, load_many
from shoal.data.sources import (
    BatchSource,
    EpochSource,
    Ids,
    Pass,
    PrefetchingSource,
    SkipsBad,
    Source,
    as_source,
    normalize_index,
    raise_of_sample,
    stream_of,
)
from shoal.data.stalls import STALLS
from shoal.data.transforms.randomness import Change, function_name
from shoal.errors import RecipeError, UsageError

ANY_PASS = Pass(0, 0)
"""The pass of `source[i]`, which is the same each time: evaluation, statistics, a look at it."""

_BLOCK = 256  # samples that are asked for at once


class WrappedSource:
    """A source over another one. A subclass says what it does to a sample (`_change`), and which
    sample of the source below an index means (`_below`)."""

    def __init__(self, source: Any):
        self.source: Source = as_source(source, streams=True)
        source = self.source
        if getattr(source, "order", None) is not None:
            self.order = source.order
        if (stream := stream_of(source)) is not None:
            self.stream_below = stream
        if isinstance(source, SkipsBad):
            self.record = self._record
        if isinstance(source, EpochSource):
            self.vary = self._vary
        if isinstance(source, BulkSource):
            self.many = self._many
        if isinstance(source, PrefetchingSource):
            self.fetch_ahead = self._fetch_ahead

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self._sample(index, None)

    def _vary(self, index: int, of: Pass) -> Any:
        return self._sample(index, of)

    def _sample(self, index: int, of: Pass | None) -> Any:
        at = self._below(normalize_index(index, len(self)))
        vary = None if of is None else getattr(self.source, "vary", None)
        sample = self.source[at] if vary is None else vary(at, of)
        return self._change(sample, at, of or ANY_PASS)

    def _many(self, ids: Ids) -> list[Any]:
        assert isinstance(self.source, BulkSource)
        places = [self._below(int(index)) for index in ids]
        samples = self.source.many(np.array(places, dtype=np.int64))
        found = zip(samples, places, strict=True)
        return [self._change(sample, at, ANY_PASS) for sample, at in found]

    def _fetch_ahead(self, ids: Ids) -> int:
        assert isinstance(self.source, PrefetchingSource)
        return self.source.fetch_ahead(ids)

    def _record(self, index: int, error: Exception) -> None:
        assert isinstance(self.source, SkipsBad)
        self.source.record(self._below(index), error)

    def _below(self, index: int) -> int:
        return index

    def _change(self, sample: Any, index: int, of: Pass) -> Any:
        """The sample as it is in a pass; `index` is its number in the source below."""
        return sample


class FilteredSource(WrappedSource):
    """Those samples of a source that are kept: sample i is number `kept[i]` below."""

    def __init__(self, source: Source, kept: Ids):
        super().__init__(source)
        self.kept = kept
        if hasattr(self, "order"):
            self.order = restrict_order(self.order, kept)
        if isinstance(source, BatchSource):
            self.take = self._take

    def __len__(self) -> int:
        return len(self.kept)

    def _below(self, index: int) -> int:
        return int(self.kept[index])

    def _take(self, ids: Ids) -> tuple[Any, Any]:
        assert isinstance(self.source, BatchSource)
        return self.source.take(self.kept[ids])

    def _fetch_ahead(self, ids: Ids) -> int:
        return super()._fetch_ahead(self.kept[ids])


def apply_to_sample(function: Change, index: int, *arguments: Any) -> Any:
    """What a function makes of a sample; an error that names both if it fails."""
    try:
        return function(*arguments)
    except RecipeError as error:
        raise RecipeError(f"sample {index}: {function_name(function)}: {error}") from error
    except UsageError as error:  # it was given something wrong, whatever the sample
        raise UsageError(f"{function_name(function)}: {error}") from error
    except BaseException as error:  # noqa: BLE001 (it is raised)
        raise_of_sample(index, error, f"sample {index}: {function_name(function)} failed")


def iterate_loads(source: Source, indices: range) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Each index, and a function that loads its sample; many are asked for at once if possible."""
    for start in range(indices.start, indices.stop, _BLOCK):
        block = range(start, min(start + _BLOCK, indices.stop))
        with _waiting(block):
            found = load_many(source, block)
        for offset, index in enumerate(block):
            with _waiting(range(index, index + 1)):  # until the next is asked for
                if found is None:
                    yield index, partial(source.__getitem__, index)
                else:
                    yield index, partial(found.__getitem__, offset)


def _waiting(indices: range) -> AbstractContextManager[None]:
    """Note what is being loaded, so that a source that hangs is noticed; for one thread."""
    if threading.current_thread() is not threading.main_thread():
        return nullcontext()
    return STALLS.on(np.arange(indices.start, indices.stop, dtype=np.int64))


def inner_sources(source: Any) -> list[Any]:
    """The sources that a source is made of."""
    several = getattr(source, "sources", ())
    found = list(several) if isinstance(several, list | tuple) else []
    one = getattr(source, "source", None)
    return [*found, one] if isinstance(one, Source) else found
