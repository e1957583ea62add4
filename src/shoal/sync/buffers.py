"""Buffers agreed on: the mean over all pieces of what each made of them.

Every piece starts from the step's buffers (`numerics/buffers.py`); what it changed is summed over
this rank's pieces and then over the replicas in the tree's order, so running statistics have the
same bits at any number of ranks. In a pipeline a rank may run several stages, each of which
changes buffers of its own; they are kept apart, since their pieces come at different times.

Cost: the changed buffers' bytes in double precision, per step; nothing for constants.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from shoal.comm.reduce import TreeReduce
from shoal.comm.tree import PieceSum, Values, total
from shoal.numerics.buffers import PieceBuffers, means_of


class BufferMeans:
    """Order of calls: `begin`; `enter`, forward, `leave` for each piece; `agree`; `commit`."""

    def __init__(self, model: nn.Module, pieces: range, num_pieces: int, tree: TreeReduce | None):
        self._held = PieceBuffers(model)
        self._pieces, self._num_pieces, self._tree = pieces, num_pieces, tree
        self.begin()

    def __len__(self) -> int:
        return len(self._held)

    def begin(self) -> None:
        """Forget the step before."""
        self._sums: dict[int, PieceSum] = {}
        self._num_changes: dict[int, list[float]] = {}  # by stage

    @property
    def num_changes(self) -> list[float]:
        """Of each buffer, how many pieces changed it. Stages that do so do it alike, in code that
        each of them runs, and a piece counts once."""
        counts = self._num_changes.values()
        return [max(of_stages) for of_stages in zip(*counts)] if counts else [0] * len(self._held)

    def enter(self) -> None:
        """Let a piece start from the step's buffers."""
        self._held.restore()

    def leave(self, stage: int = 0) -> None:
        """Put away what a piece's forward made of the buffers."""
        if not len(self._held):
            return
        values = self._held.end_piece()
        if stage not in self._sums:
            self._sums[stage] = PieceSum(self._pieces)
            self._num_changes[stage] = [0] * len(values)
        for i, value in enumerate(values):
            self._num_changes[stage][i] += value is not None
        self._sums[stage].push(values)

    def agree(self, num_changes: list[float], device: torch.device) -> None:
        """Take the means, given how many pieces of all ranks changed each buffer.

        Every rank of a data line must reach this.
        """
        if not len(self._held):
            return
        rows = [_merged(rows) for rows in zip(*(s.rows for s in self._sums.values()), strict=True)]
        if self._tree is None:
            blocks = PieceSum(self._pieces).blocks
            sums = total(rows, blocks, self._num_pieces)
        else:
            sums = self._reduce(self._tree, rows, num_changes, device)
        self._means = means_of(sums, num_changes)

    def values(self, at_rest: bool) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """The step's value of each buffer, by module and name (`PieceBuffers.values`)."""
        for (module, name), value in zip(self._held.places, self._held.values(at_rest)):
            yield module, name, value

    def restore(self) -> None:
        """Give the step up: its buffers are as they were before it."""
        self._held.restore()

    def hold(self) -> None:
        """Take the current values for the step's: a load or an average has set them."""
        self._held.hold()

    def commit(self) -> None:
        if len(self._held):
            self._held.commit(self._means)

    def _reduce(
        self, tree: TreeReduce, rows: list[Values], num_changes: list[float], device: torch.device
    ) -> Values:
        sums: Values = [None] * len(num_changes)
        which = [i for i, count in enumerate(num_changes) if count]
        if which:
            shapes = self._held.shapes()
            flat = [
                torch.cat([_flat(values[i], shapes[i], device) for i in which]) for values in rows
            ]
            reduction = tree.start(flat)
            reduction.fold()
            parts = reduction.finish().split([shapes[i].numel() for i in which])
            for i, part in zip(which, parts, strict=True):
                sums[i] = part.view(shapes[i])
        return sums


def _merged(rows: tuple[Values, ...]) -> Values:
    """One row from those of several stages, all of which that change a buffer do it alike."""
    return [next((v for v in values if v is not None), None) for values in zip(*rows, strict=True)]


def _flat(value: Tensor | None, shape: torch.Size, device: torch.device) -> Tensor:
    if value is None:
        return torch.zeros(shape.numel(), dtype=torch.float64, device=device)
    return value.reshape(-1)
