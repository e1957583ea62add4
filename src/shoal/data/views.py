"""Sources made of sources: the same samples in another order, some of them, or several together.

    shoal.data.in_order(source)                       as they stand, pass after pass
    shoal.data.weighted(source, weights)              drawn with replacement, by weight
    shoal.data.balanced(source, labels)               drawn so that all classes come alike often
    shoal.data.by_length(source, lengths, batch_size) batches of like lengths
    shoal.data.subset(source, ids)                    these samples alone
    shoal.data.fold(source, k, i, labels)             what to train on, and what to evaluate
    shoal.data.mix([a, b], weights=[7, 3])            from several sources, by weight
    shoal.data.join([a, b])                           one after the other, as one source

Each is a view: it keeps an order (`orders.py`) and no sample. An order over another one replaces
it. Parts whose order would be lost among others are refused. Cost: as its order's.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.collating import describe_mismatch
from shoal.data.orders import (
    Bucketed,
    Mixed,
    Order,
    RenumberedOrder,
    Sequential,
    Weighted,
    batch_size_of,
    is_shuffle,
    order_of,
)
from shoal.data.permutation import normalize_weights, permute
from shoal.data.readers.records import BulkSource, normalize_indices
from shoal.data.sources import (
    BatchSource,
    EpochSource,
    Ids,
    Pass,
    PrefetchingSource,
    SkipsBad,
    Source,
    as_source,
    map_tensors,
    normalize_index,
)
from shoal.data.transforms.wrapped import FilteredSource, WrappedSource
from shoal.data.validate import numbers_of, require_whole
from shoal.errors import RecipeError, UsageError
from shoal.logs import warn_on_screen

_MOST_ROUNDED = 1.5  # how much larger a share may become without a word


class View(WrappedSource):
    """A source's samples under an order of their own."""

    def __init__(self, source: Source, order: Order):
        super().__init__(source)
        self.order = order
        if isinstance(source, BatchSource):
            self.take = source.take


class Subset(FilteredSource):
    """Some samples of a source; made by `subset`."""

    recorded_as = "Chosen"

    def __init__(self, source: Source, kept: Ids):
        super().__init__(source, kept)
        self.order = RenumberedOrder(kept, order_of(self))


class ConcatSource:
    """Sources one after the other; made by `join`."""

    recorded_as = "Joined"

    def __init__(self, sources: Sequence[Source]):
        self.sources = list(sources)
        self.starts = np.cumsum([0, *map(len, self.sources)])
        if all(isinstance(source, BatchSource) for source in self.sources):
            self.take = self._take
        if all(isinstance(source, BulkSource) for source in self.sources):
            self.many = self._many
        if any(isinstance(source, EpochSource) for source in self.sources):
            self.vary = self._vary
        if any(isinstance(source, SkipsBad) for source in self.sources):
            self.record = self._record
        if any(isinstance(source, PrefetchingSource) for source in self.sources):
            self.fetch_ahead = self._fetch_ahead

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: int) -> Any:
        which, at = self._place(index)
        return self.sources[which][at]

    def _vary(self, index: int, of: Pass) -> Any:
        which, at = self._place(index)
        source = self.sources[which]
        return source.vary(at, of) if isinstance(source, EpochSource) else source[at]

    def _record(self, index: int, error: Exception) -> None:
        which, at = self._place(index)
        source = self.sources[which]
        if not isinstance(source, SkipsBad):
            raise error  # a bad sample of this one stops the run, as it would without the others
        source.record(at, error)

    def _fetch_ahead(self, ids: Ids) -> int:
        """As many as all parts provide for, up to the first that one does not."""
        num_provided = len(ids)
        for source, here, of_part in self._by_part(ids) if len(ids) else self._none_of_each():
            if isinstance(source, PrefetchingSource):
                num_of_part = source.fetch_ahead(of_part)
                if num_of_part < len(here):
                    num_provided = min(num_provided, int(here[num_of_part]))
        return num_provided

    def _none_of_each(self) -> Iterator[tuple[Source, Ids, Ids]]:
        none = np.empty(0, dtype=np.int64)
        return ((source, none, none) for source in self.sources)

    def _take(self, ids: Ids) -> tuple[Any, Any]:
        try:
            return self._gathered(ids)
        except RecipeError as error:  # it may name samples by their numbers in a part
            found = describe_mismatch([self[int(index)] for index in ids], ids)
            raise (error if found is None else RecipeError(found)) from error.__cause__

    def _gathered(self, ids: Ids) -> tuple[Any, Any]:
        parts, places = [], []
        for source, here, of_part in self._by_part(ids):
            assert isinstance(source, BatchSource)
            parts.append(source.take(of_part))
            places.append(here)
        if len(parts) == 1:
            return parts[0]
        turn = torch.from_numpy(np.argsort(np.concatenate(places), kind="stable"))
        inputs, targets = zip(*parts, strict=True)
        return _rows(inputs, turn), _rows(targets, turn)

    def _many(self, ids: Ids) -> list[Any]:
        found: list[Any] = [None] * len(ids)
        for source, here, of_part in self._by_part(normalize_indices(ids, len(self))):
            assert isinstance(source, BulkSource)
            for place, sample in zip(here, source.many(of_part), strict=True):
                found[place] = sample
        return found

    def _by_part(self, ids: Ids) -> Iterator[tuple[Source, Ids, Ids]]:
        """Each source that is asked, the places in `ids` that are its own, and its own numbers."""
        which = np.searchsorted(self.starts, ids, side="right") - 1
        for number in np.unique(which):
            here = np.flatnonzero(which == number)
            yield self.sources[number], here, ids[here] - self.starts[number]

    def _place(self, index: int) -> tuple[int, int]:
        at = normalize_index(index, len(self))
        which = int(np.searchsorted(self.starts, at, side="right")) - 1
        return which, at - int(self.starts[which])


def in_order(source: Any) -> View:
    """The samples as they stand, from the first to the last, in every pass."""
    source = as_source(source)
    return View(source, Sequential(len(source)))


def weighted(source: Any, weights: Sequence[float], num_draws: int | None = None) -> View:
    """Samples drawn with replacement; `num_draws` of them, by default as many as there are, make
    a pass."""
    source, given = as_source(source), numbers_of(weights, "weighted()").tolist()
    _require_one_each("weights", len(given), len(source))
    return View(source, Weighted(given, _pass_of("num_draws", num_draws, len(source))))


def balanced(source: Any, labels: Sequence[Any], num_draws: int | None = None) -> View:
    """Samples drawn with replacement so that each class comes as often as any other; `labels` are
    the classes of the samples, whole numbers or texts."""
    classes, counts = _classes(labels, "balanced()")
    return weighted(source, (1.0 / counts[classes]).tolist(), num_draws)


def fold(
    source: Any, k: int, i: int, labels: Sequence[Any] | None = None, seed: int = 0
) -> tuple[Subset, Subset]:
    """Fold `i` of `k` (from 0): all samples but its own to train on, and its own to evaluate.

    The folds of one `k` and `seed` have no sample in common and all of them together, and their
    sizes differ by one at most. With `labels`, so does the number of samples of each class.
    """
    source = as_source(source)
    for number in (k, i, seed):
        require_whole(number, "fold()")
    if not 2 <= k <= len(source) or not 0 <= i < k:
        raise UsageError(
            f"fold(k={k}, i={i}) of {len(source)} samples: k is from 2 to the number of samples, "
            "and i from 0 to k - 1."
        )
    dealt = permute(np.arange(len(source), dtype=np.int64), len(source), seed, 0)
    if labels is not None:
        _require_one_each("labels", len(labels), len(source))
        dealt = dealt[np.argsort(_classes(labels, "fold()")[0][dealt], kind="stable")]
    is_held_out = np.zeros(len(source), dtype=np.bool_)
    is_held_out[dealt[i::k]] = True
    train, held_out = (np.flatnonzero(which) for which in (~is_held_out, is_held_out))
    return subset(source, train.tolist()), subset(source, held_out.tolist())


def _classes(labels: Sequence[Any], what: str) -> tuple[Ids, Ids]:
    """The number of the class of each label, and how many labels each class has."""
    found = np.asarray(labels)
    if found.ndim != 1 or not found.size or found.dtype.kind not in "biuUS":
        raise UsageError(
            f"{what} was given labels of {found.dtype} {list(found.shape)}. It needs a list with "
            "the class of each sample, whole numbers or texts."
        )
    _, classes, counts = np.unique(found, return_inverse=True, return_counts=True)
    return classes, counts


def by_length(source: Any, lengths: Sequence[int], batch_size: int, window: int = 64) -> View:
    """Batches of samples of like lengths, so that little is padded; `batch_size` is the Run's."""
    source, given = as_source(source), numbers_of(lengths, "by_length()", are_whole=True).tolist()
    _require_one_each("lengths", len(given), len(source))
    for number in (batch_size, window):
        require_whole(number, "by_length()")
    return View(source, Bucketed(given, batch_size, window))


def subset(source: Any, ids: Sequence[int]) -> Subset:
    """These samples alone, as a source of their own: sample i of it is number `ids[i]`."""
    source = as_source(source)
    chosen = numbers_of(ids, "subset()", are_whole=True).astype(np.int64)
    if not chosen.size or chosen.min() < 0 or chosen.max() >= len(source):
        raise UsageError(f"subset() was given ids that are not all from 0 to {len(source) - 1}.")
    return Subset(source, chosen)


def join(sources: Sequence[Any]) -> ConcatSource:
    """Several sources as one, shuffled together."""
    joined = _joined(sources)
    for number, source in enumerate(joined.sources):
        if not is_shuffle(order := order_of(source)):
            raise UsageError(
                f"source {number} of join() (counted from 0) has an order of its own "
                f"({type(order).__name__}), which would be lost: join() shuffles all samples "
                "together. Join first and put the order over that, such as in_order(join([a, b])); "
                "or use mix(), in which each source keeps its order."
            )
    return joined


def mix(
    sources: Sequence[Any], weights: Sequence[float] | None = None, num_samples: int | None = None
) -> View:
    """Samples from several sources, each as often as its weight says (by default, its length).

    Each source goes through its own samples without replacement, pass after pass, at its own pace.
    `num_samples`, by default as many as all have together, make a pass of the mixture.
    """
    joined = _joined(sources)
    lengths = [len(source) for source in joined.sources]
    if 0 in lengths:
        raise UsageError(
            f"source {lengths.index(0)} of mix() (counted from 0) has no samples. Leave it out."
        )
    weights = lengths if weights is None else numbers_of(weights, "mix()").tolist()
    _require_one_each("weights", len(weights), len(lengths), "source")
    orders = [order_of(source) for source in joined.sources]
    for number, order in enumerate(orders):
        if batch_size_of(order) is not None:
            raise UsageError(
                f"source {number} of mix() (counted from 0) is put by length into batches, which "
                "would be lost: samples of the others come in between. Mix without by_length(), or "
                "put it over all of them: by_length(join([a, b]), lengths, batch_size)."
            )
    num_samples = _pass_of("num_samples", num_samples, len(joined))
    mixed = Mixed(orders, lengths, weights, num_samples)
    _warn_of_rounding(weights, mixed.shares)
    return View(joined, mixed)


def _warn_of_rounding(weights: Sequence[float], shares: Sequence[int]) -> None:
    """Shares are whole numbers: a small one may become far larger than it was asked for."""
    for number, (asked, share) in enumerate(zip(normalize_weights(weights), shares, strict=True)):
        if share > _MOST_ROUNDED * asked * sum(shares):
            warn_on_screen(
                f"mix(): the weight of source {number} (counted from 0) is {asked:.2g} of all, and "
                f"it comes {share} in {sum(shares)} times, which is the least. Join it with "
                "another source, join([a, b]), to have each of its samples as often as the others."
            )


def _joined(sources: Sequence[Any]) -> ConcatSource:
    given = list(sources) if isinstance(sources, Iterable) else []
    if not given:
        raise UsageError("join() and mix() need a list of sources, with one at least.")
    return ConcatSource([as_source(source) for source in given])


def _pass_of(name: str, asked: int | None, usual: int) -> int:
    """How many samples make a pass."""
    if asked is not None:
        require_whole(asked, name)
    if asked is not None and asked < 1:
        raise UsageError(f"{name} is {asked}. A pass has at least one sample.")
    return usual if asked is None else asked


def _require_one_each(what: str, num_given: int, num_wanted: int, of: str = "sample") -> None:
    if num_given != num_wanted:
        raise UsageError(
            f"{num_given} {what} were given for {num_wanted} {of}s. Each {of} needs one."
        )


def _rows(parts: Sequence[Any], turn: Tensor) -> Any:
    """Rows of several sources in one value, in the order in which they were asked for."""
    kinds = {_form(part) for part in parts}
    if len(kinds) > 1:
        raise RecipeError(f"sources that are mixed give unlike samples: {' and '.join(kinds)}.")
    if isinstance(parts[0], dict):
        return {name: _rows([part[name] for part in parts], turn) for name in parts[0]}
    if isinstance(parts[0], tuple):
        return tuple(_rows(of_place, turn) for of_place in zip(*parts, strict=True))
    return torch.cat(list(parts)).index_select(0, turn)


def _form(value: Any) -> str:
    found: list[str] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(f"{tensor.dtype} {list(tensor.shape[1:])}")
        return tensor

    map_tensors(note, value)
    return f"{type(value).__name__}({', '.join(found)})"
