"""Batches: the samples of any step, by the step alone.

`Batches(...).at(step)` is a pure function of the step, so there is no cursor to save, rewind or
agree on: a step done again is the same step. The batch hands out its pieces one by one, and only a
piece that is asked for is loaded, so a rank reads its own share and nothing else.

Samples are loaded in the caller's thread; for samples that are slow to read or transform, do that
work once and keep the result. Cost: for a source with `take`, the rows of several steps are
gathered in one call and handed out in parts, at most 512 KiB over all pieces; the ids of up to
16,384 coming samples are kept beside them. A part that a model wrote into is noticed, and loaded
again should its step be repeated. Every tensor starts where a cache line does, because matrix
kernels round differently elsewhere, and the rank that loads a piece must not show in its bits.
Next: `permutation.py` for the order, `split.py` for the pieces, `pieces.py` for evaluation.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.data import permutation, split
from shoal.data.collating import SampleTypeCheck, collate_samples, load_collated, load_good_samples
from shoal.data.fetch_hints import prefetcher_for
from shoal.data.loader_processes import Loaders, PieceKey, PieceSchedule
from shoal.data.marks import marks_of_rows
from shoal.data.orders import batch_size_of, order_of
from shoal.data.permutation import Ids
from shoal.data.sources import (
    BatchSource,
    Collate,
    EpochSource,
    Pass,
    SkipsBad,
    Source,
    as_source,
    stream_of,
)
from shoal.data.stalls import STALLS
from shoal.errors import RecipeError, UsageError

_WINDOW_BYTES = 512 << 10
_WINDOW_STEPS = 256
_WINDOW_IDS = 16_384
_ALIGNMENT = 64  # bytes; what torch gives to a tensor of its own


class Piece(NamedTuple):
    """What one forward and backward sees. An empty one (a short batch) has no inputs: skip it."""

    inputs: Any
    target: Any
    num_samples: int
    ids: Ids
    mark: int | None = None  # of the ids (`marks.py`), if it is known already


class LoadOptions(NamedTuple):
    """How samples become tensors, and where."""

    collate: Collate | None = None
    device: str = "cpu"
    loaders: int = 0  # processes that load ahead


DEFAULT_LOADING = LoadOptions()


class Batch:
    """The global batch of one step. Pieces are loaded when asked for."""

    __slots__ = ("_batches", "_position", "epoch", "num_samples", "step")

    def __init__(self, batches: "Batches", step: int, epoch: int, position: int, num_samples: int):
        self.step = step
        self.epoch = epoch
        self.num_samples = num_samples
        self._position = position  # of this batch in its epoch
        self._batches = batches

    def piece(self, index: int) -> Piece:
        """Load piece `index` of `num_pieces`."""
        if (stream := stream_of(self._batches.source)) is not None:
            stream.hold(self.ids)  # every rank reads all of the batch
        return self._batches._piece(self, index)

    @property
    def ids(self) -> Ids:
        """The sample ids of the whole batch, without loading it."""
        return self._batches._ids_from(self.epoch, self._position, 1)[: self.num_samples]

    def ids_of(self, piece: int) -> Ids:
        """The sample ids of a piece, without loading it."""
        return self._batches._ids_of(self, piece)


class Batches:
    """All batches of a run, in the order its seed gives."""

    def __init__(
        self,
        source: Any,
        *,
        batch_size: int,
        num_pieces: int = 1,
        seed: int = 0,
        end: str = "drop",
        loading: LoadOptions = DEFAULT_LOADING,
    ):
        self.source: Source = check(source, batch_size=batch_size, num_pieces=num_pieces, end=end)
        source = self.source
        self.order = order_of(source)
        self.num_samples = len(self.order)
        self.batch_size = batch_size
        self.num_pieces = num_pieces
        self.seed = seed
        self.end = end
        self.steps_per_epoch = permutation.batches_per_epoch(self.num_samples, batch_size, end)
        self.device = loading.device
        self._loading = loading
        self._bounds = split.bounds(batch_size, num_pieces)
        last = self.num_samples - (self.steps_per_epoch - 1) * batch_size
        self._num_last = min(last, batch_size) if end == "pad" else batch_size
        self._ids: _IdWindow | None = None
        self._rows: dict[int, _RowWindow] = {}
        # Steps gathered at once; unknown until a first piece has shown how large samples are.
        each_alone = isinstance(source, SkipsBad | EpochSource)
        gathers = loading.collate is None and isinstance(source, BatchSource) and not each_alone
        self._window_steps: int | None = None if gathers and not loading.loaders else 1
        self._type_check = SampleTypeCheck(
            source, lambda near: self.order.ids(near, seed, 0), batch_size
        )
        self._loaders = Loaders(self._to_pass_on, loading.loaders) if loading.loaders else None
        self._schedule = PieceSchedule()
        self._prefetcher = prefetcher_for(source, self._ids_after, batch_size)

    def at(self, step: int) -> Batch:
        """The global batch of the 0-based `step`."""
        epoch, position = divmod(step, self.steps_per_epoch)
        is_last = position == self.steps_per_epoch - 1
        num_samples = self._num_last if is_last else self.batch_size
        return Batch(self, step, epoch, position, num_samples)

    def close(self) -> None:
        """End what loads and fetches ahead, and close a stream."""
        if self._loaders is not None:
            self._loaders.close()
        if self._prefetcher is not None:
            self._prefetcher.close()
        if (stream := stream_of(self.source)) is not None:
            stream.close()

    def _piece(self, batch: Batch, index: int) -> Piece:
        piece = self._own_piece(batch, index)
        if self._prefetcher is not None:
            self._prefetcher.at(batch.step)
        return piece

    def _own_piece(self, batch: Batch, index: int) -> Piece:
        if self._loaders is not None:
            return self._from_loaders(self._loaders, batch, index)
        window = self._rows.get(index)
        if window is not None and window.covers(batch):
            if window.is_untouched(batch):
                return window.pieces[batch._position - window.first]
        elif self._may_gather(batch):
            return self._gather(batch, index)
        return self._load(batch.epoch, self._ids_of(batch, index))

    def _load(self, epoch: int, ids: Ids) -> Piece:
        return load(self.source, ids, self._loading, Pass(self.seed, epoch), self._type_check)

    def _from_loaders(self, loaders: Loaders, batch: Batch, index: int) -> Piece:
        """Take what was loaded ahead, and let what will be asked for next be loaded."""
        now = PieceKey(batch.step, index)
        loaders.forget_before(batch.step)
        for key in self._schedule.after(now):
            if not loaders.has_room:
                break
            if not loaders.has(key):
                ahead = self.at(key.step)
                loaders.ask(key, ahead.epoch, self._ids_of(ahead, key.piece))
        if not loaders.has(now):  # no room: too much is still in use
            return self._load(batch.epoch, self._ids_of(batch, index))
        with STALLS.on(self._ids_of(batch, index)):
            inputs, target, ids = loaders.take(now)
        return Piece(to_device(inputs, self.device), to_device(target, self.device), len(ids), ids)

    def _to_pass_on(self, epoch: int, ids: Ids) -> tuple[Any, Any, Ids]:
        """In a loader."""
        here = self._loading._replace(device="cpu")
        piece = load(self.source, ids, here, Pass(self.seed, epoch), self._type_check)
        return piece.inputs, piece.target, piece.ids

    def _may_gather(self, batch: Batch) -> bool:
        if self._window_steps == 1 or batch.num_samples != self.batch_size:
            return False
        return not torch.is_inference_mode_enabled()  # its tensors cannot be trained on later

    def _gather(self, batch: Batch, index: int) -> Piece:
        """Fill the window of piece `index` from this batch on, and return the batch's own."""
        if self._window_steps is None:
            piece = self._load(batch.epoch, self._ids_of(batch, index))
            self._window_steps = self._affordable_steps(piece)
            return piece
        first = batch._position
        num_full = self.steps_per_epoch - (self._num_last != self.batch_size)
        num_steps = min(self._window_steps, num_full - first)
        start, stop = self._bounds[index]
        ids = self._ids_from(batch.epoch, first, num_steps).reshape(num_steps, self.batch_size)
        try:
            rows = self._load(batch.epoch, ids[:, start:stop].reshape(-1))
        except RecipeError:
            # A sample of a later step may have failed; it is reported when that step comes. Until
            # then the steps are loaded one by one, or each would try the same sample again.
            self._window_steps = 1
            return self._load(batch.epoch, self._ids_of(batch, index))
        own, of_stream = ids[:, start:stop], stream_of(self.source) is not None
        marks = [None] * num_steps if of_stream else marks_of_rows(own)  # a stream's have contents
        window = _RowWindow(batch.epoch, first, rows, own, marks)
        self._rows[index] = window
        return window.pieces[0]

    def _affordable_steps(self, piece: Piece) -> int:
        """How many steps fit into the window, judged by one piece; 1 if not all are tensors."""
        num_bytes = 0
        for part in _leaves((piece.inputs, piece.target)):
            if not isinstance(part, Tensor) or part.shape[:1] != (piece.num_samples,):
                return 1
            num_bytes += part.nbytes * self.num_pieces
        return max(1, min(_WINDOW_STEPS, _WINDOW_BYTES // max(1, num_bytes)))

    def _ids_of(self, batch: Batch, piece: int) -> Ids:
        if batch.num_samples == self.batch_size:
            start, stop = self._bounds[piece]
        else:
            start, stop = split.bounds(batch.num_samples, self.num_pieces)[piece]
        return self._ids_from(batch.epoch, batch._position, 1)[start:stop]

    def _ids_from(self, epoch: int, first: int, num_batches: int) -> Ids:
        """The ids of consecutive batches of an epoch, from the kept window or a new one."""
        window = self._ids
        if window is None or not window.holds(epoch, first, num_batches):
            most = max(num_batches, _WINDOW_IDS // self.batch_size, 1)
            count = min(most, self.steps_per_epoch - first)
            ids = self._ordered(epoch, first, count)
            self._ids = window = _IdWindow(epoch, first, count, ids)
        start = (first - window.first) * self.batch_size
        return window.ids[start : start + num_batches * self.batch_size]

    def _ids_after(self, step: int, num_steps: int) -> Ids:
        """The ids of up to so many steps from this one on, to the end of the next pass at most."""
        epoch, first = divmod(step, self.steps_per_epoch)
        count = min(num_steps, self.steps_per_epoch - first)
        more = min(num_steps - count, self.steps_per_epoch)
        ids = self._ordered(epoch, first, count)
        return np.concatenate([ids, self._ordered(epoch + 1, 0, more)]) if more else ids

    def _ordered(self, epoch: int, first: int, num_batches: int) -> Ids:
        positions = permutation.batch_positions(
            first, num_batches, self.num_samples, self.batch_size, self.end
        )
        return self.order.ids(positions, self.seed, epoch)


def load(
    source: Source,
    ids: Ids,
    loading: LoadOptions,
    of: Pass | None = None,
    type_check: SampleTypeCheck | None = None,
) -> Piece:
    """Load the samples `ids` as one piece; those that are left out are not in it."""
    samples, (collate, device, _) = None, loading
    with STALLS.on(ids):
        if hasattr(source, "record"):
            assert isinstance(source, SkipsBad)
            samples, ids = load_good_samples(
                source, ids, of, type_check if collate is None else None
            )
        if not len(ids):
            return Piece(None, None, 0, ids)
        if samples is not None:
            inputs, target = collate_samples(samples, collate, ids, of)
        else:
            inputs, target = load_collated(source, ids, collate, of)
        if type_check is not None and collate is None:
            type_check.require(
                (inputs, target), ids, lambda one: load_collated(source, one, None, of)
            )
    return Piece(to_device(inputs, device), to_device(target, device), len(ids), ids)


def check(data: Any, *, batch_size: int, num_pieces: int, end: str) -> Source:
    """The source; refuses, before any process starts, what cannot be trained on."""
    source = as_source(data, streams=True)
    visited = order_of(source)
    num_samples = len(visited)
    permutation.check_end(end)
    if batch_size < 1:
        raise UsageError(f"batch_size={batch_size}. A global batch has at least 1 sample.")
    if num_pieces < 1:
        raise UsageError(f"num_pieces={num_pieces}. A global batch has at least 1 piece.")
    if num_samples == 0:
        raise UsageError("data is empty: len(data) is 0. There must be at least 1 sample.")
    if num_samples < batch_size and end == "drop":
        raise UsageError(
            f"data has {num_samples} samples, batch_size is {batch_size}, and end='drop' leaves "
            f"out a batch that is not full, so no step can be made. Use batch_size={num_samples} "
            "or less, or end='pad' or end='wrap'."
        )
    by_length = batch_size_of(visited)
    if by_length not in (None, batch_size):
        raise UsageError(
            f"data is put by length into batches of {by_length}, and batch_size is "
            f"{batch_size}. Give by_length() the batch_size of the Run."
        )
    if batch_size % num_pieces:
        raise UsageError(
            f"batch_size={batch_size} cannot be cut into {num_pieces} equal pieces. The number of "
            f"pieces must divide the global batch. Use {_nearby(batch_size, num_pieces)} pieces, "
            f"or batch_size={-(-batch_size // num_pieces) * num_pieces}."
        )
    if end != "drop" and stream_of(source) is not None:
        raise UsageError(
            f"end={end!r} does not go with a stream: its next pass follows without a gap, so that "
            "every batch is full. Leave end out."
        )
    return source


class _IdWindow(NamedTuple):
    """The ids of batches `first` .. `first + num_batches - 1` of an epoch."""

    epoch: int
    first: int
    num_batches: int
    ids: Ids

    def holds(self, epoch: int, first: int, num_batches: int) -> bool:
        if epoch != self.epoch or first < self.first:
            return False
        return first + num_batches <= self.first + self.num_batches


class _RowWindow:
    """One piece of several consecutive steps, gathered at once and handed out in parts.

    The parts share memory but no version counter, so each shows whether it was written to.
    """

    __slots__ = ("_tensors", "epoch", "first", "pieces")

    def __init__(self, epoch: int, first: int, rows: Piece, ids: Ids, marks: Sequence[int | None]):
        self.epoch = epoch
        self.first = first
        size = ids.shape[1]
        columns: list[Sequence[Tensor]] = []
        inputs, target = _cut(rows.inputs, size, columns), _cut(rows.target, size, columns)
        of_steps = zip(inputs, target, ids, marks, strict=True)
        self.pieces = [Piece(x, y, size, own, mark) for x, y, own, mark in of_steps]
        self._tensors = list(zip(*columns, strict=True))

    def covers(self, batch: Batch) -> bool:
        at = batch._position - self.first
        return batch.epoch == self.epoch and 0 <= at < len(self.pieces)

    def is_untouched(self, batch: Batch) -> bool:
        """Whether the batch's piece is still as it was gathered."""
        return not any(part._version for part in self._tensors[batch._position - self.first])


def _leaves(value: Any) -> Iterator[Any]:
    """The values in nested tuples, lists and dicts."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _cut(rows: Any, size: int, columns: list[Sequence[Tensor]]) -> Sequence[Any]:
    """Rows of several steps as one value per step; each tensor's parts go into `columns` too."""
    if isinstance(rows, Mapping):
        parts = [_cut(part, size, columns) for part in rows.values()]
        return [dict(zip(rows, of_step, strict=True)) for of_step in zip(*parts, strict=True)]
    if isinstance(rows, (tuple, list)):
        return list(zip(*[_cut(part, size, columns) for part in rows], strict=True))
    # Not views, to autograd: what a model writes into one must not give the others a history.
    parts = rows.unsafe_split(size)
    columns.append([part.clone() for part in parts] if parts[0].nbytes % _ALIGNMENT else parts)
    return columns[-1]


def to_device(value: Any, device: str) -> Any:
    """`value` with its tensors on `device`, aligned; whatever else a collate put in stays."""
    if isinstance(value, Tensor):
        if device.startswith("cuda"):  # pinned, the copy runs beside what the host does
            return value.pin_memory().to(device, non_blocking=True)
        value = value.to(device)
        return value.clone() if value.data_ptr() % _ALIGNMENT else value
    if isinstance(value, Mapping):
        return {name: to_device(part, device) for name, part in value.items()}
    if isinstance(value, (tuple, list)):
        parts = tuple(to_device(part, device) for part in value)
        return value._make(parts) if hasattr(value, "_make") else parts
    return value


def _nearby(batch_size: int, num_pieces: int) -> str:
    """The divisors of the batch on either side of `num_pieces`."""
    divisors = [count for count in range(1, batch_size + 1) if batch_size % count == 0]
    below = [count for count in divisors if count < num_pieces][-1:]
    above = [count for count in divisors if count > num_pieces][:1]
    return " or ".join(map(str, below + above))
