"""The lookups of a step in tables whose rows are on servers, counted on the first batch.

The number of rows that a step touches depends on the samples: the figures are those of the first
batch, found by running its pieces; other batches differ.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from shoal.cost.first_step import run_first_step
from shoal.numerics.buffers import PieceBuffers
from shoal.numerics.reserved import ReservedParameter
from shoal.parallel.striping import tables_of
from shoal.sync.server.lookup_costs import TableLookups
from shoal.training.run import Run, make_batches


def count_lookups(run: Run, num_pieces: int, model: nn.Module) -> dict[str, TableLookups]:
    """Run the pieces of the first batch and record their lookups."""
    tables = tables_of(model)
    uses = {
        name: TableLookups(
            m.num_embeddings,
            m.embedding_dim * m.weight.itemsize,
            [],
            m.padding_idx,
            isinstance(m.weight, ReservedParameter),
        )
        for name, m in tables.items()
    }

    def note(name: str, module: nn.Module, arguments: Sequence[Any]) -> None:
        uses[name].by_piece[-1].append(arguments[0].unique())

    hooks = [m.register_forward_pre_hook(partial(note, name)) for name, m in tables.items()]
    batch = make_batches(run, num_pieces).at(0)
    buffers = PieceBuffers(model)
    for index in range(num_pieces if tables else 0):
        for use in uses.values():
            use.by_piece.append([])
        run_first_step(run, model, batch.piece(index))
        buffers.restore()
    for hook in hooks:
        hook.remove()
    return uses
