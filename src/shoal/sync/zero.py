"""ZeRO 1 and 2: each rank keeps the optimizer's state of its shard, and steps on that alone.

Parameters live in flat buffers (`parallel/zero_layout.py`). A bucket of gradients leaves as soon as
it is full; each rank receives its shard of it from all, adds them in the tree's order and forgets
the rest. The small message with the losses is the vote: no rank steps before every rank holds its
summed shard. Then each steps on its own elements, and the parameters go round.

`zero=1` adds up a rank's pieces before they are sent, so with accumulation it holds a whole
gradient between pieces; `zero=2` sends after every piece and holds a shard, at as many messages,
and adds round after round, so that its bits are one process's only without accumulation.

Per rank, in bytes a parameter, fp32 Adam: 8 + 8/N and 4 + 12/N. Traffic as in data parallel: each
gradient goes out once and each parameter comes back once. When not to use it: when even the
parameters do not fit; `zero=3` shards those too.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.buckets import WINDOW_BYTES, GradientBucket, GradientBuckets, make_bucket
from shoal.comm.mesh import Mesh
from shoal.comm.reduce import ReduceScatter, TreeReduce
from shoal.comm.tree import PieceSum, blocks_of
from shoal.numerics.norms import num_blocks
from shoal.numerics.optimizers import ParameterPart, is_element_wise, swap_parameters
from shoal.parallel import zero_layout
from shoal.parallel.layout import WHOLE, LocalLayout, Slice, slices_of_run
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
from shoal.sync.lockstep import LockstepStrategy
from shoal.sync.norm import SharedNorm
from shoal.sync.rank_layout import RankLayout
from shoal.sync.rounds import ReplicaRounds, RoundContext, blocks_by_rank, most_rounds
from shoal.sync.state import ParameterRun
from shoal.sync.strategy import GlobalStep, LocalStep


class ScatterSchedule(NamedTuple):
    """When gradients leave, and what is added up before that and after."""

    tree: TreeReduce
    before: PieceSum | None  # of rounds; None if each leaves by itself
    after: PieceSum  # of shards, one for each time that gradients were sent
    num_remaining: int  # how often of these in the exchange, when the rank's rounds are over

    @classmethod
    def once(cls, rounds: ReplicaRounds) -> "ScatterSchedule":
        """`zero=1`: a rank's rounds together."""
        return cls(rounds.tree(), PieceSum(rounds.own), PieceSum(range(1)), num_remaining=1)

    @classmethod
    def each_round(cls, rounds: ReplicaRounds) -> "ScatterSchedule":
        """`zero=2`; as often as the rank with most rounds, since every rank takes part."""
        data = rounds.mesh.data
        tree = TreeReduce(data, blocks_by_rank(data.num_ranks, data.num_ranks))
        most = most_rounds(rounds.num_rounds, data.num_ranks)
        return cls(tree, None, PieceSum(range(most)), num_remaining=most - len(rounds.own))


class ZeroSharded(LockstepStrategy):
    def __init__(self, num_pieces: int, scatter_each: bool, round_size: int = 1):
        super().__init__(num_pieces, round_size)
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
            self._flatten_parameters()
            self._swap_optimizer()
        self.attached.runs = {
            stepped: ParameterRun(
                self.named[s.parameter][0], self.named[s.parameter][1].shape, s.start
            )
            for s, stepped in self._stepped.items()
        }
        self.schedule = self._schedule_of(self.rounds)
        rows, spares = self.schedule.tree.num_rows, self.schedule.tree.buffers
        made = [
            make_bucket(s.indices, self.parameters, rows, spares, s.starts)
            for s in self.flat_buffers
        ]
        self.buckets = GradientBuckets(self.parameters, made, rows, self._send, kept=False)
        self._counted = [s for s in self._stepped if holding.counts(self.named[s.parameter][0])]
        self._norm = SharedNorm(mesh.world, sum(num_blocks(s.length) for s in self._counted))
        self._around = RoundContext(self.rounds, self._end_round)

    def detach(self) -> None:
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
        agreed, self.touched = self.rounds.agree(local, self._touched)
        if not want_norm:
            return agreed
        return agreed._replace(norm=self._norm.of(map(self._gradient, self._counted)))

    def update(self, scale: float, check: bool = True) -> bool:
        return self.attached.update(self.shards, scale, check, self._step)

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
        num_stepped = sum(s.length for s in layout.segments)
        return StepCosts(num_stepped, _held(layout), _sent(layout), agreement(layout, apart=True))

    def _flatten_parameters(self) -> None:
        """Move the parameters into flat buffers."""
        sizes = [(p.numel(), p.itemsize, (p.dtype, p.device)) for p in self.parameters]
        may_cut = is_element_wise(self.attached.optimizer)
        self.flat_buffers = zero_layout.lay_out_buffers(sizes, self.group.num_ranks, may_cut)
        self._flat = [_flatten(flat_buffer, self.parameters) for flat_buffer in self.flat_buffers]
        self._buffer_of = {
            i: k for k, flat_buffer in enumerate(self.flat_buffers) for i in flat_buffer.indices
        }

    def _swap_optimizer(self) -> None:
        """Let the optimizer step on this rank's segments instead of the parameters."""
        self._stepped: dict[zero_layout.FlatSegment, nn.Parameter] = {}
        parts: dict[nn.Parameter, list[ParameterPart]] = {p: [] for p in self.parameters}
        for flat_buffer, flat in zip(self.flat_buffers, self._flat, strict=True):
            for s in flat_buffer.segments(self.group.rank):
                p = self.parameters[s.parameter]
                if s.length == p.numel():
                    parts[p].append(ParameterPart(p, lambda tensor: tensor))
                else:
                    run = nn.Parameter(flat[s.place : s.place + s.length])
                    parts[p].append(ParameterPart(run, partial(_run_of, s)))
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

    def _send(self, bucket: GradientBucket) -> ReduceScatter:
        flat_buffer, tree = self.flat_buffers[len(self.buckets.sent)], self.schedule.tree
        shard = tree.buffers.take(flat_buffer.shards[self.group.rank], bucket.rows[0])
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
        self.attached.step()
        arrivals = [
            self.group.all_gather_shards(flat.split(flat_buffer.shards))
            for flat_buffer, flat in zip(self.flat_buffers, self._flat, strict=True)
        ]
        for arrival in arrivals:
            arrival.wait()

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
        times, tree = most_rounds(layout.num_rounds, n), blocks_by_rank(n, n)
    own = sum(shard for _, shard in layout.flat_buffer_bytes)
    elsewhere = sum(size for size, _ in layout.flat_buffer_bytes) - own
    most = max(len(blocks) for blocks in tree)
    return [
        Message(
            "gradients",
            "data",
            "all-to-all",
            times * most * len(layout.flat_buffers),
            times * len(tree[layout.place.data]) * elsewhere,
        ),
        Message("parameters", "data", "gather", len(layout.flat_buffers), own * (n - 1)),
    ]


def _held(layout: RankLayout) -> MemoryUse:
    padding = sum(size for size, _ in layout.flat_buffer_bytes) - layout.gradient_bytes
    own, terms = sum(shard for _, shard in layout.flat_buffer_bytes), _num_terms(layout)
    stepped = [(layout.trained[s.parameter], s.length) for s in layout.segments]
    return MemoryUse(
        Amount(sum(p.num_bytes for p in layout.parameters) + padding, "all, in flat buffers"),
        Amount(own * terms, "own shards" + (f" x {terms} terms" if terms > 1 else "")),
        optimizer_state(layout, [(p.name, p.shape_of_run(length)) for p, length in stepped]),
        buffers_held(layout),
        _held_meanwhile(layout),
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
