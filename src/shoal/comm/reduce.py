"""Sums over ranks whose bits do not depend on how many ranks there are.

Each rank has one row per aligned block of its pieces (`tree.py`). With two blocks in all, any
all-reduce adds the same two numbers; with one on each rank, one that adds by a tree over the ranks
(in memory, or host by host) adds as it should. Otherwise every rank gets its shard of every row by
an all-to-all, folds them in the tree's order and sends the result to all: the bytes of a ring
all-reduce when each rank has one row. Small rows, whose cost is latency, go whole to all ranks, and
every rank folds them. Not for sums whose order is free: that is `Group.all_reduce`.

Cost per rank and step: (rows + 1)(n-1)/n times the gradient's bytes; rows (n-1) times, if small.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from shoal.comm.buffer_pool import BufferPool
from shoal.comm.collectives import Group, Pending, fits_direct_exchange
from shoal.comm.tree import Block, fold


class TreeReduce:
    """Sums in the tree's order over the blocks of all ranks. `blocks` is given by rank."""

    def __init__(self, group: Group, blocks: Sequence[Sequence[Block]]):
        self.group = group
        self.blocks = blocks
        self.num_rows = len(blocks[group.rank])
        self.num_pieces = sum(block.num_pieces for row in blocks for block in row)
        of_one = all(len(row) == 1 for row in blocks)
        size = blocks[0][0].num_pieces if of_one else 0
        in_line = of_one and all(row[0].first == r * size for r, row in enumerate(blocks))
        self.by_transport = in_line and group.adds_by_tree
        self.any_order = self.by_transport or (of_one and len(blocks) <= 2)
        self.buffers = BufferPool()  # for received rows

    def start(self, rows: Sequence[Tensor]) -> "Reduction":
        """Begin to sum flat rows of equal length; the result takes the place of the first row."""
        assert len(rows) == self.num_rows
        if self.any_order:
            return Reduction(rows[0], self.group.all_reduce(rows[0]))
        kind = WholeReduction if self.at_once(rows[0].nbytes) else ShardedReduction
        return kind(self, rows)

    def at_once(self, num_bytes: int) -> bool:
        """Whether rows of this size go whole to all. Pure, and the same on every rank."""
        most = max(len(blocks) for blocks in self.blocks)
        return fits_direct_exchange(most * num_bytes, len(self.blocks))


class Reduction:
    """A pending sum. `fold` may start more messages; `finish` returns the sum."""

    def __init__(self, result: Tensor, pending: Pending):
        self.result = result
        self.pending = pending

    def fold(self) -> None:
        """Do what follows the first message. Every rank calls it, in the order of the starts."""

    def finish(self) -> Tensor:
        self.pending.wait()
        return self.result

    def drain(self, deadline: float) -> None:
        self.pending.drain(deadline)


class ReduceScatter:
    """Every rank gets its shard of all rows, and adds them up in the tree's order in `sum`.

    `cuts` are where the shards begin, and the end. Held until `fold`: as many elements as a row has
    for each row that a rank brings.
    """

    def __init__(self, tree: TreeReduce, rows: Sequence[Tensor], cuts: Sequence[int], sum_: Tensor):
        group = tree.group
        lengths = [stop - start for start, stop in pairwise(cuts)]
        own, num_ranks = lengths[group.rank], group.num_ranks
        self.tree, self.sum = tree, sum_
        self.received: dict[Block, Tensor] = {}
        self.arrivals: list[Pending] = []
        self._lent: list[Tensor] = []
        if tree.by_transport:
            self.arrivals = [group.reduce_scatter(sum_, rows[0].split(lengths))]
            return
        for k in range(max(len(blocks) for blocks in tree.blocks)):
            senders = [r for r in range(num_ranks) if k < len(tree.blocks[r])]
            out = tree.buffers.take(own * len(senders), rows[0])
            out_lengths = [own if r in senders else 0 for r in range(num_ranks)]
            sends = group.rank in senders
            self.arrivals.append(
                group.all_to_all(
                    out,
                    rows[k] if sends else rows[0][:0],
                    out_lengths,
                    lengths if sends else [0] * num_ranks,
                )
            )
            self._lent.append(out)
            for sender, part in zip(senders, out.split(own) if own else (), strict=False):
                self.received[tree.blocks[sender][k]] = part

    def fold(self) -> None:
        """Add up this rank's shard, and let go of what arrived."""
        for arrival in self.arrivals:
            arrival.wait()
        if self.received:
            add = partial(torch.add, out=self.sum) if len(self.received) == 2 else Tensor.add_
            root = fold(self.received, self.tree.num_pieces, add)
            if root is not self.sum:
                self.sum.copy_(root)
        for out in self._lent:
            self.tree.buffers.give(out)
        self.received, self.arrivals, self._lent = {}, [], []

    def drain(self, deadline: float) -> None:
        for arrival in self.arrivals:
            arrival.drain(deadline)


class WholeReduction(Reduction):
    """All rows go to all ranks, and each folds them: the latency of one message."""

    def __init__(self, tree: TreeReduce, rows: Sequence[Tensor]):
        length, num_ranks = rows[0].numel(), tree.group.num_ranks
        lengths = [len(blocks) * length for blocks in tree.blocks]
        out = rows[0].new_empty(sum(lengths))
        sent = torch.cat(list(rows)).repeat(num_ranks)
        own = [lengths[tree.group.rank]] * num_ranks
        super().__init__(rows[0], tree.group.all_to_all(out, sent, lengths, own))
        blocks = [block for of_rank in tree.blocks for block in of_rank]
        self.received = dict(zip(blocks, out.view(len(blocks), length), strict=True))
        self.num_pieces = tree.num_pieces

    def finish(self) -> Tensor:
        self.pending.wait()
        return self.result.copy_(fold(self.received, self.num_pieces, Tensor.add_))


class ShardedReduction(Reduction):
    """Shards of all rows to their ranks, folded there, and the sums back to all."""

    def __init__(self, tree: TreeReduce, rows: Sequence[Tensor]):
        super().__init__(rows[0], Pending())
        length, rank, num_ranks = rows[0].numel(), tree.group.rank, tree.group.num_ranks
        cuts = [length * r // num_ranks for r in range(num_ranks + 1)]
        self.shards = [self.result[start:stop] for start, stop in pairwise(cuts)]
        self.scatter = ReduceScatter(tree, rows, cuts, self.shards[rank])

    def fold(self) -> None:
        self.scatter.fold()
        self.pending = self.scatter.tree.group.all_gather_shards(self.shards)

    def drain(self, deadline: float) -> None:
        self.scatter.drain(deadline)
        self.pending.drain(deadline)
