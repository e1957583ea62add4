"""The lookups of a step in tables whose rows are on servers, counted on the first batch.

The number of rows that a step touches depends on the samples: the figures are those of the first
batch, found by running its pieces; other batches differ.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.comm.tree import Block
from shoal.cost.rank import Rank
from shoal.cost.traffic import Message
from shoal.numerics.buffers import PieceBuffers
from shoal.numerics.reserved import ReservedParameter
from shoal.parallel.striping import Striping, tables_of
from shoal.training.run import Run, call_model, make_batches

NUMBER = 8  # bytes of a row's index


class TableLookups(NamedTuple):
    """The rows that each lookup in one table asks for, by piece."""

    num_rows: int
    row_bytes: int
    by_piece: list[list[Tensor]]
    padding: int | None  # a row that gets no gradient
    is_lazy: bool = False  # only touched rows take memory

    def touched(self, block: Block) -> int:
        """The number of rows in the sum of some pieces."""
        found = [ids for n in range(block.num_pieces) for ids in self.by_piece[block.first + n]]
        return len({*torch.cat(found).tolist()} - {self.padding}) if found else 0

    @property
    def rows(self) -> Tensor:
        """All rows that are looked up."""
        found = [ids for calls in self.by_piece for ids in calls]
        rows: Tensor = torch.cat([torch.empty(0, dtype=torch.int64), *found]).unique()
        return rows


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
        with torch.no_grad():
            call_model(model, batch.piece(index).inputs)
        buffers.restore()
    for hook in hooks:
        hook.remove()
    return uses


def sent_by_worker(rank: Rank, blocks: Sequence[Block]) -> list[Message]:
    """The row indices that a worker sends, and the gradients of the touched rows.

    In lockstep rows are read in shared memory, unless they are lazy.
    """
    uses = rank.facts.tables
    looked = [use for use in uses.values() if rank.plan.staleness_bound != 0 or use.is_lazy]
    calls = [ids for use in looked for index in rank.rounds for ids in use.by_piece[index]]
    asked = Message("numbers of rows", "servers", "look", len(calls), NUMBER * sum(map(len, calls)))
    pushed = sum(
        use.touched(block) * (use.row_bytes + NUMBER) for use in uses.values() for block in blocks
    )
    count = len(uses) * rank.plan.num_servers
    return [asked, Message("gradients of rows", "servers", "push", count, pushed)]


def sent_by_server(uses: Mapping[str, TableLookups], server: int, num_servers: int) -> Message:
    """The rows that all workers look up on a server."""
    count = num_bytes = 0
    for use in uses.values():
        striping = Striping(use.num_rows, num_servers)
        for ids in (ids for calls in use.by_piece for ids in calls):
            own = int((striping.servers_of(ids) == server).sum())
            count, num_bytes = count + bool(own), num_bytes + own * use.row_bytes
    return Message("rows", "workers", "look", count, num_bytes)


def rows_held(use: TableLookups, server: int, num_servers: int) -> int:
    """The rows that take memory on a server; of a lazy table, after the first batch."""
    striping = Striping(use.num_rows, num_servers)
    if use.is_lazy:
        return int((striping.servers_of(use.rows) == server).sum())
    return sum(map(len, striping.stripes_of(server)))


def sum_bytes(use: TableLookups, server: int, num_servers: int) -> int:
    """The bytes of a step's gradients of one server's rows, with the row indices."""
    rows = use.rows[use.rows != (-1 if use.padding is None else use.padding)]
    own = Striping(use.num_rows, num_servers).servers_of(rows) == server
    return int(own.sum()) * (use.row_bytes + NUMBER)
