"""What one rank of a plan holds and works on, by arithmetic alone. No rank is started.

It asks the same pure functions that the strategies run (`comm/buckets.py`, `comm/tree.py`,
`parallel/zero.py`, `data/split.py`), so counts are those of a real step and not of a formula that
was written down twice.

Read next: `costs.py` for what that costs, `explain.py`, which puts the ranks together.
"""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec
import torch

from shoal.comm.buckets import BUCKET_BYTES, layout
from shoal.comm.tree import blocks_of
from shoal.data.split import share
from shoal.numerics.norms import num_blocks
from shoal.parallel import zero
from shoal.parallel.apply import Survey
from shoal.parallel.layout import blocks_of_rank
from shoal.parallel.pipeline.stages import StageSpec, rank_of_stage
from shoal.plan import Plan


class Place(NamedTuple):
    """A rank's number along each axis."""

    rank: int
    pipeline: int
    data: int
    tensor: int

    @classmethod
    def of(cls, rank: int, plan: Plan) -> "Place":
        line, tensor = divmod(rank, plan.tensor)
        pipeline, data = divmod(line, plan.num_replicas)
        return cls(rank, pipeline, data, tensor)


class Whole(NamedTuple):
    """A parameter of the whole model."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool


class Kept(NamedTuple):
    """A tensor of an optimizer's state: the parameter's dims that it has, or None for all."""

    dims: tuple[int, ...] | None
    itemsize: int

    def num_bytes(self, shape: Sequence[int]) -> int:
        own = shape if self.dims is None else [shape[dim] for dim in self.dims]
        return math.prod(own) * self.itemsize


class Local(NamedTuple):
    """What a rank holds of a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool
    is_sharded: bool  # by FSDP2
    rows: int  # of the largest shard, to which FSDP2 fills up all

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    @property
    def filled_bytes(self) -> int:
        """Of this rank's shard as it is sent."""
        return self.rows * math.prod(self.shape[1:]) * self.dtype.itemsize


class Moves(msgspec.Struct):
    """What crosses the tensor axis for one piece in one stage, counted on a dry run."""

    num_forward: int = 0
    forward_bytes: int = 0
    num_backward: int = 0
    backward_bytes: int = 0


class Facts(NamedTuple):
    """What is known of a model and a plan, the same for every rank."""

    plan: Plan
    survey: Survey
    parameters: list[Whole]
    units: list[list[list[str]]]  # of zero=3, by pipeline rank: the parameters of each unit
    state: Mapping[str, list[Kept]]  # of the optimizer, by parameter
    is_element_wise: bool
    buffers: Mapping[str, int]  # bytes
    changed: Mapping[str, int]  # elements of the buffers that a forward changes
    averaged_buffers: int  # elements of those that local steps average
    moves: Mapping[int, Moves]  # over the tensor axis, by stage
    clips: bool


class Rank:
    """One rank of a plan."""

    def __init__(self, facts: Facts, rank: int):
        self.facts, self.plan = facts, facts.plan
        self.place = Place.of(rank, facts.plan)
        num_rounds = self.plan.num_pieces // self.plan.num_microbatches
        shares = [share(r, self.num_replicas, num_rounds) for r in range(self.num_replicas)]
        self.rounds, self.num_rounds = shares[self.place.data], num_rounds
        self.tree = [blocks_of(rounds) for rounds in shares]
        size = self.plan.num_microbatches
        self.piece_tree = [blocks_of(range(s.start * size, s.stop * size)) for s in shares]

    @property
    def num_replicas(self) -> int:
        return self.plan.num_replicas

    @cached_property
    def stages(self) -> list[StageSpec]:
        found = self.facts.survey.stages
        return [s for s in found.stages if self._holds(s.index)] if found else []

    @cached_property
    def owned(self) -> set[str]:
        found = self.facts.survey.stages
        if found is None:
            return {p.name for p in self.facts.parameters}
        return found.held_by([stage.index for stage in self.stages])

    @cached_property
    def parameters(self) -> list[Local]:
        """In the model's order; what only other stages use is left out."""
        sharded = {name for unit in self._units() for name in unit}
        return [self._local(p, sharded) for p in self.facts.parameters if p.name in self.owned]

    @cached_property
    def trained(self) -> list[Local]:
        return [p for p in self.parameters if p.is_trained]

    @property
    def num_stepped(self) -> int:
        """Elements that this rank's optimizer steps on."""
        if self.plan.zero in (1, 2):
            return sum(s.stop - s.start for shelf in self.shelves for s in shelf.own)
        return sum(p.num_elements for p in self.trained)

    @cached_property
    def shelves(self) -> list["Shelf"]:
        """The flat buffers of zero=1 and 2."""
        sizes = [p.num_bytes for p in self.trained]
        whole = not self.facts.is_element_wise
        most = max(1, sum(sizes) // (8 * self.num_replicas)) if whole else sum(sizes) + 1
        dealt = layout([(p.num_bytes, p.dtype) for p in self.trained], min(BUCKET_BYTES, most))
        made = [Shelf.of([self.trained[i] for i in own], own, self) for own in dealt]
        if whole:
            owners = zero.shard_whole([shelf.cuts[-1] for shelf in made], self.num_replicas)
            made = [s.given_to(owner, self) for s, owner in zip(made, owners, strict=True)]
        return made

    def counted_blocks(self) -> int:
        """The blocks of the gradient's norm that this rank brings."""
        names = {p.name for p in self.trained if self._counts(p)}
        if self.plan.zero in (1, 2):
            segments = [s for shelf in self.shelves for s in shelf.own]
            own = [s.stop - s.start for s in segments if self.trained[s.parameter].name in names]
        else:
            own = [p.num_elements for p in self.trained if p.name in names]
        return sum(map(num_blocks, own))

    def changed_elements(self) -> int:
        """Of the buffers that this rank's forward changes."""
        names = set(self.facts.changed)
        if self.stages:
            names &= {name for stage in self.stages for name in stage.buffers}
        return sum(self._part(name, self.facts.changed[name]) for name in names)

    def buffer_bytes(self) -> int:
        return sum(self._part(name, size) for name, size in self.facts.buffers.items())

    def gathered_units(self) -> list[int]:
        """The bytes of each unit of zero=3 when it is gathered, filled up."""
        by_name = {p.name: p for p in self.parameters}
        return [
            sum(self.num_replicas * by_name[name].filled_bytes for name in unit)
            for unit in self._units()
        ]

    def _units(self) -> list[list[str]]:
        units = self.facts.units
        return units[self.place.pipeline] if units else []

    def _holds(self, stage: int) -> bool:
        return rank_of_stage(stage, self.plan.pipeline, self.plan.schedule) == self.place.pipeline

    def _part(self, name: str, size: int) -> int:
        tensor = self.facts.survey.tensor
        return size // self.plan.tensor if tensor is not None and name in tensor.cuts else size

    def _local(self, p: Whole, sharded: set[str]) -> Local:
        shape, tensor = p.shape, self.facts.survey.tensor
        if tensor is not None and p.name in tensor.cuts:
            cut = tensor.cuts[p.name]
            blocks = blocks_of_rank(shape, cut, self.place.tensor, self.plan.tensor)
            length = sum(block.shape[cut.dim] for block in blocks)
            shape = (*shape[: cut.dim], length, *shape[cut.dim + 1 :])
        rows = 0
        if p.name in sharded:
            rows = -(-shape[0] // self.num_replicas)
            left = max(0, min(rows, shape[0] - rows * self.place.data))
            shape = (left, *shape[1:])
        return Local(p.name, shape, p.dtype, p.is_trained, p.name in sharded, rows)

    def _counts(self, p: Local) -> bool:
        """As `Holding.counts` and the strategies say."""
        found, tensor = self.facts.survey, self.facts.survey.tensor
        if found.stages is not None:
            first = found.stages.holders[p.name][0]
            if not self._holds(first):
                return False
        is_cut = tensor is not None and p.name in tensor.cuts
        counts_once = self.plan.zero in (1, 2) or p.is_sharded or self.place.data == 0
        return counts_once and (is_cut or self.place.tensor == 0)


class Shelf(NamedTuple):
    """A flat buffer of zero=1 or 2, where it is cut, and what of it is this rank's."""

    starts: list[int]
    lengths: list[int]
    indices: list[int]
    cuts: list[int]
    itemsize: int
    own: list[zero.Segment]

    @classmethod
    def of(cls, parameters: Sequence[Local], indices: list[int], rank: Rank) -> "Shelf":
        lengths = [p.num_elements for p in parameters]
        starts = zero.starts_of(lengths)
        cuts = zero.shard_evenly(starts, lengths, rank.num_replicas)
        made = cls(starts, lengths, indices, cuts, parameters[0].dtype.itemsize, [])
        return made._cut(cuts, rank)

    def given_to(self, owner: int, rank: Rank) -> "Shelf":
        cuts = [0 if r <= owner else self.cuts[-1] for r in range(len(self.cuts))]
        return self._cut(cuts, rank)

    def _cut(self, cuts: list[int], rank: Rank) -> "Shelf":
        begin, end = cuts[rank.place.data], cuts[rank.place.data + 1]
        own = zero.segments(self.starts, self.lengths, self.indices, begin, end)
        return self._replace(cuts=cuts, own=own)

    def shard_bytes(self, data: int) -> int:
        return (self.cuts[data + 1] - self.cuts[data]) * self.itemsize

    @property
    def num_bytes(self) -> int:
        return self.cuts[-1] * self.itemsize
