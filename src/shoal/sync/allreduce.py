"""Data parallel: every rank holds the whole model, and gradients are summed on every step.

Gradients leave in buckets while backward runs (`comm/buckets.py`). With exact sums the pieces are
added in one tree (`comm/tree.py`), so that any number of ranks trains the same bits; otherwise in
whatever order is fastest. One process does the same without communication. When not to use it:
when the model, its gradients and its optimizer state do not fit one rank's memory; shard them
then.

Cost: two times the gradients' bytes per rank and step, and their copy in memory.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from shoal.comm.buckets import Buckets
from shoal.comm.collectives import Group, Pending
from shoal.comm.reduce import Reduction, TreeReduce
from shoal.comm.tree import Block, PieceSum, Values, blocks_of, total
from shoal.data.split import share
from shoal.mesh import Mesh
from shoal.numerics.buffers import PieceBuffers, means_of
from shoal.numerics.norms import gradient_norm, scale_all
from shoal.numerics.optimizers import stepper
from shoal.sync.state import Slice, load_replicated, replicated_state
from shoal.sync.strategy import Agreed, Tally

_NOTHING: AbstractContextManager[None] = nullcontext()


class AllReduce:
    def __init__(self, num_pieces: int, exact: bool = True):
        self.num_pieces = num_pieces
        self.exact = exact

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: Mesh) -> None:
        self.model, self.optimizer, self.group = model, optimizer, mesh.data
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.pieces = share(self.group.rank, self.group.num_ranks, self.num_pieces)
        self.buffers = PieceBuffers(model)
        self.buffer_sum = PieceSum(self.pieces)
        self.gradient_sum = PieceSum(self.pieces) if self.exact else None
        self.buckets: Buckets | None = None
        if self.group.num_ranks > 1:
            self.tree = TreeReduce(self.group, self._blocks_of_ranks())
            num_rows = self.tree.num_rows if self.exact else 1
            start = self.tree.start if self.exact else self._start_in_any_order
            self.buckets = Buckets(self.parameters, num_rows, start)
        self._around, self._step = _Piece(self), stepper(optimizer)
        # One process, one piece, no buffers: nothing to sum, put away or restore.
        self._plain = self.group.num_ranks == self.num_pieces == 1 and not len(self.buffers)

    def detach(self) -> None:
        self.buffers.restore()  # of a step given up, nothing stays
        if self.buckets is not None:
            self.buckets.drain()
            for hook in self.buckets.hooks:
                hook.remove()
            self.buckets = None

    def microbatch(self, first: bool, last: bool) -> AbstractContextManager[object]:
        if first:
            for p in self.parameters:
                p.grad = None
            if self._plain:
                return _NOTHING
            if self.gradient_sum is not None:
                self.gradient_sum.begin()
            self.buffer_sum.begin()
            self._num_changes: list[float] = [0] * len(self.buffers)
            if self.buckets is not None:
                self.buckets.begin()
        if last and self.buckets is not None:
            self.buckets.arm(self.gradient_sum)
        self._around.last = last
        return self._around

    def exchange(self, tally: Tally, want_norm: bool) -> Agreed:
        if self.buckets is None:
            agreed = self._agree_alone(tally)
        else:
            agreed = self._agree_with_others(tally, self.buckets)
        if not want_norm:
            return agreed
        return agreed._replace(norm=gradient_norm(self._gradients()))

    def update(self, scale: float, check: bool = True) -> bool:
        if (check or scale != 1.0) and not scale_all(self._held_gradients(), scale, check):
            self.buffers.restore()
            return False
        self._step()
        if len(self.buffers):
            self.buffers.commit(self._means)
        return True

    def state_dict(self) -> dict[str, Slice]:
        return replicated_state(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Slice]) -> None:
        load_replicated(self.model, self.optimizer, state)
        self.buffers.hold()

    def end_piece(self, last: bool) -> None:
        """Put away what a piece computed; the last one's gradients are sent from where they are."""
        if len(self.buffers):
            values = self.buffers.end_piece()
            for i, value in enumerate(values):
                self._num_changes[i] += value is not None
            self.buffer_sum.push(values)
        if self.gradient_sum is not None and not (last and self.buckets is not None):
            self.gradient_sum.push([p.grad for p in self.parameters])
            for p in self.parameters:
                p.grad = None

    def _agree_alone(self, tally: Tally) -> Agreed:
        sums, weights = tally.numbers()
        agreed = Agreed(
            sums, weights, sum(weights), None, [tally.busy_s], tally.stop, tally.is_mean
        )
        if self._plain:
            return agreed
        if self.gradient_sum is not None:
            sum_ = self.gradient_sum
            for p, gradient in zip(
                self.parameters, total(sum_.rows, sum_.blocks, self.num_pieces), strict=True
            ):
                p.grad = gradient
        if len(self.buffers):
            sums_of_buffers = total(self.buffer_sum.rows, self.buffer_sum.blocks, self.num_pieces)
            self._means = means_of(sums_of_buffers, self._num_changes)
        return agreed

    def _agree_with_others(self, tally: Tally, buckets: Buckets) -> Agreed:
        buckets.send_rest()
        tail = _Tail(self.num_pieces, self.group.num_ranks, len(self.parameters), len(self.buffers))
        tail.fill(self.pieces, self.group.rank, tally, buckets.touched, self._num_changes)
        arrival = tail.start(self.group, self.parameters[0].device)
        for reduction in buckets.reductions:
            reduction.fold()
        for reduction in buckets.reductions:
            reduction.finish()
        arrival.wait()
        agreed, touched, num_changes = tail.read()
        for bucket in buckets.buckets:
            for i, view in zip(bucket.indices, bucket.views[0], strict=True):
                # As in a plain loop, what no piece touched has no gradient.
                self.parameters[i].grad = view if touched[i] else None
        if len(self.buffers):
            self._means = self._mean_buffers(num_changes)
        return agreed

    def _mean_buffers(self, num_changes: list[float]) -> Values:
        """The means of the buffers that any piece changed. Every rank must reach this."""
        sums: Values = [None] * len(num_changes)
        which = [i for i, count in enumerate(num_changes) if count]
        if which:
            shapes, device = self.buffers.shapes(), self.parameters[0].device
            rows = [
                torch.cat([_flat(values[i], shapes[i], device) for i in which])
                for values in self.buffer_sum.rows
            ]
            reduction = self.tree.start(rows)
            reduction.fold()
            parts = reduction.finish().split([shapes[i].numel() for i in which])
            for i, part in zip(which, parts, strict=True):
                sums[i] = part.view(shapes[i])
        return means_of(sums, num_changes)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self.parameters if p.grad is not None]

    def _held_gradients(self) -> list[Tensor]:
        """The gradients, in as few tensors as there are."""
        if self.buckets is None:
            return self._gradients()
        return [bucket.rows[0] for bucket in self.buckets.buckets]

    def _blocks_of_ranks(self) -> list[list[Block]]:
        num_ranks = self.group.num_ranks
        return [blocks_of(share(r, num_ranks, self.num_pieces)) for r in range(num_ranks)]

    def _start_in_any_order(self, rows: Sequence[Tensor]) -> Reduction:
        return Reduction(rows[0], self.group.all_reduce(rows[0]))


def _flat(value: Tensor | None, shape: torch.Size, device: torch.device) -> Tensor:
    if value is None:
        return torch.zeros(shape.numel(), dtype=torch.float64, device=device)
    return value.reshape(-1)


class _Piece:
    """The context around a piece: buffers go back to the step's on entry."""

    def __init__(self, strategy: AllReduce):
        self._strategy = strategy
        self.last = False

    def __enter__(self) -> None:
        self._strategy.buffers.restore()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._strategy.end_piece(self.last)


class _Tail:
    """The small numbers of a step, in one message. Each entry has one contributor or is a count,
    so that the sum is exact in any order."""

    def __init__(self, num_pieces: int, num_ranks: int, num_parameters: int, num_buffers: int):
        self._lengths = [num_pieces, num_pieces, num_ranks, num_parameters, num_buffers, 2]
        self._flat = torch.zeros(sum(self._lengths), dtype=torch.float64)

    def fill(
        self,
        pieces: range,
        rank: int,
        tally: Tally,
        touched: list[bool],
        num_changes: list[float],
    ) -> None:
        sums, weights, busy, used, moved, flags = self._flat.split(self._lengths)
        own_sums, own_weights = tally.numbers()
        sums[pieces.start : pieces.stop] = torch.tensor(own_sums, dtype=torch.float64)
        weights[pieces.start : pieces.stop] = torch.tensor(own_weights, dtype=torch.float64)
        busy[rank] = tally.busy_s
        used.copy_(torch.tensor(touched))
        moved.copy_(torch.tensor(num_changes))
        flags.copy_(torch.tensor([tally.stop, tally.is_mean]))

    def start(self, group: Group, device: torch.device) -> Pending:
        self._flat = self._flat.to(device)
        return group.all_reduce(self._flat)

    def read(self) -> tuple[Agreed, list[bool], list[float]]:
        sums, weights, busy, used, moved, (stop, is_mean) = (
            part.tolist() for part in self._flat.split(self._lengths)
        )
        agreed = Agreed(sums, weights, sum(weights), None, busy, stop > 0, is_mean > 0)
        return agreed, [count > 0 for count in used], moved
