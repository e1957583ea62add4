"""ZeRO 1 and 2: each rank keeps the optimizer's state of its shard, and steps on that alone.

Parameters live in flat buffers (`parallel/zero.py`). A bucket of gradients leaves as soon as it is
full; each rank receives its shard of it from all, adds them in the tree's order and forgets the
rest. The small message that tells losses is the vote: nobody steps before every rank holds its
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
from itertools import pairwise

import torch
from torch import Tensor, nn

from shoal.comm.buckets import BUCKET_BYTES, Bucket, Buckets, LoneBucket, deal
from shoal.comm.reduce import Scatter, TreeReduce
from shoal.comm.tree import Block, PieceSum
from shoal.mesh import Mesh
from shoal.numerics.norms import num_blocks, scale_all
from shoal.numerics.optimizers import Part, is_element_wise, stepper, swap_parameters
from shoal.parallel import zero
from shoal.parallel.layout import WHOLE, Holding, Slice, slices_of_run
from shoal.sync.norm import SharedNorm
from shoal.sync.rounds import Around, Rounds
from shoal.sync.state import HeldState, Run, State
from shoal.sync.strategy import Agreed, Tally


class Shelf:
    """Some parameters in one flat buffer, cut into a shard for each rank."""

    def __init__(self, indices: list[int], parameters: Sequence[nn.Parameter], num_ranks: int):
        self.indices = indices
        self.lengths = [parameters[i].numel() for i in indices]
        self.starts = zero.starts_of(self.lengths)
        first = parameters[indices[0]]
        self.flat = torch.zeros(self.starts[-1], dtype=first.dtype, device=first.device)
        for i, start in zip(indices, self.starts, strict=False):
            p = parameters[i]
            view = self.flat[start : start + p.numel()].view(p.shape)
            view.copy_(p.detach())
            p.data = view
        self.cuts = zero.shard_evenly(self.starts, self.lengths, num_ranks)

    def give_to(self, owner: int) -> None:
        """Make all of it one rank's."""
        num_ranks, end = len(self.cuts) - 1, self.cuts[-1]
        self.cuts = [0 if rank <= owner else end for rank in range(num_ranks + 1)]

    def segments(self, rank: int) -> list[zero.Segment]:
        begin, end = self.cuts[rank], self.cuts[rank + 1]
        return zero.segments(self.starts, self.lengths, self.indices, begin, end)

    def shards(self) -> list[Tensor]:
        return [self.flat[begin:end] for begin, end in pairwise(self.cuts)]


class Sharded:
    def __init__(self, num_pieces: int, scatter_each: bool, round_size: int = 1):
        self.num_pieces, self.round_size = num_pieces, round_size
        self.scatter_each = scatter_each  # after every round, not only after the last
        self.shelves: list[Shelf] = []
        self.shards: list[Tensor] = []  # of the summed gradient, by shelf
        self._num_scattered = 0
        self._touched: list[bool] = []  # by this rank's pieces

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        holding: Holding = WHOLE,
    ) -> None:
        self.model, self.optimizer, self.mesh, self.holding = model, optimizer, mesh, holding
        self.named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in self.named]
        self.rounds = Rounds(model, mesh, self.num_pieces, self.round_size)
        self.buffers = self.rounds.buffers
        if not self.shelves:  # else they stand since an earlier attach, in the same seat
            self._put_on_shelves()
            self.owned = [shelf.segments(mesh.data.rank) for shelf in self.shelves]
            self._swap_optimizer()
        each = [[Block(rank, 1)] for rank in range(mesh.data.num_ranks)]
        self.tree = (
            TreeReduce(mesh.data, each)
            if self.scatter_each
            else self.rounds.tree(self.rounds.num_rounds)
        )
        own = range(self._most_rounds()) if self.scatter_each else self.rounds.own
        self.sum = PieceSum(own)  # of shards if each round is scattered, of gradients otherwise
        self.buckets = self._make_buckets()
        counted = [s for s in self._all_owned() if holding.counts(self.named[s.parameter][0])]
        self._norm = SharedNorm(mesh.world, sum(num_blocks(s.stop - s.start) for s in counted))
        self._around, self._step = Around(self.rounds, self._end_round), stepper(optimizer)

    def detach(self) -> None:
        self.buffers.restore()
        self.buckets.drain()
        for hook in self.buckets.hooks:
            hook.remove()

    def microbatch(self, first: bool, last: bool) -> AbstractContextManager[object]:
        if first:
            self._forget()
        if last or self.scatter_each:
            self._begin_sending()
        self._around.last = last
        return self._around

    def exchange(self, tally: Tally, want_norm: bool) -> Agreed:
        if self.scatter_each:
            while self._num_scattered < self._most_rounds():  # others have a round more
                self._begin_sending()
                self._end_round(last=True)
            shards = self.sum.rows[0]
            for row in self.sum.rows[1:]:
                torch._foreach_add_(shards, row)  # type: ignore[arg-type]
        else:
            shards = self._scattered()
        self.shards = [shard for shard in shards if shard is not None]
        agreed, self.touched = self.rounds.agree(tally, self._touched)
        if not want_norm:
            return agreed
        counted = (
            self._gradient(k, s)
            for k, owned in enumerate(self.owned)
            for s in owned
            if self.holding.counts(self.named[s.parameter][0])
        )
        return agreed._replace(norm=self._norm.of(counted))

    def update(self, scale: float, check: bool = True) -> bool:
        finite = scale_all([s for s in self.shards if s.numel()], scale, check)
        if check and not self.rounds.all_finite(finite):
            self.buffers.restore()
            return False
        for k, owned in enumerate(self.owned):
            for segment in owned:
                stepped = self._stepped[segment]
                gradient = self._gradient(k, segment).view(stepped.shape)
                stepped.grad = gradient if self.touched[segment.parameter] else None
        self._step()
        arrivals = [self.mesh.data.gather_shards(shelf.shards()) for shelf in self.shelves]
        for arrival in arrivals:
            arrival.wait()
        self.buffers.commit()
        return True

    def gradients(self) -> dict[str, list[Slice]]:
        found: dict[str, list[Slice]] = {}
        for k, owned in enumerate(self.owned):
            for s in owned:
                if self.touched[s.parameter]:
                    name, p = self.named[s.parameter]
                    parts = slices_of_run(
                        name, p.shape, s.start, self._gradient(k, s), self.holding
                    )
                    found.setdefault(name, []).extend(parts)
        return found

    def state_dict(self) -> State:
        return self._state().state_dict()

    def load_state_dict(self, state: State) -> None:
        self._state().load_state_dict(state)
        self.buffers.hold()

    def _state(self) -> HeldState:
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        runs: dict[Tensor, Run] = {
            stepped: Run(self.named[s.parameter][0], self.named[s.parameter][1].shape, s.start)
            for s, stepped in self._stepped.items()
        }
        return HeldState(tensors, self.optimizer, runs, self.holding)

    def _end_round(self, last: bool) -> None:
        """Put away what a round computed."""
        if self.scatter_each:
            self.sum.push(list(self._scattered()))
            self._num_scattered += 1
        elif not last:
            self.sum.push([p.grad for p in self.parameters])
            for p in self.parameters:
                p.grad = None

    def _put_on_shelves(self) -> None:
        num_ranks, whole = self.mesh.data.num_ranks, not is_element_wise(self.optimizer)
        total = sum(p.nbytes for p in self.parameters)
        bucket_bytes = min(BUCKET_BYTES, max(1, total // (8 * num_ranks)) if whole else total + 1)
        dealt = deal(self.parameters, bucket_bytes)
        self.shelves = [Shelf(indices, self.parameters, num_ranks) for indices in dealt]
        if whole:
            owners = zero.shard_whole([shelf.starts[-1] for shelf in self.shelves], num_ranks)
            for shelf, owner in zip(self.shelves, owners, strict=True):
                shelf.give_to(owner)

    def _swap_optimizer(self) -> None:
        """Let the optimizer step on this rank's segments instead of the parameters."""
        self._stepped: dict[zero.Segment, nn.Parameter] = {}
        parts: dict[nn.Parameter, list[Part]] = {p: [] for p in self.parameters}
        for shelf, owned in zip(self.shelves, self.owned, strict=True):
            for s in owned:
                p = self.parameters[s.parameter]
                if s.stop - s.start == p.numel():
                    self._stepped[s], take = p, _all_of
                else:
                    run = shelf.flat[s.place : s.place + s.stop - s.start]
                    self._stepped[s], take = nn.Parameter(run), _Run(s.start, s.stop)
                parts[p].append(Part(self._stepped[s], take))
        swap_parameters(self.optimizer, parts.get)

    def _make_buckets(self) -> Buckets[Scatter]:
        rows = self.tree.num_rows
        buckets = [
            LoneBucket(shelf.indices, self.parameters, 1)
            if len(shelf.indices) == rows == 1 and shelf.starts[-1] == shelf.lengths[0]
            else Bucket(shelf.indices, self.parameters, rows, shelf.starts)
            for shelf in self.shelves
        ]
        return Buckets(self.parameters, buckets, rows, self._send)

    def _forget(self) -> None:
        for p in self.parameters:
            p.grad = None
        for stepped in self._stepped.values():
            stepped.grad = None
        self.shards = []
        self.buckets.begin()
        self.sum.begin()
        self.buffers.begin()
        self._num_scattered = 0
        self._touched = [False] * len(self.parameters)

    def _begin_sending(self) -> None:
        self.buckets.begin()
        self.buckets.arm(None if self.scatter_each else self.sum, early=self.round_size == 1)

    def _send(self, bucket: Bucket) -> Scatter:
        shelf = self.shelves[len(self.buckets.sent)]
        scatter = Scatter(self.tree, bucket.rows, shelf.cuts)
        bucket.close()  # the messages hold what they need
        return scatter

    def _scattered(self) -> list[Tensor | None]:
        """Send what is left and add up this rank's shard of every bucket."""
        self.buckets.send_rest()
        self.buckets.fold_rest()
        self._touched = [a or b for a, b in zip(self._touched, self.buckets.touched, strict=True)]
        return [scatter.sum for scatter in self.buckets.sent]

    def _gradient(self, k: int, segment: zero.Segment) -> Tensor:
        start = segment.place - self.shelves[k].cuts[self.mesh.data.rank]
        return self.shards[k][start : start + segment.stop - segment.start]

    def _all_owned(self) -> list[zero.Segment]:
        return [segment for owned in self.owned for segment in owned]

    def _most_rounds(self) -> int:
        return -(-self.rounds.num_rounds // self.mesh.data.num_ranks)


class _Run:
    """Takes a run of a tensor's elements."""

    def __init__(self, start: int, stop: int):
        self._start, self._stop = start, stop

    def __call__(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(-1)[self._start : self._stop]


def _all_of(tensor: Tensor) -> Tensor:
    return tensor
