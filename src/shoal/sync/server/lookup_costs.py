"""What lookups in tables cost whose rows are on servers: messages, bytes, rows that take memory.

The number of rows that a step touches depends on the samples, so the figures are those of one
batch, whose lookups were recorded (`cost/lookups.py`); other batches differ.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.tree import Block
from shoal.parallel.striping import Striping
from shoal.sync.costs import Message
from shoal.sync.rank_layout import RankLayout

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


def sent_by_worker(layout: RankLayout, blocks: Sequence[Block]) -> list[Message]:
    """The row indices that a worker sends, and the gradients of the touched rows.

    In lockstep rows are read in shared memory, unless they are lazy.
    """
    uses = layout.facts.tables
    looked = [use for use in uses.values() if layout.plan.staleness_bound != 0 or use.is_lazy]
    calls = [ids for use in looked for index in layout.rounds for ids in use.by_piece[index]]
    asked = Message("numbers of rows", "servers", "look", len(calls), NUMBER * sum(map(len, calls)))
    pushed = sum(
        use.touched(block) * (use.row_bytes + NUMBER) for use in uses.values() for block in blocks
    )
    count = len(uses) * layout.plan.num_servers
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
