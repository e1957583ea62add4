"""Gradient buckets: flat buffers that are sent while backward is still running.

Parameters are assigned to buckets of about 4 MB in reverse order, which is roughly the order in
which their gradients arrive; a larger parameter has a bucket of its own. Layout and order of
sending are pure functions of the parameter list, never of arrival, so ranks that use different
parameters cannot deadlock: a hook only starts early what `send_rest` would start anyway. Buffers
are made once and kept; a gradient is copied in when its bucket is full, which is as fast as
living there and survives `zero_grad()`. A parameter with a bucket of its own is sent from where
autograd put its gradient.

Not for one process: there is nothing to send. Cost: one copy of the gradients, held for the run.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal.comm.buffer_pool import BufferPool
from shoal.comm.collectives import drain_deadline
from shoal.comm.flight_recorder import RECORDER
from shoal.comm.tree import PieceSum, Values
from shoal.errors import RecipeError
from shoal.events.tracing import TRACER

BUCKET_BYTES = 4 << 20
WINDOW_BYTES = 8 << 20  # sent and not yet added up: what arrives is as large as what was sent


def assign_buckets(sizes: Sequence[tuple[int, object]], bucket_bytes: int) -> list[list[int]]:
    """Assign parameters, given as (bytes, kind), to buckets: in reverse order, one kind in each."""
    buckets: list[list[int]] = []
    filled, kind = 0, None
    for index in reversed(range(len(sizes))):
        num_bytes, own_kind = sizes[index]
        if not buckets or own_kind != kind or filled + num_bytes > bucket_bytes:
            buckets.append([])
            filled, kind = 0, own_kind
        buckets[-1].append(index)
        filled += num_bytes
    return buckets


def assign_apart(
    sizes: Sequence[tuple[int, object]], lanes: Sequence[bool], bucket_bytes: int
) -> list[list[int]]:
    """Assign parameters of each lane to buckets of their own, in the order in which they fill."""
    found: list[list[int]] = []
    for lane in (False, True):
        own = [i for i, of in enumerate(lanes) if of == lane]
        assigned = assign_buckets([sizes[i] for i in own], bucket_bytes)
        found += [[own[place] for place in bucket] for bucket in assigned]
    return sorted(found, key=lambda bucket: -bucket[-1])


class GradientBucket:
    """Some parameters and a flat buffer with a row for each block of this rank's pieces.

    `starts` says where each parameter stands in a row, and how long a row is; one after another if
    it is left out. The buffer is taken from `buffers` when it is first filled, until `close`.
    """

    def __init__(
        self,
        indices: list[int],
        parameters: Sequence[nn.Parameter],
        num_rows: int,
        buffers: BufferPool,
        starts: Sequence[int] | None = None,
    ):
        self.indices, self._num_rows, self._buffers = indices, num_rows, buffers
        self._parameters = [parameters[i] for i in indices]
        self._starts = starts or [0, *accumulate(p.numel() for p in self._parameters)]
        self.rows: list[Tensor] = []
        self.views: list[list[Tensor]] = []

    def close(self) -> None:
        """Return the buffer to the pool."""
        for row in self.rows:
            self._buffers.give(row)
        self.rows, self.views = [], []

    def _open(self) -> None:
        first = self._parameters[0]
        self.rows = [self._buffers.take(self._starts[-1], first) for _ in range(self._num_rows)]
        self.views = [[] for _ in self.rows]
        for row, views in zip(self.rows, self.views, strict=True):
            for p, (start, end) in zip(self._parameters, pairwise(self._starts), strict=True):
                stop = start + p.numel()
                views.append(row[start:stop].view(p.shape))
                row[stop:end].zero_()

    def fill(self, row: int, values: Values) -> None:
        """Copy a row in; what no piece touched is zero."""
        if not self.rows:
            self._open()
        views, present = self._present(row, values)
        if len(present) < len(self.indices):
            self.rows[row].zero_()
        if present:
            self._copy(views, present)

    def _copy(self, views: list[Tensor], values: list[Tensor]) -> None:
        torch._foreach_copy_(views, values)

    def add(self, row: int, values: Values) -> None:
        """Add the values of earlier pieces to a row."""
        views, present = self._present(row, values)
        if present:
            torch._foreach_add_(views, present)

    def _present(self, row: int, values: Values) -> tuple[list[Tensor], list[Tensor]]:
        """The values of this bucket's parameters that exist, and their places in the row."""
        views, present = [], []
        for view, index in zip(self.views[row], self.indices, strict=True):
            value = values[index]
            if value is not None:
                views.append(view)
                present.append(value)
        return views, present


class SingleParameterBucket(GradientBucket):
    """One large parameter with one row: its gradient is sent from where autograd put it."""

    def close(self) -> None:
        self.rows, self.views = [], []

    def fill(self, row: int, values: Values) -> None:
        gradient = values[self.indices[0]]
        if gradient is None:
            gradient = torch.zeros_like(self._parameters[0])
        self.views = [[gradient.contiguous()]]
        self.rows = [self.views[0][0].view(-1)]


class PlacedBucket(GradientBucket):
    """Its rows stand where others read them. What is there already is not copied."""

    def __init__(
        self,
        indices: list[int],
        parameters: Sequence[nn.Parameter],
        rows: list[Tensor],
        starts: Sequence[int],
    ):
        super().__init__(indices, parameters, len(rows), BufferPool(), starts)
        self.rows = rows
        places = list(zip(self._parameters, starts, strict=False))
        self.views = [[row[at : at + p.numel()].view(p.shape) for p, at in places] for row in rows]

    def close(self) -> None:
        """They are not this bucket's."""

    def fill(self, row: int, values: Values) -> None:
        for view, index in zip(self.views[row], self.indices, strict=True):
            value = values[index]
            if value is None:
                view.zero_()
            elif value.data_ptr() != view.data_ptr():
                view.copy_(value)


def make_bucket(
    indices: list[int],
    parameters: Sequence[nn.Parameter],
    num_rows: int,
    buffers: BufferPool,
    starts: Sequence[int] | None = None,
) -> GradientBucket:
    """A bucket of the class that fits; `starts` as in `GradientBucket`."""
    fills_row = starts is None or starts[-1] == parameters[indices[0]].numel()
    kind = SingleParameterBucket if len(indices) == num_rows == 1 and fills_row else GradientBucket
    return kind(indices, parameters, num_rows, buffers, starts)


class InFlight(Protocol):
    """What `start` returns: messages in flight."""

    def fold(self) -> None:
        """Add up what arrived. Every rank calls it, in the order of the starts."""
        ...

    def drain(self, deadline: float) -> None:
        """Wait until no message uses the bucket any more, failed or not; or until `deadline`."""
        ...


Sent = TypeVar("Sent", bound=InFlight)


class GradientBuckets(Generic[Sent]):
    """The buckets of a parameter list and the hooks that send them.

    Order of calls in a step: `begin`; `arm` before the last piece's backward; `send_rest` after it.
    `start` is given a bucket, and is called once for each, in order, with its rows filled. Unless
    they are `kept`, the rows go back when what was sent has been added up.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        buckets: Sequence[GradientBucket],
        num_rows: int,
        start: Callable[[GradientBucket], Sent],
        kept: bool = True,
    ):
        self.parameters, self.buckets = parameters, buckets
        self._start, self._num_rows, self._kept = start, num_rows, kept
        self._bucket_of = {i: k for k, b in enumerate(self.buckets) for i in b.indices}
        self._hooks: list[RemovableHandle] = [
            p.register_post_accumulate_grad_hook(self._arrived_hook(i))
            for i, p in enumerate(parameters)
        ]
        self.begin()

    def begin(self) -> None:
        """Start a step: reset the counters."""
        self.armed = False
        self.sent: list[Sent] = []
        self._sizes: list[int] = []  # in bytes, of what was sent
        self._num_folded, self._in_flight = 0, 0
        self._missing = [len(b.indices) for b in self.buckets]
        self._arrived: set[int] = set()
        self.touched, self._adds = [False] * len(self.parameters), False

    def add_next(self) -> None:
        """Send what is left of a piece; the next piece is added to what the rows hold."""
        self.send_rest()
        self.fold_rest()
        touched = self.touched
        self.begin()
        self.touched, self._adds = touched, True

    def arm(self, pieces: PieceSum | None, early: bool = True) -> None:
        """What comes next is this rank's last: with `early`, one backward pass, during which each
        bucket is sent as soon as it is full."""
        self.armed = early
        self._pieces = pieces

    def send_rest(self) -> None:
        """Send what the hooks did not: buckets with unused parameters, or no backward at all."""
        while len(self.sent) < len(self.buckets):
            self._send()

    def fold_rest(self) -> None:
        """Add up all that has been sent."""
        while self._num_folded < len(self.sent):
            self._fold_oldest()

    def _fold_oldest(self) -> None:
        RECORDER.what = _name_of(self._num_folded, len(self.buckets))
        self.sent[self._num_folded].fold()
        RECORDER.what = ""
        if not self._kept:
            self.buckets[self._num_folded].close()
        self._in_flight -= self._sizes[self._num_folded]
        self._num_folded += 1

    def assign_gradients(self, touched: Sequence[bool]) -> None:
        """Make the sums the gradients; as in a plain loop, what no piece touched has none."""
        for bucket in self.buckets:
            for i, view in zip(bucket.indices, bucket.views[0], strict=True):
                self.parameters[i].grad = view if touched[i] else None

    def close(self) -> None:
        """Wait for the messages in flight, and remove the hooks."""
        deadline = drain_deadline()
        for sent in self.sent:
            sent.drain(deadline)
        for hook in self._hooks:
            hook.remove()

    def _arrived_hook(self, index: int) -> Callable[[Tensor], None]:
        def arrived(_: Tensor) -> None:
            if self.armed:
                self._count(index)

        return arrived

    def _count(self, index: int) -> None:
        bucket = self._bucket_of[index]
        if index in self._arrived:
            if bucket < len(self.sent):
                raise RecipeError(
                    "A gradient arrived twice in one piece, after it had been sent. A loss must "
                    "run one backward pass; use non-reentrant checkpointing "
                    "(use_reentrant=False)."
                )
            return
        self._arrived.add(index)
        self._missing[bucket] -= 1
        # Strictly in index order, whatever arrives first.
        while len(self.sent) < len(self.buckets) and not self._missing[len(self.sent)]:
            self._send()

    def _send(self) -> None:
        bucket = self.buckets[len(self.sent)]
        gradients: Values = [None] * len(self.parameters)
        for i in bucket.indices:
            gradients[i] = _dense(self.parameters[i].grad)
        last = self._num_rows - 1
        earlier: list[Values] = []
        if self._pieces is not None:
            for row, values in enumerate(self._pieces.rows[:last]):
                bucket.fill(row, values)
            earlier = self._pieces.rows[:last] + self._pieces.levels
        (bucket.add if self._adds else bucket.fill)(last, gradients)
        if self._pieces is not None:
            for values in reversed(self._pieces.levels):
                bucket.add(last, values)
        for i in bucket.indices:
            self.touched[i] |= gradients[i] is not None or any(v[i] is not None for v in earlier)
            self.parameters[i].grad = None  # the bucket has it now
        # Which bucket is added up before which one leaves must not depend on arrival either.
        size = sum(row.nbytes for row in bucket.rows)
        while self._num_folded < len(self.sent) and self._in_flight + size > WINDOW_BYTES:
            self._fold_oldest()
        RECORDER.what = _name_of(len(self.sent), len(self.buckets))
        with TRACER.span(RECORDER.what, "bucket", size):
            self.sent.append(self._start(bucket))
        RECORDER.what = ""
        self._sizes.append(size)
        self._in_flight += size


@cache
def _name_of(number: int, count: int) -> str:
    """In the records of collectives."""
    return f"bucket {number} of {count}"


def _dense(gradient: Tensor | None) -> Tensor | None:
    if gradient is not None and gradient.layout != torch.strided:
        raise RecipeError(
            f"A gradient of shape {tuple(gradient.shape)} is sparse, and replicas exchange dense "
            "ones. Make the embedding with sparse=False."
        )
    return gradient
