"""Gradients that are packed on their way (`codec`), and what packing has not sent yet.

The one seam between buckets and codecs, for data parallel, ZeRO 1 and 2. A tensor that a codec
makes smaller stands in a packed bucket, from a multiple of 1,024 elements on, so blocks belong to
one tensor and are the same however a bucket is cut; all others are summed as they are. A rank adds
its pieces up, adds what it could not send before (its residual), packs and sends; what is dropped
is the next residual. The owner of a share does the same with the sum.

Residuals of a step are staged until the step is made: `begin` forgets those of an attempt that was
not, `commit` takes them. A step with a gradient that is not finite is never made, on any rank,
since all decode the same bytes. They are kept in units of the gradient without loss scale, which is
a power of two. A checkpoint holds them by replica; as many replicas take each its own again, any
other number an equal share of their sum. A newcomer after a death begins with none, and a rank that
was one step behind takes those that it has staged: it had sent them, or no rank had made the step.

Cost: of residuals four bytes for each packed element, twice in a step, and those of the own share
of sums; `fp16` and `bf16` keep none. Read next: `comm/compression.py`, and `numerics/codecs.py`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.buckets import BUCKET_BYTES, assign_apart
from shoal.comm.collectives import Group
from shoal.comm.compression import (
    CompressedScatter,
    CompressedSum,
    LowRankScatter,
    LowRankSum,
    Wanted,
    share_bounds,
    shares_of,
    zero_ranges,
)
from shoal.errors import RecipeError
from shoal.logs import warn_on_screen
from shoal.numerics.codecs import TOP_BLOCK, Codec, HalfPrecisionCodec, codec_at, packs
from shoal.numerics.momentum import Momentum
from shoal.numerics.powersgd import first_factor, matrix_shape
from shoal.parallel.layout import LocalLayout, Slice, slices_of, slices_of_run, whole_slice
from shoal.sync.replicas import replica_name
from shoal.sync.rounds import ranks_tree
from shoal.sync.state import StateSource

RESIDUAL, VELOCITY, OWED, FACTOR = (
    f"codec.{kind}." for kind in ("residual", "velocity", "owed", "factor")
)
STEPS, REPLICAS = "codec.steps", "codec.replicas"  # among what is plain


class PackedBucket(NamedTuple):
    """Parameters that are sent together; `starts` if their gradients are packed."""

    indices: list[int]
    lengths: list[int]
    starts: list[int] | None  # of each, and the end

    @property
    def padding(self) -> list[range]:
        ends = self.starts or []
        return [
            range(start + length, end)
            for (start, end), length in zip(pairwise(ends), self.lengths, strict=False)
            if start + length < end
        ]


def assign_packed(
    sizes: Sequence[tuple[tuple[int, ...], int, object]],
    codec: str,
    bucket_bytes: int = BUCKET_BYTES,
) -> list[PackedBucket]:
    """Assign parameters, given as (shape, bytes of an element, kind), to buckets. Pure.

    Those that are packed and those that are not stand apart; a bucket leaves when its last gradient
    has come, so that one is first whose last parameter stands last in the model.
    """

    def is_packed(index: int) -> bool:
        return codec != "none" and packs(codec, *sizes[index][:2])

    buckets = [
        PackedBucket(indices, [torch.Size(sizes[i][0]).numel() for i in indices], None)
        for indices in assign_apart(
            [(torch.Size(shape).numel() * size, kind) for shape, size, kind in sizes],
            list(map(is_packed, range(len(sizes)))),
            bucket_bytes,
        )
    ]
    return [
        b._replace(starts=aligned_starts(b.lengths)) if is_packed(b.indices[0]) else b
        for b in buckets
    ]


def aligned_starts(lengths: Sequence[int]) -> list[int]:
    """Where packed parameters stand in a bucket, and its end: from whole blocks on."""
    return [0, *accumulate(-(-length // TOP_BLOCK) * TOP_BLOCK for length in lengths)]


class _Kept(NamedTuple):
    """What a rank keeps of a packed bucket from one step to the next."""

    residual: Tensor
    velocity: Tensor | None
    owed: Tensor  # of this rank's share of the sum


class BucketState:
    """Of one packed bucket: what it keeps, and what an attempt at a step would make of it."""

    def __init__(
        self,
        bucket: PackedBucket,
        parameters: Sequence[Tensor],
        momenta: Sequence[Momentum | None],
    ):
        assert bucket.starts is not None
        self.bucket, self.starts, self.padding = bucket, bucket.starts, bucket.padding
        self.momenta, self._like = momenta, parameters[0]
        self.shapes = [tuple(p.shape) for p in parameters]
        self.cuts: list[int] = []  # of its shares, if sums are packed again
        self.wanted: Wanted = []  # by each rank
        self.kept: _Kept | None = None
        self.staged: tuple[Tensor, Tensor | None] | None = None
        self.sum: CompressedSum | None = None  # that knows what its owner's packing dropped
        self.factors: list[Tensor] = []  # of low rank
        self.low_rank: LowRankSum | None = None
        self._scale = 1.0  # of what is staged

    def join_group(self, group: Group, wanted: Wanted | None, keeps: bool) -> None:
        """`wanted` is what each rank keeps of its sums, if these are not packed again."""
        length = self.starts[-1]
        self.cuts = share_bounds(length, TOP_BLOCK, group.num_ranks)
        self.share = range(self.cuts[group.rank], self.cuts[group.rank + 1])
        self.wanted = wanted or shares_of(self.cuts)
        num_owed = 0 if wanted else len(self.share)
        if not keeps:
            return
        if self.kept is None:
            velocity = self._zeros(length) if any(self.momenta) else None
            self.kept = _Kept(self._zeros(length), velocity, self._zeros(num_owed))
        elif self.kept.owed.numel() != num_owed:
            self.kept, self.sum = self.kept._replace(owed=self._zeros(num_owed)), None

    def begin_factors(self, rank: int) -> None:
        self.factors = [first_factor(s, rank).to(self._like.device) for s in self.shapes]

    def scaled_by(self, scale: float) -> None:
        """What is staged has this loss scale."""
        self._scale = scale

    def prepare(self, row: Tensor, scale: float) -> tuple[Tensor, Tensor | None]:
        """What is to be packed: a gradient and what was not sent before; and the velocity."""
        if self.kept is None:
            return row.float(), None
        residual, velocity = self.staged or (self.kept.residual, self.kept.velocity)
        if scale == 1.0 and velocity is None:
            return row.float() + residual, None
        flat = row.float() / scale
        if velocity is not None:
            velocity = velocity.clone()
            for start, length, momentum in self._spans():
                if momentum is not None:
                    part = slice(start, start + length)
                    velocity[part], flat[part] = momentum.advance(velocity[part], flat[part])
        return flat.add_(residual).mul_(scale), velocity

    def stage(
        self, residual: Tensor, velocity: Tensor | None, before: Tensor | None, scale: float
    ) -> None:
        """What a step would leave. `before` is the vector that was packed, with a velocity."""
        if velocity is not None:
            assert before is not None
            velocity.masked_fill_(before != residual, 0.0)  # of what was sent
        zero_ranges(residual, self.padding)
        self.staged, self._scale = (_without(residual, scale), velocity), scale

    def commit(self) -> None:
        if self.low_rank is not None:
            self.factors = self.low_rank.factors
            self.staged = _without(self.low_rank.residual, self._scale), None
            self.low_rank = None
        if self.staged is None or self.kept is None:
            return
        owed = self.kept.owed
        if self.sum is not None and self.sum.sum_residual is not None:
            owed = _without(self.sum.sum_residual, self._scale)
        self.kept = _Kept(*self.staged, owed)
        self.staged = self.sum = None

    def views(self, flat: Tensor) -> Iterator[tuple[int, Tensor]]:
        """The elements of each parameter, by its number."""
        for index, start, length in zip(
            self.bucket.indices, self.starts, self.bucket.lengths, strict=False
        ):
            yield index, flat[start : start + length]

    def owed_runs(self) -> Iterator[tuple[int, int, Tensor]]:
        """Of each parameter in the own share: its number, the first element, and those."""
        assert self.kept is not None
        for index, start, length in zip(
            self.bucket.indices, self.starts, self.bucket.lengths, strict=False
        ):
            first, last = max(start, self.share.start), min(start + length, self.share.stop)
            if first < last and self.kept.owed.numel():
                at = first - self.share.start
                yield index, first - start, self.kept.owed[at : at + last - first]

    def _spans(self) -> Iterator[tuple[int, int, Momentum | None]]:
        return zip(self.starts, self.bucket.lengths, self.momenta, strict=False)

    def _zeros(self, length: int) -> Tensor:
        return torch.zeros(length, device=self._like.device)


class GradientPacking:
    """How a strategy packs its gradients in each step.

    `attach` comes first, and for each new group; then for each attempt at a step `begin`, `sum` or
    `scatter` for each packed bucket, in order, and `commit` if the step is made. `scale` is the
    loss scale of now.
    """

    def __init__(
        self, codec: str, num_steps: int, scale: Callable[[], float] = lambda: 1.0, steps: int = 0
    ):
        self.name, self._num_steps, self._scale, self.steps = codec, num_steps, scale, steps
        self._rank = int(codec.partition(":")[2]) if codec.startswith("powersgd:") else 0
        self.buckets: dict[int, BucketState] = {}  # those that are packed, by number

    @property
    def codec(self) -> Codec:
        """Of the step under way."""
        return codec_at(self.name, self.steps, self._num_steps)

    def attach(
        self,
        group: Group,
        named: Sequence[tuple[str, nn.Parameter]],
        holding: LocalLayout,
        buckets: Sequence[PackedBucket],
        momenta: Mapping[Tensor, Momentum],
        wanted: Sequence[Wanted] | None = None,
    ) -> None:
        """`wanted` of each bucket by each rank, if its sums stay where they are taken."""
        self.group, self._named, self._holding = group, named, holding
        self._tree = ranks_tree(group)
        for number, bucket in enumerate(buckets):
            if bucket.starts is None:
                continue
            if number not in self.buckets:
                parameters = [named[i][1] for i in bucket.indices]
                own = [momenta.get(p) for p in parameters]
                self.buckets[number] = BucketState(bucket, parameters, own)
            if self._rank and not self.buckets[number].factors:
                self.buckets[number].begin_factors(self._rank)
            keeps = bool(self._rank) or self.codec.keeps_residual
            own_wanted = None if wanted is None else wanted[number]
            self.buckets[number].join_group(group, own_wanted, keeps)

    def begin(self) -> None:
        """A new attempt at a step: of an earlier one nothing stays; nor of what is frozen now,
        which else would be stepped on."""
        for own in self.buckets.values():
            own.staged = own.sum = own.low_rank = None
            frozen = [i for i in own.bucket.indices if not self._named[i][1].requires_grad]
            if frozen and own.kept is not None:
                unsent = [part for _, flat in _kinds(own) for part in own.views(flat)]
                unsent += [(index, part) for index, _, part in own.owed_runs()]
                for index, part in unsent:
                    if index in frozen:
                        part.zero_()

    def sum(self, number: int, row: Tensor) -> CompressedSum | LowRankSum:
        """Begin to sum the gradients of a bucket over all ranks."""
        if self._rank:
            return self._sum_factors(number, row)
        own, scale, codec = self.buckets[number], self._scale(), self.codec
        flat, velocity = own.prepare(row, scale)
        before = None if velocity is None else flat.clone()
        owed = None if own.kept is None else own.kept.owed * scale if scale != 1 else own.kept.owed
        sum_ = CompressedSum(self.group, codec, flat, owed, own.cuts, own.padding)
        self._refuse_overflow(codec, row, flat)
        if sum_.residual is not None:
            own.stage(sum_.residual, velocity, before, scale)
            own.sum = sum_
        return sum_

    def _sum_factors(self, number: int, row: Tensor) -> LowRankSum:
        own, scale = self.buckets[number], self._scale()
        factors = own.factors
        if own.low_rank is not None:  # of an earlier round of this step
            factors = own.low_rank.factors
            own.stage(own.low_rank.residual, None, None, scale)
        flat, _ = own.prepare(row, scale)
        shapes = [matrix_shape(shape) for shape in own.shapes]
        own.low_rank = LowRankSum(self._tree, flat, own.starts, shapes, factors)
        own.scaled_by(scale)
        return own.low_rank

    def scatter(self, number: int, row: Tensor) -> CompressedScatter | LowRankScatter:
        """Begin to sum a bucket's gradients, each shard at its owner."""
        own, scale = self.buckets[number], self._scale()
        if self._rank:
            return LowRankScatter(self._sum_factors(number, row), own.wanted[self.group.rank])
        codec = self.codec
        flat, velocity = own.prepare(row, scale)
        before = None if velocity is None else flat.clone()
        scatter = CompressedScatter(self.group, codec, flat, own.wanted, own.kept is not None)
        self._refuse_overflow(codec, row, flat)
        if scatter.residual is not None:
            own.stage(scatter.residual, velocity, before, scale)
        return scatter

    def commit(self) -> None:
        """The step is made. Never communicates, never fails."""
        for own in self.buckets.values():
            own.commit()
        self.steps += 1

    def state(self) -> tuple[dict[str, list[Slice]], dict[str, Any]]:
        """What a checkpoint holds: tensors under the replica's number, and what is plain."""
        tensors: dict[str, list[Slice]] = {}
        for own in self.buckets.values():
            for kind, flat in _kinds(own):
                for index, part in own.views(flat):
                    name, p = self._named[index]
                    key = replica_name(kind + name, self.group.rank)
                    tensors[key] = slices_of(name, part.view(p.shape), self._holding)
            tensors |= self._factors(own)
            if own.kept is not None:
                for index, start, part in own.owed_runs():
                    name, p = self._named[index]
                    tensors[OWED + name] = slices_of_run(name, p.shape, start, part, self._holding)
        return {n: parts for n, parts in tensors.items() if parts}, self.plain

    def shared(self) -> dict[str, list[Slice]]:
        """What all replicas hold alike."""
        found = [self._factors(own) for own in self.buckets.values()]
        return {name: parts for each in found for name, parts in each.items()}

    def _factors(self, own: BucketState) -> dict[str, list[Slice]]:
        pairs = zip(own.bucket.indices, own.factors, strict=False)
        return {FACTOR + self._named[i][0]: [whole_slice(factor)] for i, factor in pairs}

    def _load_factors(self, source: StateSource) -> None:
        for own in self.buckets.values() if self._rank else ():
            own.begin_factors(self._rank)
            for name, (place,) in self._factors(own).items():
                if name in source and source.shape(name) == tuple(place.tensor.shape):
                    source.fill(name, [place])

    @property
    def plain(self) -> dict[str, Any]:
        return {STEPS: self.steps, REPLICAS: self.group.num_ranks}

    def load(self, source: StateSource, step: int) -> None:
        """Take over what a checkpoint after `step` holds; what is missing is as in a new run."""
        self.begin()
        self._load_factors(source)
        self.steps = int(source.plain.get(STEPS, step))
        count = int(source.plain.get(REPLICAS, 0))
        for own in self.buckets.values():
            for kind, flat in _kinds(own):
                flat.zero_()
                for index, part in own.views(flat):
                    name, p = self._named[index]
                    self._fill(source, kind + name, name, part.view(p.shape), count)
            if own.kept is not None:
                own.kept.owed.zero_()
                for index, start, part in own.owed_runs():
                    name, p = self._named[index]
                    places = slices_of_run(name, p.shape, start, part, self._holding)
                    if OWED + name in source:
                        source.fill(OWED + name, places)

    def _fill(
        self, source: StateSource, kind: str, name: str, part: Tensor, num_replicas: int
    ) -> None:
        """A replica's own; of another number of replicas, an equal share of the sum."""
        places = slices_of(name, part, self._holding)
        keys = [replica_name(kind, r) for r in range(num_replicas)]
        if num_replicas == self.group.num_ranks:
            keys = keys[self.group.rank : self.group.rank + 1]
        sum_ = torch.zeros_like(part, dtype=torch.float64)
        for key in keys:
            if key in source:
                source.fill(key, places)
                sum_ += part
        part.copy_(sum_ if len(keys) == 1 else sum_ / self.group.num_ranks)

    def join(self, source: StateSource, step: int) -> None:
        """Follow the rank that leads after a death. One that was a step behind had staged all that
        it sent of it; a newcomer has nothing that was not sent."""
        theirs = int(source.plain.get(STEPS, step))
        if theirs == self.steps + 1 and self._has_staged:
            self.commit()
        elif theirs != self.steps:
            self.begin()
            self._load_factors(source)
            for own in self.buckets.values():
                for _, flat in _kinds(own):
                    flat.zero_()
                if own.kept is not None:
                    own.kept.owed.zero_()
            if self._rank or self.codec.keeps_residual:
                warn_on_screen(
                    f"Replica {self.group.rank} continues from step {step} without what "
                    f"codec={self.name} had not sent of its gradients. The others keep theirs."
                )
        self.steps = theirs

    @property
    def _has_staged(self) -> bool:
        return all(
            own.kept is None
            or own.low_rank is not None
            or (own.staged is not None and (own.sum is None or own.sum.sum_residual is not None))
            for own in self.buckets.values()
        )

    def _refuse_overflow(self, codec: Codec, row: Tensor, flat: Tensor) -> None:
        if not isinstance(codec, HalfPrecisionCodec) or self.name != "fp16" or self._scale() != 1.0:
            return
        most = torch.finfo(torch.float16).max
        largest = float(row.abs().max()) if row.numel() else 0.0
        if most < largest < float("inf"):
            raise RecipeError(
                f"A gradient is {largest:.3g}, and codec={self.name} holds {most:,.0f} at the "
                "most. Use codec=bf16, or a loss that is smaller: a mean, not a sum."
            )


def _without(flat: Tensor, scale: float) -> Tensor:
    return flat if scale == 1.0 else flat.div_(scale)


def _kinds(own: BucketState) -> Iterator[tuple[str, Tensor]]:
    if own.kept is not None:
        yield RESIDUAL, own.kept.residual
        if own.kept.velocity is not None:
            yield VELOCITY, own.kept.velocity
