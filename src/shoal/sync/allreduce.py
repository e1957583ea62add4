"""Data parallel: every rank holds the whole model, and gradients are summed on every step.

Gradients leave in buckets while backward runs (`comm/buckets.py`). With exact sums the pieces are
added in one tree (`comm/tree.py`), so that any number of ranks trains the same bits; otherwise in
whatever order is fastest. With a codec each rank adds up its own pieces and packs the sum
(`gradient_packing.py`). One process does the same without communication. When not to use it: when
the model, its gradients and its optimizer state do not fit one rank's memory; shard them then.

Cost: two times the gradients' bytes per rank and step, and their copy in memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.comm.buckets import (
    BUCKET_BYTES,
    WINDOW_BYTES,
    GradientBucket,
    GradientBuckets,
    PlacedBucket,
    make_bucket,
)
from shoal.comm.collectives import Pending
from shoal.comm.compression import CompressedSum, LowRankSum
from shoal.comm.mesh import Mesh
from shoal.comm.reduce import Reduction
from shoal.comm.tree import PieceSum, RunningSum, total
from shoal.logs import warn_once
from shoal.numerics.momentum import corrected_momenta, without_momentum
from shoal.numerics.norms import coalesced, gradient_norm, num_blocks
from shoal.parallel.layout import WHOLE, LocalLayout, Slice, slices
from shoal.parallel.striping import tables_of, weights_of
from shoal.sync.costs import (
    Amount,
    Message,
    StepCosts,
    added_up,
    agreement,
    all_reduce_message,
    any_order,
    as_parameters,
    memory_of_parts,
    partial_sums,
    sums_by_piece,
    sums_in_step,
    tree_message,
)
from shoal.sync.gradient_packing import GradientPacking, assign_packed
from shoal.sync.host_costs import costs_of_shared
from shoal.sync.host_state import HostState, why_apart
from shoal.sync.lockstep import LockstepStrategy
from shoal.sync.norm import SharedNorm
from shoal.sync.packing_costs import packed_messages, residual_memory
from shoal.sync.rank_layout import RankLayout
from shoal.sync.rounds import RoundContext, blocks_by_rank, ranks_tree
from shoal.sync.strategy import GlobalStep, LocalStep

_NOTHING: AbstractContextManager[None] = nullcontext()
Sum = Reduction | CompressedSum | LowRankSum


class AllReduce(LockstepStrategy):
    def __init__(
        self,
        num_pieces: int,
        exact: bool = True,
        round_size: int = 1,
        packing: GradientPacking | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        apart: str | None = None,
    ):
        """Ranks of one host hold parameters and state together where they can, if `apart` is "";
        else it is why they do not, in words, or None if that needs no words."""
        super().__init__(num_pieces, round_size, packing, bucket_bytes)
        self.exact, self._apart, self.keeps = exact, apart, False
        self.host: HostState | None = None
        self._held_together = False  # in this group or one before
        self._kept: dict[str, list[Slice]] = {}  # gradients of the last update in another group

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        holding: LocalLayout = WHOLE,
    ) -> None:
        super().attach(model, optimizer, mesh, holding)
        self.named = {n: p for n, p in model.named_parameters() if is_summed(p)}
        self.parameters = list(self.named.values())
        self.gradient_sum = PieceSum(self.rounds.own) if self.exact else None
        if self._active is not None:
            self.gradient_sum = RunningSum()
        self.buckets: GradientBuckets[Sum] | None = None
        before, self.host = self.host, None if self._apart is None else self._share(self._apart)
        if self.host is not None:
            self._attach_to_host(self.host)
            self._held_together = True
        elif before is not None:
            before.give_back()
        if self.host is None and mesh.data.num_ranks > 1:
            codec = self.packing.name if self.packing else "none"
            self._tree = self.rounds.tree() if self.packing is None else ranks_tree(mesh.data)
            num_rows = self._tree.num_rows if self.exact and self.packing is None else 1
            sizes = [(tuple(p.shape), p.itemsize, (p.dtype, p.device)) for p in self.parameters]
            assigned = assign_packed(sizes, codec, self.bucket_bytes)
            buckets = [
                make_bucket(b.indices, self.parameters, num_rows, self._tree.buffers, b.starts)
                for b in assigned
            ]
            self.buckets = GradientBuckets(self.parameters, buckets, num_rows, self._start)
            if self.packing is not None:
                momenta = corrected_momenta(codec, optimizer)
                packed = {self.parameters[i] for b in assigned if b.starts for i in b.indices}
                self._corrected = packed if momenta else set()
                self.packing.attach(mesh.data, list(self.named.items()), holding, assigned, momenta)
        if mesh.is_cut:
            first = mesh.data.rank == 0  # of the replicas, whose gradients are the same
            self._counted = [p for n, p in self.named.items() if first and holding.counts(n)]
            self._norm = SharedNorm(mesh.world, sum(num_blocks(p.numel()) for p in self._counted))
        self._sparse = [
            p.register_post_accumulate_grad_hook(_coalesce)
            for p in weights_of(tables_of(model).values())
        ]
        self._around = RoundContext(self.rounds, self._end_round)
        # One process, one piece, no buffers: nothing to sum, put away or restore.
        self._plain = mesh.num_ranks == self.num_pieces == 1 and not len(self.buffers)

    def detach(self) -> None:
        if not self.is_attached:  # its group was lost while the plan was measured
            return
        self.buffers.restore()  # of a step given up, nothing stays
        for hook in self._sparse:
            hook.remove()
        if self.buckets is not None:
            self.buckets.close()
            self.buckets = None
        if self.host is not None:
            if self.host.has_gradients:  # hooks may ask for them when work has moved
                self._kept = self.host.gradients(self.attached.holding)
            self.host.leave()

    def settled(self) -> None:
        """All ranks hold the same state. Every rank calls it after `attach`, before a step."""
        if self.host is not None:
            self.host.settle()

    def holds_whole(self) -> bool:
        """Whether this rank is to hold all parameters and state, if not together with others: as
        one of this group did, whom none could follow who has a shard. Every rank must call it."""
        if self.host is None and self.mesh.data.num_ranks > 1:
            data, sent = self.mesh.data, self.mesh.data.bytes_sent
            rows = data.all_gather_numbers([self._held_together])
            data.bytes_sent = sent  # a start is not counted
            self._held_together = any(row[0] for row in rows)
        return self._held_together

    def keep_gradients(self) -> None:
        """Let `gradients` find them after an update: a copy, where ranks share memory."""
        self.keeps = True

    def microbatch(self, first: bool, last: bool) -> AbstractContextManager[object]:
        if first:
            for p in self.parameters:
                p.grad = None
            if self._plain:
                return _NOTHING
            if self.gradient_sum is not None:
                self.gradient_sum.begin()
            self.buffers.begin()
            if self.buckets is not None:
                self.buckets.begin()
            if self.packing is not None:
                self.packing.begin()
            if self.host is not None:
                self.host.begin()
        if self.host is not None and (first if self._adds else last):
            self.host.linears.arm()
        if (last or self._adds) and self.buckets is not None:
            # In a pipeline a gradient is complete only when the whole round is.
            self.buckets.arm(self.gradient_sum, early=self.round_size == 1)
        self._around.last = last
        return self._around

    def exchange(self, local: LocalStep, want_norm: bool) -> GlobalStep:
        agreed = self._agree(local)
        if not want_norm:
            return agreed
        if self.host is not None:
            self.host.add_up()
            return agreed._replace(norm=self._norm.of(self.host.own_gradients()))
        if self.mesh.is_cut:
            return agreed._replace(norm=self._norm.of(_present(self._counted)))
        return agreed._replace(norm=gradient_norm(_present(self.parameters)))

    def update(self, scale: float, check: bool = True) -> bool:
        if (host := self.host) is not None:
            if check:
                host.add_up()
            step = partial(host.step, scale, self.keeps)
            return self.attached.update(host.own_gradients() if check else (), 1.0, check, step)
        alike = not self.mesh.is_cut  # replicas hold the same gradients, parts of one do not
        if self.packing is None or self.buckets is None:
            return self.attached.update(self._gradients(), scale, check, self.attached.step, alike)
        # What is not finite must not stay in what was not sent.
        if not self.attached.update(self._gradients(), scale, True, self._step, alike):
            return False
        self.packing.commit()
        return True

    def gradients(self) -> dict[str, list[Slice]]:
        if self.host is not None:
            made = self.host.has_gradients or not self.keeps
            return self.host.gradients(self.attached.holding) if made else self._kept
        present = {n: p.grad.to_dense() for n, p in self.named.items() if p.grad is not None}
        return slices(present, self.attached.holding)

    @staticmethod
    def costs(layout: RankLayout) -> StepCosts:
        if layout.shares:
            return costs_of_shared(layout)
        is_cut = layout.plan.cuts_model  # else every rank has the whole gradient, and its norm
        extra = added_up(_held_meanwhile(layout), residual_memory(layout))
        memory = memory_of_parts(layout, _held_gradients(layout), extra)
        return StepCosts(layout.num_trained, memory, _sent(layout), agreement(layout, is_cut))

    @property
    def _adds(self) -> bool:
        """Whether each piece is added to the one before where all ranks read them."""
        return self.host is not None and not self.exact

    def _end_round(self, last: bool) -> None:
        """Put away what a round computed; the last one's gradients are sent from where they are."""
        if self._adds:
            if self.host is not None and self.buckets is not None and not last:
                self.buckets.add_next()
                self.host.linears.begin()
        elif self.gradient_sum is not None and not (last and self.buckets is not None):
            self.gradient_sum.push([p.grad for p in self.parameters])
            for p in self.parameters:
                p.grad = None

    def _agree(self, local: LocalStep) -> GlobalStep:
        if self.buckets is None:
            if not self._plain:
                self._take_own_sums()
            if self.mesh.num_ranks == 1:
                return self.rounds.agree_locally(local)
            return self.rounds.agree(local, [p.grad is not None for p in self.parameters])[0]
        self.buckets.send_rest()
        agreed, touched = self.rounds.agree(local, self.buckets.touched, self._finish_sums)
        if self.packing is not None:
            touched = self._with_late(touched)
        if self.host is None:
            self.buckets.assign_gradients(touched)
        else:
            self.host.agreed(touched)
        return agreed

    def _finish_sums(self) -> None:
        assert self.buckets is not None
        self.buckets.fold_rest()
        for reduction, bucket in zip(self.buckets.sent, self.buckets.buckets, strict=True):
            sum_ = reduction.finish()
            if sum_ is not bucket.rows[0]:
                bucket.rows[0].copy_(sum_)

    def _with_late(self, touched: list[bool]) -> list[bool]:
        """With those of which something came that was not sent before. All ranks find the same; of
        parameters that are cut over the tensor axis, each looks at its part."""
        assert self.buckets is not None
        found = touched[:]
        for bucket in self.buckets.buckets:
            for i, view in zip(bucket.indices, bucket.views[0], strict=True):
                found[i] = touched[i] or bool(view.any())
        if self.mesh.tensor.num_ranks > 1 and not all(touched):
            rows = self.mesh.tensor.all_gather_numbers(found)
            found = [any(own) for own in zip(*rows, strict=True)]
        return found

    def _step(self) -> None:
        optimizer, corrected = self.attached.optimizer, self._corrected
        with without_momentum(optimizer, corrected) if corrected else _NOTHING:
            self.attached.step()

    def _take_own_sums(self) -> None:
        """The sum over the pieces, all of which were this rank's."""
        if self.gradient_sum is not None:
            sum_ = self.gradient_sum
            values = total(sum_.rows, sum_.blocks, self.rounds.num_rounds)
            for p, gradient in zip(self.parameters, values, strict=True):
                p.grad = gradient

    def _gradients(self) -> Iterator[Tensor]:
        """In as few tensors as there are."""
        if self.buckets is None:
            return _present(self.parameters)
        return (bucket.rows[0] for bucket in self.buckets.buckets)

    def _share(self, apart: str) -> HostState | None:
        """What ranks of one host share; None if they cannot, which is said once."""
        data, held = self.mesh.data, self.attached
        if data.num_ranks == 1 or self.mesh.is_cut or not self.parameters:
            return None
        why = "" if data.shares_memory else "they are not of one host, or cannot share memory"
        why = apart or why or why_apart(held.model, held.optimizer)
        if why:
            if not data.rank:
                warn_once(f"Ranks hold no parameters and optimizer state together: {why}.")
            return None
        if self.bucket_bytes != BUCKET_BYTES and not data.rank:
            warn_once(
                "bucket has no effect: ranks of one host share parameters and send no gradients. "
                "With memory=apart they do."
            )
        counts = self.mesh.counts
        blocks = blocks_by_rank(self.rounds.num_rounds, data.num_ranks, counts=counts)
        if not self.exact:  # a rank's sum is one term
            blocks = blocks_by_rank(data.num_ranks, data.num_ranks)
        return HostState.make(data, held.model, held.optimizer, self.named, blocks)

    def _attach_to_host(self, host: HostState) -> None:
        """Gradients go to where all ranks read them, and nothing is sent."""
        made: list[GradientBucket] = []
        for number, buffer in enumerate(host.layout.buffers):
            rows = host.gradient_rows(number)
            made.append(PlacedBucket(buffer.indices, self.parameters, rows, buffer.starts))
        self.buckets = GradientBuckets(self.parameters, made, len(made[0].rows), self._start)
        own = host.own_segments()
        self._norm = SharedNorm(self.mesh.world, sum(num_blocks(s.length) for _, s in own))

    def _start(self, bucket: GradientBucket) -> Sum:
        if self.host is not None:
            return Reduction(bucket.rows[0], Pending())
        if self.packing is not None:
            assert self.buckets is not None
            number = len(self.buckets.sent)
            if number in self.packing.buckets:
                return self.packing.sum(number, bucket.rows[0])
        if self.exact or self.packing is not None:
            return self._tree.start(bucket.rows)
        return Reduction(bucket.rows[0], self.mesh.data.all_reduce(bucket.rows[0]))


def is_summed(parameter: nn.Parameter) -> bool:
    """Whether a gradient is ours to sum: FSDP2 sums those of the parameters it shards."""
    return parameter.requires_grad and not isinstance(parameter, DTensor)


def _coalesce(table: Tensor) -> None:
    """Add up what a piece leaves of each row, before pieces are added."""
    table.grad = coalesced(table.grad)


def _present(parameters: Sequence[nn.Parameter]) -> Iterator[Tensor]:
    return (p.grad for p in parameters if p.grad is not None)


def _sent(layout: RankLayout) -> list[Message]:
    if layout.num_replicas == 1:
        return []
    if layout.plan.packed_codec != "none":
        return packed_messages(layout)
    if layout.plan.sums == "ring":
        sizes = [sum(p.num_bytes for p in bucket) for bucket in layout.buckets]
        return [all_reduce_message("gradients", "data", sizes, layout)]
    rows = [(sum(p.num_elements for p in b), b[0].dtype.itemsize) for b in layout.buckets]
    return [tree_message("gradients", rows, layout.tree, layout)]


def _held_gradients(layout: RankLayout) -> Amount:
    """In buckets, which have a row for each subtree of this rank's rounds."""
    if layout.num_replicas == 1:
        return as_parameters(layout)
    rows = len(layout.tree[layout.place.data]) if sums_by_piece(layout.plan) else 1
    words = "buckets" + (f" x {rows} subtrees" if rows > 1 else "")
    return Amount(layout.gradient_bytes * rows, words)


def _held_meanwhile(layout: RankLayout) -> Amount:
    """Sums over rounds; messages in flight; without sums, a bucket's gradients before they are
    put into it."""
    num_sums = sums_in_step(layout, alone=layout.num_replicas == 1)
    sums = partial_sums(layout, num_sums)
    if layout.num_replicas == 1:
        return added_up(sums)
    scatters = sums_by_piece(layout.plan) and not any_order(layout.tree)
    rows = len(layout.tree[layout.place.data])
    window = min(WINDOW_BYTES, rows * layout.gradient_bytes) if scatters else 0
    in_flight = Amount(window, "what is under way" if window else "")
    if num_sums:
        return added_up(sums, in_flight)
    largest = max((sum(p.num_bytes for p in bucket) for bucket in layout.buckets), default=0)
    return added_up(sums, in_flight, Amount(largest, "the largest bucket's gradients"))
