"""The small numbers of a step, agreed on by all ranks in one message.

Losses and weights by piece, seconds and marks by rank, samples, requests to stop; and, among the
ranks that hold the same part of the model, which parameters were touched and which buffers changed.
Each entry has one contributor or is a count, so that the sum is exact in any order. In a mesh whose
replicas take several ranks these are two messages, since the second half concerns one line of ranks
only.
"""

import torch

from shoal.comm.collectives import Pending
from shoal.data.ledger import add_marks
from shoal.mesh import Asked, Mesh
from shoal.sync.strategy import Agreed, Tally


def tail_lengths(
    num_pieces: int, num_ranks: int, num_parameters: int, num_buffers: int
) -> tuple[list[int], list[int]]:
    """How many numbers of each kind there are: of all ranks, and of one line of them. Pure."""
    of_all = [num_pieces, num_pieces, num_ranks, num_ranks, 4]
    return of_all, [num_parameters, num_buffers]


class Tail:
    def __init__(self, mesh: Mesh, num_pieces: int, num_parameters: int, num_buffers: int):
        self._mesh = mesh
        lengths = tail_lengths(num_pieces, mesh.num_ranks, num_parameters, num_buffers)
        self._of_all, self._of_part = lengths
        self._flat = torch.zeros(sum(self._of_all) + sum(self._of_part), dtype=torch.float64)

    def fill(
        self, pieces: range, tally: Tally, touched: list[bool], num_changes: list[float]
    ) -> None:
        parts = self._flat.split(self._of_all + self._of_part)
        sums, weights, busy, marks, flags, used, moved = parts
        if tally.losses and self._mesh.tensor.rank == 0:  # one of those who know them
            own_sums, own_weights = tally.numbers()
            sums[pieces.start : pieces.stop] = torch.tensor(own_sums, dtype=torch.float64)
            weights[pieces.start : pieces.stop] = torch.tensor(own_weights, dtype=torch.float64)
            marks[self._mesh.rank] = tally.mark
            flags[3] = tally.num_samples
        busy[self._mesh.rank] = tally.busy_s
        flags[:3] = torch.tensor([*tally.asked, tally.is_mean])
        used.copy_(torch.tensor(touched))
        moved.copy_(torch.tensor(num_changes))

    def start(self, device: torch.device) -> Pending:
        self._flat = self._flat.to(device)
        if not self._mesh.is_cut:
            return self._mesh.data.all_reduce(self._flat)
        of_all, of_part = self._flat.split([sum(self._of_all), sum(self._of_part)])
        pending = self._mesh.world.all_reduce(of_all)
        return pending + self._mesh.data.all_reduce(of_part) if of_part.numel() else pending

    def read(self) -> tuple[Agreed, list[bool], list[float]]:
        """What all know now; the touched parameters, and the pieces that changed each buffer."""
        sums, weights, busy, marks, (stop, meet, is_mean, count), used, moved = (
            part.tolist() for part in self._flat.split(self._of_all + self._of_part)
        )
        flags = Asked(stop > 0, meet > 0), is_mean > 0
        known = add_marks(marks), int(count)
        agreed = Agreed(sums, weights, sum(weights), None, busy, *flags, *known)
        return agreed, [count > 0 for count in used], moved
