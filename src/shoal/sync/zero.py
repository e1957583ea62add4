"""ZeRO 1 and 2: each rank keeps the optimizer's state of its shard, and steps on that alone.

Parameters live in flat buffers (`parallel/zero_layout.py`). A bucket of gradients leaves as soon as
it is full; each rank receives its shard of it from all, adds them in the tree's order and forgets
the rest. The small message with the losses is the vote: no rank steps before every rank holds its
summed shard. Then each steps on its own elements, and the parameters go round. With a codec each
steps on a copy of its own elements and sends by how much they have changed since, packed, so that
what all hold alike follows what was stepped on.

`zero=1` adds up a rank's pieces before they are sent, so with accumulation it holds a whole
gradient between pieces; `zero=2` sends after every piece and holds a shard, at as many messages,
and adds round after round, so that its bits are one process's only without accumulation.

Per rank, in bytes a parameter, fp32 Adam: 8 + 8/N and 4 + 12/N. Traffic as in data parallel: each
gradient goes out once and each parameter comes back once. When not to use it: when even the
parameters do not fit; `zero=3` shards those too.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.buckets import (
    BUCKET_BYTES,
    WINDOW_BYTES,
    GradientBucket,
    GradientBuckets,
    make_bucket,
)
from shoal.comm.collectives import Pending
from shoal.comm.compression import (
    CompressedGather,
    CompressedScatter,
    LowRankScatter,
    shares_of,
)
from shoal.comm.mesh import Mesh
from shoal.comm.reduce import ReduceScatter, TreeReduce
from shoal.comm.tree import PieceSum, RunningSum, blocks_of
from shoal.numerics.codecs import packs
from shoal.numerics.momentum import corrected_momenta, without_momentum
from shoal.numerics.norms import num_blocks
from shoal.numerics.optimizers import ParameterPart, is_element_wise, swap_parameters
from shoal.parallel import zero_layout
from shoal.parallel.layout import WHOLE, LocalLayout, Slice, slices_of_run
from shoal.sync.ahead_shards import AheadShards
from shoal.sync.costs import (
    Amount,
    MemoryUse,
    Message,
    StepCosts,
    added_up,
    agreement,
    buffers_held,
    optimizer_state,
    partial_sums,
    sums_in_round,
    sums_in_step,
)
from shoal.sync.gradient_packing import GradientPacking, PackedBucket
from shoal.sync.host_costs import costs_of_shared
from shoal.sync.lockstep import LockstepStrategy
from shoal.sync.norm import SharedNorm
from shoal.sync.packing_costs import (
    gathered_bytes,
    packed_messages,
    residual_memory,
    scattered_bytes,
)
from shoal.sync.rank_layout import RankLayout
from shoal.sync.rounds import (
    ReplicaRounds,
    RoundContext,
    blocks_by_rank,
    most_rounds,
    ranks_tree,
)
from shoal.sync.state import ParameterRun, ShardedState, StateSource
from shoal.sync.strategy import GlobalStep, LocalStep


class ScatterSchedule(NamedTuple):
    """When gradients leave, and what is added up before that and after."""

    tree: TreeReduce
    before: PieceSum | None  # of rounds; None if each leaves by itself
    after: PieceSum  # of shards, one for each time that gradients were sent
    num_remaining: int  # how often of these in the exchange, when the rank's rounds are over

    @classmethod
    def once(cls, rounds: ReplicaRounds, packs: bool = False) -> "ScatterSchedule":
        """`zero=1`: a rank's rounds together; as one sum, if it `packs`."""
        tree = ranks_tree(rounds.mesh.data) if packs else rounds.tree()
        before = RunningSum() if packs else PieceSum(rounds.own)
        return cls(tree, before, PieceSum(range(1)), num_remaining=1)

    @classmethod
    def each_round(cls, rounds: ReplicaRounds, packs: bool = False) -> "ScatterSchedule":
        """`zero=2`; as often as the rank with most rounds, since every rank takes part."""
        most = most_rounds(rounds.num_rounds, rounds.mesh.data.num_ranks)
        tree, num_remaining = ranks_tree(rounds.mesh.data), most - len(rounds.own)
        return cls(tree, None, PieceSum(range(most)), num_remaining)


class PackedScatter:
    """A bucket whose gradients are packed, and this rank's shard of their sum."""

    def __init__(self, scatter: CompressedScatter | LowRankScatter, sum_: Tensor):
        self._scatter, self.sum = scatter, sum_

    def fold(self) -> None:
        self.sum.copy_(self._scatter.fold())

    def drain(self, deadline: float) -> None:
        self._scatter.drain(deadline)


class ZeroSharded(LockstepStrategy):
    def __init__(
        self,
        num_pieces: int,
        scatter_each: bool,
        round_size: int = 1,
        packing: GradientPacking | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ):
        super().__init__(num_pieces, round_size, packing, bucket_bytes)
        self._schedule_of = ScatterSchedule.each_round if scatter_each else ScatterSchedule.once
        self.flat_buffers: list[zero_layout.FlatBuffer] = []
        self.shards: list[Tensor] = []  # of the summed gradient, by flat buffer

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        holding: LocalLayout = WHOLE,
    ) -> None:
        super().attach(model, optimizer, mesh, holding)
        self.group = mesh.data
        self.named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in self.named]
        if not self.flat_buffers:  # else they stand since an earlier attach, in the same seat
            codec = "none" if self.packing is None else self.packing.name
            self._momenta = corrected_momenta(codec, optimizer)
            self._flatten_parameters(codec)
            self._swap_optimizer()
        self.attached.runs = {
            stepped: ParameterRun(
                self.named[s.parameter][0], self.named[s.parameter][1].shape, s.start
            )
            for s, stepped in self._stepped.items()
        }
        self.schedule = self._schedule_of(self.rounds, packs=self.packing is not None)
        rows, spares = self.schedule.tree.num_rows, self.schedule.tree.buffers
        made = [
            make_bucket(s.indices, self.parameters, rows, spares, s.starts)
            for s in self.flat_buffers
        ]
        self.buckets: GradientBuckets[ReduceScatter | PackedScatter] = GradientBuckets(
            self.parameters, made, rows, self._send, kept=False
        )
        if (packing := self._active) is not None:
            shown = [
                PackedBucket(b.indices, b.lengths, b.starts if b.is_packed else None)
                for b in self.flat_buffers
            ]
            wanted = [shares_of(b.cuts) for b in self.flat_buffers]
            packing.attach(self.group, self.named, holding, shown, self._momenta, wanted)
        self._counted = [s for s in self._stepped if holding.counts(self.named[s.parameter][0])]
        self._norm = SharedNorm(mesh.world, sum(num_blocks(s.length) for s in self._counted))
        self._around = RoundContext(self.rounds, self._end_round)

    def detach(self) -> None:
        if self.is_attached:
            self.buffers.restore()
            self.buckets.close()

    def microbatch(self, first: bool, last: bool) -> AbstractContextManager[object]:
        if first:
            self._forget()
        if last or self.schedule.before is None:
            self.buckets.arm(self.schedule.before, early=self.round_size == 1)
        self._around.last = last
        return self._around

    def exchange(self, local: LocalStep, want_norm: bool) -> GlobalStep:
        local.busy_s -= self._scattering_s
        for _ in range(self.schedule.num_remaining):
            self._scatter()
        shards, *others = self.schedule.after.rows
        for row in others:
            torch._foreach_add_(shards, row)  # type: ignore[arg-type]
        self.shards = [shard for shard in shards if shard is not None]
        agreed, self.touched = self.rounds.agree(local, self._own_touched())
        if not want_norm:
            return agreed
        return agreed._replace(norm=self._norm.of(map(self._gradient, self._counted)))

    def update(self, scale: float, check: bool = True) -> bool:
        packing = self._active
        # What is not finite must not stay in what was not sent.
        checks = check or packing is not None
        if not self.attached.update(self.shards, scale, checks, self._step):
            return False
        if packing is not None:
            packing.commit()
        return True

    def gradients(self) -> dict[str, list[Slice]]:
        found: dict[str, list[Slice]] = {}
        for s in self._stepped:
            if self.touched[s.parameter]:
                name, p = self.named[s.parameter]
                gradient, holding = self._gradient(s), self.attached.holding
                parts = slices_of_run(name, p.shape, s.start, gradient, holding)
                found.setdefault(name, []).extend(parts)
        return found

    @staticmethod
    def costs(layout: RankLayout) -> StepCosts:
        if layout.shares:
            return costs_of_shared(layout)
        num_stepped = sum(s.length for s in layout.segments)
        return StepCosts(num_stepped, _held(layout), _sent(layout), agreement(layout, apart=True))

    def _flatten_parameters(self, codec: str) -> None:
        """Move the parameters into flat buffers."""
        sizes = [(p.numel(), p.itemsize, (p.dtype, p.device)) for p in self.parameters]
        may_cut = is_element_wise(self.attached.optimizer)
        packed = [codec != "none" and packs(codec, p.shape, p.itemsize) for p in self.parameters]
        self.flat_buffers = zero_layout.lay_out_buffers(
            sizes, self.group.num_ranks, may_cut, packed, self.bucket_bytes
        )
        self._flat = [_flatten(flat_buffer, self.parameters) for flat_buffer in self.flat_buffers]
        self._buffer_of = {
            i: k for k, flat_buffer in enumerate(self.flat_buffers) for i in flat_buffer.indices
        }

    def _swap_optimizer(self) -> None:
        """Let the optimizer step on this rank's segments instead of the parameters."""
        self._stepped: dict[zero_layout.FlatSegment, nn.Parameter] = {}
        codec = "none" if self._active is None else self._active.name
        self._ahead = AheadShards(self.group, codec, self.flat_buffers, self._flat)
        parts: dict[nn.Parameter, list[ParameterPart]] = {p: [] for p in self.parameters}
        for k, flat_buffer in enumerate(self.flat_buffers):
            for s in flat_buffer.segments(self.group.rank):
                p, is_whole = (
                    self.parameters[s.parameter],
                    s.length == self.parameters[s.parameter].numel(),
                )
                if is_whole and k not in self._ahead:
                    parts[p].append(ParameterPart(p, lambda tensor: tensor))
                else:
                    run = self._ahead.run(k, s)
                    run = nn.Parameter(run.view(p.shape) if is_whole else run)
                    cut = (lambda tensor: tensor) if is_whole else partial(_run_of, s)
                    parts[p].append(ParameterPart(run, cut))
                self._stepped[s] = parts[p][-1].parameter
        swap_parameters(self.attached.optimizer, parts.get)

    def _forget(self) -> None:
        for p in [*self.parameters, *self._stepped.values()]:
            p.grad = None
        for shard in self.shards:
            self.schedule.tree.buffers.give(shard)
        self.shards = []
        self._touched = [False] * len(self.parameters)  # by this rank's pieces
        self._scattering_s = 0.0  # between rounds: others were waited for
        self.buckets.begin()
        if self.schedule.before is not None:
            self.schedule.before.begin()
        self.schedule.after.begin()
        self.buffers.begin()
        if self.packing is not None:
            self.packing.begin()

    def _own_touched(self) -> list[bool]:
        """By this rank's pieces; and those in its shards of which something came that was not
        sent before."""
        if self._active is None:
            return self._touched
        late = {s.parameter for s in self._stepped if bool(self._gradient(s).any())}
        return [is_used or i in late for i, is_used in enumerate(self._touched)]

    def _end_round(self, last: bool) -> None:
        """Put away what a round computed."""
        if self.schedule.before is None:
            began = perf_counter()
            self._scatter()
            self._scattering_s += perf_counter() - began
        elif not last:
            self.schedule.before.push([p.grad for p in self.parameters])
            for p in self.parameters:
                p.grad = None

    def _send(self, bucket: GradientBucket) -> "ReduceScatter | PackedScatter":
        number, tree, packing = len(self.buckets.sent), self.schedule.tree, self._active
        flat_buffer = self.flat_buffers[number]
        shard = tree.buffers.take(flat_buffer.shards[self.group.rank], bucket.rows[0])
        if packing is not None and number in packing.buckets:
            return PackedScatter(packing.scatter(number, bucket.rows[0]), shard)
        return ReduceScatter(tree, bucket.rows, flat_buffer.cuts, shard)

    def _scatter(self) -> None:
        """Send what is left and add up this rank's shard of every bucket."""
        self.buckets.send_rest()
        self.buckets.fold_rest()
        self._touched = [a or b for a, b in zip(self._touched, self.buckets.touched, strict=True)]
        self.schedule.after.push([scatter.sum for scatter in self.buckets.sent])
        self.buckets.begin()

    def _step(self) -> None:
        """Step on this rank's shards, and hand them round."""
        for s, stepped in self._stepped.items():
            used = self.touched[s.parameter]
            stepped.grad = self._gradient(s).view(stepped.shape) if used else None
        optimizer, packed = self.attached.optimizer, set[nn.Parameter]()
        if self._momenta and self._active is not None:
            numbers = {i for b in self.flat_buffers if b.is_packed for i in b.indices}
            packed = {p for s, p in self._stepped.items() if s.parameter in numbers}
        with without_momentum(optimizer, packed) if packed else nullcontext():
            self.attached.step()
        with torch.no_grad():
            for s in self._stepped:
                if not self.parameters[s.parameter].requires_grad:
                    self._ahead.follow(self._buffer_of[s.parameter], s)
            for arrival in [self._hand_round(k) for k in range(len(self.flat_buffers))]:
                arrival.wait()

    def _hand_round(self, k: int) -> Pending | CompressedGather:
        if k in self._ahead:
            return self._ahead.gather(self.group, k)
        return self.group.all_gather_shards(self._flat[k].split(self.flat_buffers[k].shards))

    def state_dict(self) -> ShardedState:
        """With what is stepped on here and has not been sent whole."""
        state = super().state_dict()
        for name, parts in self._ahead_parts():
            state.tensors.setdefault(name, []).extend(parts)
        return state

    def load_state_dict(self, source: StateSource, step: int) -> None:
        super().load_state_dict(source, step)
        self._ahead.load(source, self._ahead_parts())

    def _ahead_parts(self) -> Iterator[tuple[str, list[Slice]]]:
        segments = ((self._buffer_of[s.parameter], s) for s in self._stepped)
        return self._ahead.parts(segments, self.named, self.attached.holding)

    def _gradient(self, segment: zero_layout.FlatSegment) -> Tensor:
        k = self._buffer_of[segment.parameter]
        start = segment.place - self.flat_buffers[k].cuts[self.group.rank]
        return self.shards[k][start : start + segment.length]


def _flatten(flat_buffer: zero_layout.FlatBuffer, parameters: Sequence[nn.Parameter]) -> Tensor:
    """A new flat buffer in which these parameters stand from now on."""
    first = parameters[flat_buffer.indices[0]]
    flat = torch.zeros(flat_buffer.starts[-1], dtype=first.dtype, device=first.device)
    for i, start in zip(flat_buffer.indices, flat_buffer.starts, strict=False):
        view = flat[start : start + parameters[i].numel()].view(parameters[i].shape)
        view.copy_(parameters[i].detach())
        parameters[i].data = view
    return flat


def _run_of(segment: zero_layout.FlatSegment, tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[segment.start : segment.stop]


def _sent(layout: RankLayout) -> list[Message]:
    """zero=1 sends once, zero=2 after every round; parameters come back once."""
    times, tree, n = 1, layout.tree, layout.num_replicas
    if n == 1:
        return []
    if layout.plan.zero == 2:
        times = most_rounds(layout.num_rounds, n)
    if layout.plan.zero == 2 or layout.plan.packed_codec != "none":
        tree = blocks_by_rank(n, n)
    most, rows = max(len(blocks) for blocks in tree), len(tree[layout.place.data])
    elsewhere, own = sum(scattered_bytes(layout)), sum(gathered_bytes(layout))
    gathered = Message("parameters", "data", "gather", len(layout.flat_buffers), own * (n - 1))
    if layout.plan.codec.startswith("powersgd:"):
        return [*packed_messages(layout), gathered]
    return [
        Message(
            "gradients",
            "data",
            "reduce-scatter" if layout.plan.packed_codec == "none" else "all-to-all",
            times * most * len(layout.flat_buffers),
            times * rows * elsewhere,
        ),
        gathered,
    ]


def _held(layout: RankLayout) -> MemoryUse:
    padding = sum(size for size, _ in layout.flat_buffer_bytes) - layout.gradient_bytes
    own, terms = sum(shard for _, shard in layout.flat_buffer_bytes), _num_terms(layout)
    stepped = [(layout.trained[s.parameter], s.length) for s in layout.segments]
    extra = added_up(_held_meanwhile(layout), residual_memory(layout, owes=False))
    return MemoryUse(
        Amount(sum(p.num_bytes for p in layout.parameters) + padding, "all, in flat buffers"),
        Amount(own * terms, "own shards" + (f" x {terms} terms" if terms > 1 else "")),
        optimizer_state(layout, [(p.name, p.shape_of_run(length)) for p, length in stepped]),
        buffers_held(layout),
        extra,
    )


def _num_terms(layout: RankLayout) -> int:
    """The sums of shards that zero=2 keeps until the last piece is done."""
    if layout.plan.zero == 1:
        return 1
    return len(blocks_of(range(most_rounds(layout.num_rounds, layout.num_replicas))))


def _held_meanwhile(layout: RankLayout) -> Amount:
    """Sums over rounds, which zero=2 does without; messages in flight; a bucket before that."""
    num_sums = sums_in_round(layout)
    if layout.plan.zero == 1:
        num_sums = sums_in_step(layout, alone=layout.num_replicas == 1)
    sums = partial_sums(layout, num_sums)
    if layout.num_replicas == 1:
        return added_up(sums)
    sizes = [size for size, _ in layout.flat_buffer_bytes]
    window = 2 * min(WINDOW_BYTES, sum(sizes))
    return added_up(
        sums,
        Amount(window, "what is under way" if window else ""),
        Amount(max(sizes, default=0), "the largest bucket's gradients"),
    )
