"""A rank's share of every step, and what is agreed on beside gradients.

A global batch is cut into pieces; `round_size` of them pass through a pipeline together and count
as one term of the gradient's sum, and without a pipeline a round is a piece. Each replica takes a
run of neighbouring rounds. Every strategy holds one of these.
"""

from collections.abc import Callable

import torch
from torch import nn

from shoal.comm.reduce import TreeReduce
from shoal.comm.tree import blocks_of
from shoal.data.split import share
from shoal.mesh import Mesh
from shoal.sync.buffers import BufferMeans
from shoal.sync.strategy import Agreed, Tally
from shoal.sync.tail import Tail


class Rounds:
    def __init__(self, model: nn.Module, mesh: Mesh, num_pieces: int, round_size: int):
        self.mesh, self.num_pieces, self.size = mesh, num_pieces, round_size
        self.num_rounds = num_pieces // round_size
        self.device = torch.device(mesh.device)
        self.own = share(mesh.data.rank, mesh.data.num_ranks, self.num_rounds)
        self.pieces = range(self.own.start * round_size, self.own.stop * round_size)
        tree = self.tree(num_pieces) if mesh.data.num_ranks > 1 else None
        self.buffers = BufferMeans(model, self.pieces, num_pieces, tree)

    def tree(self, num_terms: int) -> TreeReduce:
        """The sum over this many terms, shared out to the replicas as the rounds are."""
        num_ranks, size = self.mesh.data.num_ranks, num_terms // self.num_rounds
        shares = [share(rank, num_ranks, self.num_rounds) for rank in range(num_ranks)]
        return TreeReduce(
            self.mesh.data, [blocks_of(range(s.start * size, s.stop * size)) for s in shares]
        )

    def agree(
        self,
        tally: Tally,
        touched: list[bool],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[Agreed, list[bool]]:
        """Losses, requests and buffers of all, and the parameters that any piece touched.

        `meanwhile` is done while the message is under way. Every rank must reach this.
        """
        tail = Tail(self.mesh, self.num_pieces, len(touched), len(self.buffers))
        tail.fill(self.pieces, tally, touched, self.buffers.num_changes)
        arrival = tail.start(self.device)
        meanwhile()
        arrival.wait()
        agreed, touched, num_changes = tail.read()
        self.buffers.agree(num_changes, self.device)
        return agreed, touched

    def agree_alone(self, tally: Tally) -> Agreed:
        """The same in a world of one."""
        sums, weights = tally.numbers()
        self.buffers.agree(self.buffers.num_changes, self.device)
        return Agreed(sums, weights, sum(weights), None, [tally.busy_s], tally.stop, tally.is_mean)

    def all_finite(self, finite: bool) -> bool:
        """Whether it is so on every rank. Every rank must reach this."""
        return not any(row[0] for row in self.mesh.world.gather_numbers([not finite]))


class Around:
    """The context around a round: a piece, or those of a pipeline, which minds its own buffers."""

    def __init__(self, rounds: Rounds, end: Callable[[bool], None]):
        self._buffers, self._is_piece, self._end = rounds.buffers, rounds.size == 1, end
        self.last = False

    def __enter__(self) -> None:
        self._buffers.restore()

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            if self._is_piece:
                self._buffers.leave()
            self._end(self.last)
