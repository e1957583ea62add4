"""What one rank of a plan holds and computes, by arithmetic. No rank is started.

It calls the same pure functions that the strategies run (`comm/buckets.py`, `rounds.py`,
`parallel/zero_layout.py`, `data/split.py`), so the counts are those of a real step, not of a second
formula.

Read next: `costs.py`, for what a `RankLayout` is asked for; `cost/explain.py`, which makes them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from shoal.comm.buckets import assign_buckets
from shoal.comm.tree import Block
from shoal.data.split import share
from shoal.numerics.codecs import packs
from shoal.numerics.norms import num_blocks
from shoal.parallel import zero_layout
from shoal.parallel.layout import blocks_of_rank
from shoal.parallel.pipeline.stages import StageSpec, rank_of_stage
from shoal.plans.plan import Plan
from shoal.sync.gradient_packing import PackedBucket, assign_packed
from shoal.sync.packed_units import PackedUnit
from shoal.sync.rounds import blocks_by_rank

if TYPE_CHECKING:
    from shoal.parallel.apply import Survey
    from shoal.sync.server.lookup_costs import TableLookups


class RankCoordinates(NamedTuple):
    """A rank's coordinates along the axes."""

    rank: int
    pipeline: int
    data: int
    tensor: int

    @classmethod
    def of(cls, rank: int, plan: Plan) -> "RankCoordinates":
        line, tensor = divmod(rank, plan.tensor)
        pipeline, data = divmod(line, plan.num_replicas)
        return cls(rank, pipeline, data, tensor)


class ModelParameter(NamedTuple):
    """A parameter of the whole model."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool


class StateTensor(NamedTuple):
    """A tensor of an optimizer's state: the dims of the parameter that it has, None for all."""

    dims: tuple[int, ...] | None
    itemsize: int

    def num_bytes(self, shape: Sequence[int]) -> int:
        own = shape if self.dims is None else [shape[dim] for dim in self.dims]
        return math.prod(own) * self.itemsize


class LocalParameter(NamedTuple):
    """A rank's part of a parameter."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool
    is_sharded: bool  # by FSDP2
    rows: int  # of the largest shard, to which FSDP2 pads all

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize

    def shape_of_run(self, length: int) -> tuple[int, ...]:
        """Of so many neighbouring elements: a part that is stepped on is flat."""
        return self.shape if length == self.num_elements else (length,)

    @property
    def filled_bytes(self) -> int:
        """The bytes of this rank's shard as it is sent."""
        return self.rows * math.prod(self.shape[1:]) * self.dtype.itemsize


@dataclass(frozen=True)
class PlanFacts:
    """Facts about a model and a plan that are the same for every rank."""

    plan: Plan
    survey: "Survey"
    parameters: list[ModelParameter]
    units: list[list[list[str]]]  # of zero=3, by pipeline rank: the parameters of each unit
    state: Mapping[str, list[StateTensor]]  # of the optimizer, by parameter
    is_element_wise: bool
    buffers: Mapping[str, int]  # bytes
    changed: Mapping[str, int]  # elements of the buffers that a forward changes
    averaged_buffers: int  # elements of those that local steps average
    clips: bool
    # Those whose rows are on servers.
    tables: Mapping[str, "TableLookups"] = field(default_factory=dict)
    is_lazy: bool = False  # whether there are tables that take memory as rows are touched
    phases: Sequence[str] = ()  # of the first step, by name; none of a plain one
    # Whether ranks of one host, which all are, may hold parameters and state together.
    shares: bool = False

    @cached_property
    def ranks(self) -> list["RankLayout"]:
        return [RankLayout(self, rank) for rank in range(self.plan.num_ranks)]

    @cached_property
    def state_sizes(self) -> list[int]:
        """The bytes of the optimizer's state for an element of each parameter; without repeats."""
        kept = ([t.itemsize for t in own if t.dims is None] for own in self.state.values())
        return sorted({sum(sizes) for sizes in kept})

    def pipeline_ranks(self, name: str) -> tuple[int, ...]:
        """Those that hold a parameter."""
        found, plan = self.survey.stages, self.plan
        users = [0] if found is None else found.holders[name]
        return tuple(sorted({rank_of_stage(s, plan.pipeline, plan.schedule) for s in users}))

    @cached_property
    def norm_blocks(self) -> int:
        """The blocks of the gradient norm, of all ranks of a replica; all replicas are alike."""
        return sum(rank.counted_blocks() for rank in self.ranks) // self.ranks[0].num_apart


@lru_cache(maxsize=64)
def _tree(num_rounds: int, num_replicas: int, num_terms: int = 1) -> list[list[Block]]:
    """The same for all ranks of a plan, and for many plans."""
    return blocks_by_rank(num_rounds, num_replicas, num_terms)


class RankLayout:
    """One rank of a plan: its place, its rounds, its part of the model. Of those of a replica that
    steps apart from others, its place and rounds are those within it."""

    def __init__(self, facts: PlanFacts, rank: int):
        self.facts, self.plan = facts, facts.plan
        place = RankCoordinates.of(rank, facts.plan)
        # A replica that steps apart is a world of its own.
        plan = self.plan
        steps_apart = plan.staleness_bound != 0 and plan.num_ranks_apart > 1
        self.num_apart = plan.num_apart if plan.local_steps > 1 or steps_apart else 1
        self._number_within = place.data % plan.num_within
        self.num_ranks = self.plan.num_ranks // self.num_apart
        self.world = "world" if self.num_apart == 1 else "replica"  # who make each step together
        # The ranks of the data axis that make each step together.
        self.num_replicas = num_replicas = self.plan.num_replicas // self.num_apart
        size = self.plan.num_microbatches
        self.replica, data = divmod(place.data, num_replicas)
        self.place = place._replace(data=data)
        self.num_pieces = self.plan.num_pieces // self.num_apart
        self.num_rounds = self.num_pieces // size
        self.rounds = share(self.place.data, num_replicas, self.num_rounds)
        self.tree = _tree(self.num_rounds, num_replicas)
        self.piece_tree = _tree(self.num_rounds, num_replicas, size)
        self.tree_of_ranks = _tree(num_replicas, num_replicas)

    def line(self, axis: str) -> tuple[int, int]:
        """The number of ranks that an axis has here, and this rank's index."""
        if axis == "replicas":
            return self.num_apart, self.replica
        if axis == "data":
            return self.num_replicas, self.place.data
        if axis == "within":  # of the data axis, the ranks of one replica
            return self.plan.num_within, self._number_within
        num_ranks = self.plan.num_ranks_apart if axis == "replica" else self.plan.num_ranks
        return num_ranks, self.place.rank

    @property
    def shares(self) -> bool:
        """Whether this rank holds parameters and optimizer state together with all others."""
        return self.facts.shares and self.plan.shares and self.num_replicas > 1

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
    def parameters(self) -> list[LocalParameter]:
        """In the model's order, without those that only other stages use."""
        sharded = {name for unit in self._units for name in unit}
        held = self.owned - self.facts.tables.keys()
        return [self._local(p, sharded) for p in self.facts.parameters if p.name in held]

    @cached_property
    def trained(self) -> list[LocalParameter]:
        return [p for p in self.parameters if p.is_trained]

    @cached_property
    def num_trained(self) -> int:
        """Elements of the parameters that are trained."""
        return sum(p.num_elements for p in self.trained)

    @cached_property
    def gradient_bytes(self) -> int:
        """Of the whole gradient of what this rank holds."""
        return sum(p.num_bytes for p in self.trained)

    @cached_property
    def buckets(self) -> list[list[LocalParameter]]:
        """The gradient buckets, without ZeRO."""
        sizes = [(p.num_bytes, p.dtype) for p in self.trained]
        dealt = assign_buckets(sizes, self.plan.bucket_bytes)
        return [[self.trained[i] for i in bucket] for bucket in dealt]

    @cached_property
    def packed_buckets(self) -> list[PackedBucket]:
        """The same, if gradients are packed."""
        sizes = [(p.shape, p.dtype.itemsize, p.dtype) for p in self.trained]
        return assign_packed(sizes, self.plan.packed_codec, self.plan.bucket_bytes)

    @cached_property
    def flat_buffers(self) -> list[zero_layout.FlatBuffer]:
        """The flat buffers of zero=1 and 2."""
        sizes = [(p.num_elements, p.dtype.itemsize, p.dtype) for p in self.trained]
        may_cut, codec = self.facts.is_element_wise, self.plan.packed_codec
        packed = [codec != "none" and packs(codec, p.shape, p.dtype.itemsize) for p in self.trained]
        bucket_bytes = self.plan.bucket_bytes
        return zero_layout.lay_out_buffers(sizes, self.num_replicas, may_cut, packed, bucket_bytes)

    @cached_property
    def segments(self) -> list[zero_layout.FlatSegment]:
        """What of them is this rank's."""
        return [s for flat in self.flat_buffers for s in flat.segments(self.place.data)]

    @cached_property
    def flat_buffer_bytes(self) -> list[tuple[int, int]]:
        """Of each flat, and of this rank's shard of it."""
        sizes = [self.trained[flat.indices[0]].dtype.itemsize for flat in self.flat_buffers]
        return [
            (flat.starts[-1] * size, flat.shards[self.place.data] * size)
            for flat, size in zip(self.flat_buffers, sizes, strict=True)
        ]

    def counted_blocks(self) -> int:
        """The blocks that this rank contributes to the gradient norm."""
        names = {p.name for p in self.trained if self._counts(p)}
        if self.plan.zero == 3 and self.plan.packed_codec != "none":
            whole, rank = self.facts.parameters, self.place.data
            own = [p.num_elements for p in self.trained if p.name in names and not p.is_sharded]
            gradients = [t for unit, _ in self.packed_units for t in unit.in_order]
            own += [len(t.counted(rank)) for t in gradients if whole[t.number].name in names]
        elif self.plan.zero in (1, 2):
            own = [s.length for s in self.segments if self.trained[s.parameter].name in names]
        else:
            own = [p.num_elements for p in self.trained if p.name in names]
        return sum(map(num_blocks, own))

    def changed_elements(self) -> int:
        """The elements of buffers that this rank's forward pass changes."""
        names = set(self.facts.changed)
        if self.stages:
            names &= {name for stage in self.stages for name in stage.buffers}
        return sum(self._part(name, self.facts.changed[name]) for name in names)

    def buffer_bytes(self) -> int:
        return sum(self._part(name, size) for name, size in self.facts.buffers.items())

    def gathered_units(self) -> list[int]:
        """The bytes of each unit of zero=3 when it is gathered, with padding."""
        by_name = {p.name: p for p in self.parameters}
        return [
            sum(self.num_replicas * by_name[name].filled_bytes for name in unit)
            for unit in self._units
        ]

    @cached_property
    def packed_units(self) -> list[tuple[PackedUnit, torch.dtype]]:
        """Of `zero=3` with a codec, with the dtype of each."""
        codec, n = self.plan.packed_codec, self.num_replicas
        listed = [[(i, p.shape, p.dtype.itemsize) for i, p in unit] for unit in self.whole_units]
        dtypes = [unit[0][1].dtype for unit in self.whole_units]
        return [(PackedUnit.of(one, codec, n), d) for one, d in zip(listed, dtypes, strict=True)]

    @property
    def whole_units(self) -> list[list[tuple[int, ModelParameter]]]:
        """The parameters of each unit of zero=3, with their numbers."""
        known = {p.name: (index, p) for index, p in enumerate(self.facts.parameters)}
        return [[known[name] for name in unit] for unit in self._units if unit]

    @property
    def _units(self) -> list[list[str]]:
        """Of zero=3, the names of the parameters of each unit."""
        units = self.facts.units
        return units[self.place.pipeline] if units else []

    def _holds(self, stage: int) -> bool:
        return rank_of_stage(stage, self.plan.pipeline, self.plan.schedule) == self.place.pipeline

    def _part(self, name: str, size: int) -> int:
        tensor = self.facts.survey.tensor
        return size // self.plan.tensor if tensor is not None and name in tensor.cuts else size

    def _local(self, p: ModelParameter, sharded: set[str]) -> LocalParameter:
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
        return LocalParameter(p.name, shape, p.dtype, p.is_trained, p.name in sharded, rows)

    def _counts(self, p: LocalParameter) -> bool:
        """As `LocalLayout.counts` and the strategies say."""
        found, tensor = self.facts.survey, self.facts.survey.tensor
        if found.stages is not None:
            first = found.stages.holders[p.name][0]
            if not self._holds(first):
                return False
        is_cut = tensor is not None and p.name in tensor.cuts
        counts_once = self.plan.zero in (1, 2) or p.is_sharded or self.place.data == 0
        return counts_once and (is_cut or self.place.tensor == 0)
