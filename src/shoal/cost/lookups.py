"""What a step looks up in tables whose rows are on servers, seen on the first batch.

How many rows a step touches is for the samples to say: the figures are those of the first batch,
found by running its pieces, and others differ by as much as batches do.
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
from shoal.numerics.reserved import Reserved
from shoal.parallel.striping import Striping, tables_of
from shoal.training.run import Run, call_model, make_batches

NUMBER = 8  # bytes, of a row's place


class Uses(NamedTuple):
    """Of one table: the rows that each lookup asks for, by piece."""

    num_rows: int
    row_bytes: int
    by_piece: list[list[Tensor]]
    padding: int | None  # a row that gets no gradient
    is_lazy: bool = False  # only touched rows take memory

    def touched(self, block: Block) -> int:
        """Rows in the sum of some pieces."""
        found = [ids for n in range(block.num_pieces) for ids in self.by_piece[block.first + n]]
        return len({*torch.cat(found).tolist()} - {self.padding}) if found else 0

    @property
    def rows(self) -> Tensor:
        """All that are looked up."""
        found = [ids for calls in self.by_piece for ids in calls]
        rows: Tensor = torch.cat([torch.empty(0, dtype=torch.int64), *found]).unique()
        return rows


def count_lookups(run: Run, num_pieces: int, model: nn.Module) -> dict[str, Uses]:
    """Run the pieces of the first batch and see what they look up."""
    tables = tables_of(model)
    uses = {
        name: Uses(
            m.num_embeddings,
            m.embedding_dim * m.weight.itemsize,
            [],
            m.padding_idx,
            isinstance(m.weight, Reserved),
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
    """Numbers of rows to look up, and the sums of touched rows.

    In lockstep rows are read where they stand, unless they are lazy.
    """
    uses = rank.facts.tables
    looked = [use for use in uses.values() if rank.plan.bound != 0 or use.is_lazy]
    calls = [ids for use in looked for index in rank.rounds for ids in use.by_piece[index]]
    asked = Message("numbers of rows", "servers", "look", len(calls), NUMBER * sum(map(len, calls)))
    pushed = sum(
        use.touched(block) * (use.row_bytes + NUMBER) for use in uses.values() for block in blocks
    )
    count = len(uses) * rank.plan.num_servers
    return [asked, Message("gradients of rows", "servers", "push", count, pushed)]


def sent_by_server(uses: Mapping[str, Uses], server: int, num_servers: int) -> Message:
    """The rows that all workers look up there."""
    count = num_bytes = 0
    for use in uses.values():
        striping = Striping(use.num_rows, num_servers)
        for ids in (ids for calls in use.by_piece for ids in calls):
            own = int((striping.servers_of(ids) == server).sum())
            count, num_bytes = count + bool(own), num_bytes + own * use.row_bytes
    return Message("rows", "workers", "look", count, num_bytes)


def rows_held(use: Uses, server: int, num_servers: int) -> int:
    """That take memory there; of a lazy table, after the first batch."""
    striping = Striping(use.num_rows, num_servers)
    if use.is_lazy:
        return int((striping.servers_of(use.rows) == server).sum())
    return sum(map(len, striping.stripes_of(server)))


def sum_bytes(use: Uses, server: int, num_servers: int) -> int:
    """Of a step's gradients of one server's rows, with the numbers of these."""
    rows = use.rows[use.rows != (-1 if use.padding is None else use.padding)]
    own = Striping(use.num_rows, num_servers).servers_of(rows) == server
    return int(own.sum()) * (use.row_bytes + NUMBER)
