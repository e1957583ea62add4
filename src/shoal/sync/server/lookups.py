"""A worker's side of tables: rows are pulled when a forward looks them up, and pushed back as sums.

While a strategy is attached, a table's module pulls the rows that it is asked for, each once, into
a small leaf tensor and embeds from that; backward leaves a gradient of exactly these rows. A
piece's gradient is what torch's own sparse embedding would give, summed in the same order, and the
pieces of a worker are added in the order of the tree (`comm/tree.py`).

A worker holds no table: its module's weight has no rows (`empty_tables`). Cost: of each lookup the
numbers of its rows out and the rows in, of each step the touched rows out.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.comm.tree import Block, PieceSum
from shoal.comm.wire import tensor_of
from shoal.errors import RecipeError
from shoal.parallel.striping import Striping, tables_of
from shoal.sync.server.client import ServerClient
from shoal.sync.server.messages import LookUpRows, ServerWelcome
from shoal.sync.server.table_memory import FrameWriter, SharedTables


def empty_tables(model: nn.Module) -> None:
    """Let go of the tables' rows, before an optimizer is made: they are the servers'."""
    for module in tables_of(model).values():
        module.weight = nn.Parameter(module.weight.detach()[:0].clone())


class WorkerLookups:
    """Order of calls in a step: `begin`; after each piece `end_piece`; then `push` of each key.

    `first_key` is the number of the first key that is a table's, `pieces` are the worker's own.
    """

    def __init__(
        self,
        model: nn.Module,
        client: ServerClient,
        first_key: int,
        pieces: range,
        welcomes: Sequence[ServerWelcome],
    ):
        """`welcomes` are those of the servers, which may show their tables."""
        found = tables_of(model)
        self.names, self._modules = list(found), list(found.values())
        self._client, self._first_key = client, first_key
        self._striping = [Striping(m.num_embeddings, len(client)) for m in self._modules]
        self._shown, self._writer = SharedTables(self._modules, welcomes), FrameWriter()
        self._is_shared = [welcome.is_shared for welcome in welcomes]
        self._sum = PieceSum(pieces)
        self.batch = 0  # whose rows are looked up
        for table, module in enumerate(self._modules):
            is_bag = isinstance(module, nn.EmbeddingBag)
            look_up = self._look_up_bags if is_bag else self._look_up
            module.forward = partial(look_up, table)  # type: ignore[method-assign]
        self.begin()

    def close(self) -> None:
        """Give the modules their own forward back."""
        for module in self._modules:
            del module.forward

    @property
    def keys(self) -> range:
        return range(self._first_key, self._first_key + len(self.names) * len(self._client))

    def begin(self) -> None:
        self._sum.begin()
        self._writer.begin()
        self._parts: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.names]

    def end_piece(self) -> None:
        if self.names:
            self._sum.push([self._gradient(table) for table in range(len(self.names))])
            self._parts = [[] for _ in self.names]

    def push(self, key: int, batch: int, attempt: int, blocks: list[Block]) -> None:
        """Send a server what it holds of a table's sums."""
        table, server = divmod(key - self._first_key, len(self._client))
        values = [row[table] for row in self._sum.rows]
        frames = [frame for value in values for frame in self._part(table, server, value)]
        touched = [any(value is not None for value in values)]
        what = {"batch": batch, "attempt": attempt, "key": key, "blocks": blocks}
        lent = self._writer.write(frames) if self._is_shared[server] else None
        if lent is not None:  # as if they had been sent
            self._client.num_bytes += sum(frame.nbytes for frame in frames)
            frames = []
        self._client.queue_push(server, frames, touched=touched, is_shared=False, lent=lent, **what)

    def _look_up(self, table: int, ids: Tensor) -> Tensor:
        """The forward of an embedding."""
        inverse, rows, padding = self._rows_for(table, ids)
        frequency = self._modules[table].scale_grad_by_freq
        return F.embedding(inverse, rows, padding, scale_grad_by_freq=frequency, sparse=True)

    def _look_up_bags(
        self,
        table: int,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """The forward of a module that adds rows up, or takes their mean."""
        module = self._modules[table]
        assert isinstance(module, nn.EmbeddingBag)
        inverse, rows, padding = self._rows_for(table, input)
        return F.embedding_bag(
            inverse,
            rows,
            offsets,
            mode=module.mode,
            sparse=True,
            per_sample_weights=per_sample_weights,
            include_last_offset=module.include_last_offset,
            padding_idx=padding,
        )

    def _rows_for(self, table: int, ids: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """Rows that are pulled, where in them each of `ids` is, and which one is padding."""
        module = self._modules[table]
        self._refuse(table, ids)
        slab = self._shown.rows(table, 0, self.batch)
        if slab is not None and len(self._client) == 1 and ids.is_cpu:
            self._client.num_received += ids.numel() * slab.shape[1] * slab.itemsize
            return ids, self._leaf(table, slab), module.padding_idx
        unique, inverse = torch.unique(ids, return_inverse=True)
        rows = self._pull(table, unique.to(torch.int64).cpu()).to(ids.device)
        padding = None if module.padding_idx is None else _place(unique, module.padding_idx)
        return inverse, self._leaf(table, rows, unique), padding

    def _leaf(self, table: int, rows: Tensor, numbers: Tensor | None = None) -> Tensor:
        """What one lookup's backward ends at: some rows of a table, with these numbers, or all."""
        leaf = rows.detach()
        if torch.is_grad_enabled():
            leaf.requires_grad_()
            leaf.register_hook(partial(self._arrived, table, numbers))
        return leaf

    def _refuse(self, table: int, ids: Tensor) -> None:
        name, num_rows = self.names[table], self._striping[table].num_rows
        if ids.dtype not in (torch.int64, torch.int32):
            raise RecipeError(
                f"{name} was asked for rows by numbers of type {ids.dtype}. Rows are numbered by "
                "whole numbers: convert them with .long()."
            )
        least, most = map(int, ids.aminmax()) if ids.numel() else (0, 0)
        if least < 0 or most >= num_rows > 0:
            wrong = least if least < 0 else most
            raise RecipeError(
                f"{name} was asked for row {wrong}, and its rows are 0 to {num_rows - 1}. Look at "
                "the samples, or make the table larger."
            )

    def _pull(self, table: int, ids: Tensor) -> Tensor:
        striping, module = self._striping[table], self._modules[table]
        places = striping.places_of(ids)
        if striping.num_servers == 1 and len(ids):
            (rows,) = self._ask(table, [(0, places)])
            return rows
        rows = torch.empty(len(ids), module.embedding_dim, dtype=module.weight.dtype)
        holders = striping.servers_of(ids)
        masks = [(server, holders == server) for server in range(striping.num_servers)]
        wanted = [(server, mask) for server, mask in masks if bool(mask.any())]
        found = self._ask(table, [(server, places[mask]) for server, mask in wanted])
        for (_, mask), part in zip(wanted, found, strict=True):
            rows[mask] = part
        return rows

    def _ask(self, table: int, wanted: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """Rows of several servers, all asked before the first answer is waited for; those that
        are seen here are not asked for."""
        module, found = self._modules[table], []
        seen = [self._shown.rows(table, server, self.batch) for server, _ in wanted]
        asked = [
            self._client.ask(server, LookUpRows, [places], batch=self.batch, table=table)
            if slab is None
            else 0
            for slab, (server, places) in zip(seen, wanted, strict=True)
        ]
        for request, slab, (_, places) in zip(asked, seen, wanted, strict=True):
            if slab is not None:
                found.append(slab.index_select(0, places))
                self._client.num_received += found[-1].nbytes
                continue
            (frame,) = self._client.answer(request)[1]
            flat = tensor_of(frame, module.weight.dtype, len(places) * module.embedding_dim)
            found.append(flat.view(-1, module.embedding_dim))
        return found

    def _arrived(self, table: int, numbers: Tensor | None, gradient: Tensor) -> None:
        """As torch made it: how it adds up depends on how values stand in memory."""
        ids = gradient._indices()[0]
        if numbers is not None:
            ids = numbers[ids].to(torch.int64).cpu()
        self._parts[table].append((ids, gradient._values().cpu()))

    def _gradient(self, table: int) -> Tensor | None:
        """Of a piece, as torch adds up what several lookups leave."""
        total: Tensor | None = None
        for ids, rows in self._parts[table]:
            shape = self._striping[table].num_rows, rows.shape[1]
            part = torch.sparse_coo_tensor(ids[None], rows, shape, check_invariants=False)
            total = part if total is None else part + total  # in the order of torch's engine
        return None if total is None else total.coalesce()

    def _part(self, table: int, server: int, value: Tensor | None) -> tuple[Tensor, Tensor]:
        """Of a sum, what one server holds: the places of its rows there, and the rows."""
        striping, module = self._striping[table], self._modules[table]
        if value is None:
            rows = torch.empty(0, module.embedding_dim, dtype=module.weight.dtype)
            return torch.empty(0, dtype=torch.int64), rows
        ids, rows = value._indices()[0], value._values()
        if striping.num_servers > 1:
            own = striping.servers_of(ids) == server
            ids, rows = ids[own], rows[own]
        return striping.places_of(ids).contiguous(), rows.contiguous()


def _place(unique: Tensor, number: int) -> int | None:
    """Where a row stands among those that were asked for."""
    at = int(torch.searchsorted(unique, number))
    return at if at < len(unique) and int(unique[at]) == number else None
