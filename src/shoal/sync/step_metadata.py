"""The small numbers of a step, which all ranks agree on in one message.

Losses and weights by piece; seconds, marks and digests by rank; samples; requests to stop; and,
among the ranks that hold the same part of the model, which parameters got a gradient and which
buffers changed. Each entry has one contributor or is a count, so the sum is exact in any order. A
mesh whose replicas take several ranks needs two messages, since the second half concerns one data
line only. Named parts of losses follow in a message of their own, if there are any
(`named_parts.py`).
"""

from functools import partial
from itertools import chain, islice

import torch
from torch import Tensor

from shoal.comm.collectives import Pending
from shoal.comm.mesh import Mesh, RankRequests
from shoal.data.ledger import add_marks
from shoal.sync.named_parts import gather_parts
from shoal.sync.strategy import GlobalStep, LocalStep


def metadata_lengths(
    num_pieces: int, num_ranks: int, num_parameters: int, num_buffers: int
) -> tuple[list[int], list[int]]:
    """How many numbers of each kind there are: of all ranks, and of one line of them. Pure."""
    of_all = [num_pieces, num_pieces, num_ranks, num_ranks, num_ranks, num_ranks, 4]
    return of_all, [num_parameters, num_buffers]


class StepMetadata:
    def __init__(self, mesh: Mesh, num_pieces: int, num_parameters: int, num_buffers: int):
        self._mesh, self._num_pieces = mesh, num_pieces
        lengths = metadata_lengths(num_pieces, mesh.num_ranks, num_parameters, num_buffers)
        self._of_all, self._of_part = lengths

    def fill(
        self, pieces: range, local: LocalStep, touched: list[bool], num_changes: list[float]
    ) -> None:
        parts = [[0.0] * length for length in self._of_all]
        sums, weights, busy, marks, digests, lengths, flags = parts
        self._parts = b""
        if local.losses and self._mesh.tensor.rank == 0:  # one of those who know them
            own = slice(pieces.start, pieces.stop)
            sums[own], weights[own] = local.sums_and_weights()
            marks[self._mesh.rank] = local.mark
            flags[3] = local.num_samples
            self._parts = local.packed_parts(pieces.start)
            lengths[self._mesh.rank] = len(self._parts)
        busy[self._mesh.rank], digests[self._mesh.rank] = local.busy_s, local.digest
        flags[:3] = *local.asked, local.is_mean
        self._numbers = [*chain(*parts), *touched, *num_changes]

    def start(self, device: torch.device) -> Pending:
        if self._mesh.data.shares_memory and not self._mesh.is_cut:
            self._numbers = self._mesh.data.sum_numbers(self._numbers)
            return Pending()
        flat = torch.tensor(self._numbers, dtype=torch.float64, device=device)
        pending = self._reduce(flat)
        return pending + Pending(then=[partial(self._take, flat)])

    def _reduce(self, flat: Tensor) -> Pending:
        if not self._mesh.is_cut:
            return self._mesh.data.all_reduce(flat)
        of_all, of_part = flat.split([sum(self._of_all), sum(self._of_part)])
        pending = self._mesh.world.all_reduce(of_all)
        return pending + self._mesh.data.all_reduce(of_part) if of_part.numel() else pending

    def _take(self, flat: Tensor) -> None:
        self._numbers = flat.tolist()

    def read(self) -> tuple[GlobalStep, list[bool], list[float]]:
        """What all know now; the touched parameters, and the pieces that changed each buffer.
        Every rank must call it."""
        numbers = iter(self._numbers)
        sums, weights, busy, marks, digests, lengths, flags, used, moved = (
            list(islice(numbers, length)) for length in self._of_all + self._of_part
        )
        stop, meet, is_mean, count = flags
        asked = RankRequests(stop > 0, meet > 0)
        known = add_marks(marks), int(count)
        agreed = GlobalStep(
            sums, weights, sum(weights), None, busy, asked, is_mean > 0, *known, digests
        )
        if any(lengths):
            told = [*map(int, lengths)]
            agreed = agreed._replace(parts=gather_parts(self._mesh.world, told, self._parts))
        return agreed, [count > 0 for count in used], moved
