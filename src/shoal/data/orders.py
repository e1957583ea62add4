"""The orders in which samples are visited: shuffled, as they stand, by blocks, weight or length.

An order maps positions of a pass over the data to sample ids, as a pure function of seed and pass,
and can be entered anywhere. So a restart, another world size or a spare asks for any step and has
its ids at once. A source that wants another order than a plain shuffle carries one as `order`.

Cost: a shuffle keeps nothing; blocks keep a number a block, weights and lengths one a sample; a
window of a few batches is sorted at a time. Next: `permutation.py` for the permutation underneath,
`views.py` for the sources that carry these.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np
import xxhash

from shoal.data.permutation import Ids, normalize_weights, permute, permute_by, round_keys, uniform
from shoal.data.sources import recorded_name
from shoal.errors import UsageError

_PATTERN = 1024  # positions over which a mixture keeps its weights exactly
_NUM_KNOWN = 1024  # positions at either end of a pass by which an order is known


@runtime_checkable
class Order(Protocol):
    """`len(order)` positions make a pass; `ids` are the samples at some of them."""

    def __len__(self) -> int: ...

    def ids(self, positions: Ids, seed: int, epoch: int) -> Ids: ...


@runtime_checkable
class RestrictableOrder(Order, Protocol):
    """An order that can be restricted to fewer samples. It may have `first(num_samples)`, where the
    order before more were added is not that of these among all; None if it is unknown."""

    def among(self, kept: Ids) -> Order:
        """That of the samples that are kept, renumbered."""
        ...


class Sequential:
    """Each sample once a pass, as they stand."""

    def __init__(self, num_samples: int):
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def ids(self, positions: Ids, seed: int, epoch: int) -> Ids:
        return positions

    def among(self, kept: Ids) -> Self:
        return type(self)(len(kept))


class Shuffled(Sequential):
    """Each sample once a pass, in a new order each time."""

    def ids(self, positions: Ids, seed: int, epoch: int) -> Ids:
        return permute(positions, self._num_samples, seed, epoch)


class BlockShuffled:
    """Each sample once a pass, shuffled so that only `window` blocks are in use at a time.

    Blocks are shards, or whatever is best read together. Their order is shuffled, and samples are
    shuffled among each `window` of them. `numbers` are those of the samples that lie one after the
    other in the blocks, for a choice in which they are numbered otherwise.
    """

    recorded_as = "Blocks"

    def __init__(self, sizes: Sequence[int], window: int = 8, numbers: Ids | None = None):
        if window < 1:
            raise UsageError(f"window={window}. Samples are shuffled among at least 1 block.")
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._starts = _starts(self._sizes)
        self._window = window
        self._numbers = numbers
        self._dealt = lru_cache(maxsize=2)(self._deal)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def ids(self, positions: Ids, seed: int, epoch: int) -> Ids:
        blocks, bounds = self._dealt(seed, epoch)

        def pool(number: int, offsets: Ids) -> Ids:
            among = blocks[number * self._window : (number + 1) * self._window]
            edges = _starts(self._sizes[among])
            places = permute(offsets, int(edges[-1]), _key(seed, number), epoch)
            which = np.searchsorted(edges, places, side="right") - 1
            found: Ids = self._starts[among[which]] + places - edges[which]
            return found

        places = _by_pool(positions, bounds, pool)
        return places if self._numbers is None else self._numbers[places]

    def first(self, num_samples: int) -> "BlockShuffled | None":
        if self._numbers is not None:
            return None
        count = int(np.searchsorted(self._starts, num_samples))
        whole = count < len(self._starts) and self._starts[count] == num_samples
        return BlockShuffled(self._sizes[:count].tolist(), self._window) if whole else None

    def among(self, kept: Ids) -> "BlockShuffled":
        places = kept if self._numbers is None else np.argsort(self._numbers)[kept]
        turn = np.argsort(places, kind="stable")
        sizes = np.diff(np.searchsorted(places[turn], self._starts)).tolist()
        is_as_it_lies = bool((turn[1:] > turn[:-1]).all())
        return BlockShuffled(sizes, self._window, None if is_as_it_lies else turn)

    def _deal(self, seed: int, epoch: int) -> tuple[Ids, Ids]:
        """The blocks in this pass's order, and where each window of them starts."""
        numbers = np.arange(len(self._sizes), dtype=np.int64)
        blocks = permute(numbers, len(numbers), _key(seed, -1), epoch)
        starts = _starts(self._sizes[blocks])
        return blocks, np.append(starts[: -1 : self._window], starts[-1])


class WindowShuffled:
    """The samples of a stream, shuffled among each `window` of neighbours."""

    def __init__(self, num_samples: int, window: int):
        self._num_samples, self._window = num_samples - num_samples % window, window

    def __len__(self) -> int:
        return self._num_samples

    def ids(self, positions: Ids, seed: int, epoch: int) -> Ids:
        numbers, offsets = np.divmod(positions, self._window)
        windows, which = np.unique(numbers, return_inverse=True)
        of_windows = [round_keys(_key(seed, int(number)), epoch) for number in windows]
        if not of_windows:
            return positions
        keys = np.array(of_windows, dtype=np.uint32)[which].T
        return positions - offsets + permute_by(offsets, self._window, list(keys))


class Weighted:
    """Samples drawn with replacement, each as often as its weight says; `num_draws` make a pass."""

    def __init__(self, weights: Sequence[float], num_draws: int):
        given = np.asarray(weights, dtype=np.float64)
        if not given.size or not np.isfinite(given).all() or (given < 0).any() or not given.any():
            raise UsageError("weights must be finite, none below 0 and at least one above it.")
        self._edges = np.cumsum(normalize_weights(given))
        self._last = int(np.flatnonzero(given)[-1])
        self._num_draws = num_draws

    def __len__(self) -> int:
        return self._num_draws

    def ids(self, positions: Ids, seed: int, epoch: int) -> Ids:
        drawn = np.searchsorted(self._edges, uniform(positions, seed, epoch), side="right")
        return np.minimum(drawn, self._last).astype(np.int64)  # sums of weights may end below 1


class Bucketed:
    """Each sample once a pass, in batches of like lengths.

    A plain shuffle is cut into windows of `window` batches; each window is sorted by length, cut
    into batches, and these are shuffled. A last batch that is not full stays the last.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, window: int = 64):
        if batch_size < 1 or window < 1:
            raise UsageError(f"batch_size={batch_size}, window={window}. Both are at least 1.")
        self.batch_size = batch_size
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._size = batch_size * window
        self._sorted = lru_cache(maxsize=4)(self._sort)

    def __len__(self) -> int:
        return len(self._lengths)

    def ids(self, positions: Ids, seed: int, epoch: int) -> Ids:
        bounds = np.append(np.arange(0, len(self), self._size), len(self))
        return _by_pool(
            positions, bounds, lambda number, offsets: self._sorted(number, seed, epoch)[offsets]
        )

    def among(self, kept: Ids) -> "Bucketed":
        window = self._size // self.batch_size
        return Bucketed(self._lengths[kept].tolist(), self.batch_size, window)

    def _sort(self, number: int, seed: int, epoch: int) -> Ids:
        start = number * self._size
        positions = np.arange(start, min(start + self._size, len(self)), dtype=np.int64)
        ids = permute(positions, len(self), seed, epoch)
        ids = ids[np.argsort(self._lengths[ids], kind="stable")]
        num_full = len(ids) // self.batch_size
        full = ids[: num_full * self.batch_size].reshape(num_full, self.batch_size)
        turn = permute(np.arange(num_full, dtype=np.int64), num_full, _key(seed, number), epoch)
        return np.concatenate([full[turn].reshape(-1), ids[num_full * self.batch_size :]])


class Mixed:
    """Several orders taken in turn, each as often as its weight says; ids count through all.

    Of every 1,024 positions each has its share, in a shuffled turn. Each goes through its own
    samples pass by pass, without replacement, at its own pace. `num_positions` make a pass of all.
    """

    def __init__(
        self,
        orders: Sequence[Order],
        num_samples: Sequence[int],
        weights: Sequence[float],
        num_positions: int,
    ):
        self.orders, self._num_positions = list(orders), num_positions
        self._offsets = _starts(np.asarray(num_samples, dtype=np.int64))
        self.shares = _apportion(weights, _PATTERN)
        self._edges = _starts(np.asarray(self.shares, dtype=np.int64))
        self._dealt = lru_cache(maxsize=32)(self._deal)

    def __len__(self) -> int:
        return self._num_positions

    def ids(self, positions: Ids, seed: int, epoch: int) -> Ids:
        everywhere = positions + epoch * self._num_positions  # passes of the parts go on
        pattern, place = np.divmod(everywhere, _PATTERN)
        found = np.empty_like(positions)
        for number, here in _groups(pattern):
            part_of, turn_of = (of[place[here]] for of in self._dealt(number, seed))
            for part, of_part in _groups(part_of):
                turns = number * self.shares[part] + turn_of[of_part]
                own = ids_by_turns(self.orders[part], turns, _key(seed, part))
                found[here[of_part]] = own + self._offsets[part]
        return found

    def _deal(self, number: int, seed: int) -> tuple[Ids, Ids]:
        """Whose turn each position of a pattern is, and the how many-th of its own there."""
        slots = permute(np.arange(_PATTERN, dtype=np.int64), _PATTERN, _key(seed, -2), number)
        part_of = np.searchsorted(self._edges, slots, side="right") - 1
        turn_of = np.empty_like(slots)
        for _, here in _groups(part_of):
            turn_of[here] = np.arange(len(here))
        return part_of, turn_of


class SubsetOrder:
    """Some samples of an order's source: the ids of `order` are places in `chosen`."""

    recorded_as = "Some"

    def __init__(self, chosen: Ids, order: Order | None = None):
        self._chosen = chosen
        self._order: Order = Shuffled(len(chosen)) if order is None else order
        self.batch_size: int | None = getattr(order, "batch_size", None)

    def __len__(self) -> int:
        return len(self._order)

    def ids(self, positions: Ids, seed: int, epoch: int) -> Ids:
        found: Ids = self._chosen[self._order.ids(positions, seed, epoch)]
        return found

    def among(self, kept: Ids) -> "SubsetOrder":
        stay = np.flatnonzero(np.isin(self._chosen, kept))
        numbers = np.searchsorted(kept, self._chosen[stay]).astype(np.int64)
        return SubsetOrder(numbers, restrict_order(self._order, stay))


class RenumberedOrder:
    """The order of a subset, the samples `chosen` of another source: its ids count the subset
    itself, and its name depends on `chosen`."""

    recorded_as = "Among"

    def __init__(self, chosen: Ids, order: Order):
        self.chosen, self.order = chosen, order
        self.batch_size: int | None = getattr(order, "batch_size", None)

    def __len__(self) -> int:
        return len(self.order)

    def ids(self, positions: Ids, seed: int, epoch: int) -> Ids:
        return self.order.ids(positions, seed, epoch)

    def first(self, num_samples: int) -> "RenumberedOrder | None":
        order = _first_of(self.order, num_samples)
        return None if order is None else RenumberedOrder(self.chosen[:num_samples], order)

    def among(self, kept: Ids) -> "RenumberedOrder":
        return RenumberedOrder(self.chosen[kept], restrict_order(self.order, kept))


def ids_by_turns(order: Order, turns: Ids, seed: int) -> Ids:
    """The ids at positions that are counted through all passes of an order."""
    passes, positions = np.divmod(turns, len(order))
    found = np.empty_like(turns)
    for number, here in _groups(passes):
        found[here] = order.ids(positions[here], seed, number)
    return found


def is_shuffle(order: Order) -> bool:
    """Whether nothing is lost when these samples are shuffled among others."""
    return (
        is_shuffle(order.order)
        if isinstance(order, RenumberedOrder)
        else isinstance(order, Shuffled | BlockShuffled)
    )


def batch_size_of(order: Order) -> int | None:
    """The size of the batches that the order puts together; None if it does not."""
    return order.batch_size if isinstance(order, Bucketed | SubsetOrder | RenumberedOrder) else None


def order_of(source: Any) -> Order:
    """The order that a source carries, or else a plain shuffle."""
    order = getattr(source, "order", None)
    if order is None:
        return Shuffled(len(source))
    if isinstance(order, type) or not isinstance(order, Order):
        raise UsageError(
            f"the attribute `order` of the {type(source).__name__} is a {type(order).__name__}, "
            "and samples are visited in the order that stands there. An order has len() and "
            "ids(positions, seed, epoch); write both methods, or give the attribute another name."
        )
    return order


def restrict_order(order: Order, kept: Ids) -> Order:
    """The order of those samples that are kept, renumbered."""
    if isinstance(order, RestrictableOrder):
        return order.among(kept)
    raise UsageError(
        f"samples are visited in an order of their own ({type(order).__name__}), which says "
        "nothing of what is left when some of them are not wanted. Choose and clean first, and "
        "weigh or mix after that; --new-data needs data that is neither weighted nor mixed."
    )


def order_name(order: Order, seed: int) -> str:
    """The same for the same order: its kind, and a hash of ids from the ends of two passes."""
    num_known = min(_NUM_KNOWN, len(order))
    hashed = xxhash.xxh3_64(str(len(order)).encode())
    for epoch in (0, 1) if num_known else ():
        for first in (0, len(order) - num_known):
            positions = np.arange(first, first + num_known, dtype=np.int64)
            ids = np.asarray(order.ids(positions, seed, epoch), dtype=np.int64)
            ids = order.chosen[ids] if isinstance(order, RenumberedOrder) else ids
            hashed.update(ids.tobytes())
    return f"{recorded_name(order)} {hashed.hexdigest()}"


def order_before(source: Any, num_samples: int) -> Order | None:
    """The order that a source had when it ended after `num_samples`; None if that is unknown."""
    if len(source) == num_samples:
        return order_of(source)
    return None if len(source) < num_samples else _first_of(order_of(source), num_samples)


def _first_of(order: Order, num_samples: int) -> Order | None:
    if not isinstance(order, RestrictableOrder):
        return None
    first: Callable[[int], Order | None] | None = getattr(order, "first", None)
    return order.among(np.arange(num_samples)) if first is None else first(num_samples)


def _apportion(weights: Sequence[float], total: int) -> list[int]:
    """Whole shares of `total` by largest remainder, none of them empty."""
    given = np.asarray(weights, dtype=np.float64)
    if not np.isfinite(given).all() or (given <= 0).any():
        raise UsageError(f"weights={list(weights)}. Each source of a mixture needs one above 0.")
    if len(given) > total:
        raise UsageError(f"a mixture has {len(given)} sources. It can have {total} at most.")
    exact = normalize_weights(given) * total
    shares = np.maximum(np.floor(exact), 1).astype(np.int64)
    while shares.sum() < total:
        shares[int(np.argmax(exact - shares))] += 1
    while shares.sum() > total:
        shares[int(np.argmax(np.where(shares > 1, shares - exact, -np.inf)))] -= 1
    return [int(share) for share in shares]


def _by_pool(positions: Ids, bounds: Ids, ids_of: Callable[[int, Ids], Ids]) -> Ids:
    """The ids at positions, asked from the pools that they fall into."""
    found = np.empty_like(positions)
    for number, here in _groups(np.searchsorted(bounds, positions, side="right") - 1):
        found[here] = ids_of(number, positions[here] - bounds[number])
    return found


def _groups(numbers: Ids) -> Iterator[tuple[int, Ids]]:
    """Each number that occurs, and its places."""
    for number in np.unique(numbers):
        yield int(number), np.flatnonzero(numbers == number)


def _starts(sizes: Ids) -> Ids:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _key(seed: int, part: int) -> int:
    """A seed of its own for a part of an order."""
    return (seed * 0x9E37_79B9_7F4A_7C15 + (part + 3) * 0xD1B5_4A32_D192_ED03) & (2**64 - 1)
