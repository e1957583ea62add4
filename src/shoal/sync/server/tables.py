"""A server's rows of the tables (`parallel/striping.py`): looked up, and stepped on where touched.

The rows of a table that a server holds stand in one tensor, which takes the place of the module's
weight before the recipe makes its optimizer; so the optimizer is torch's own, stepping on a sparse
gradient, and its state is of these rows alone. What a step changes is remembered until the next:
in lockstep a batch that is computed again after a death must see the rows that it saw first, also
on a server that has made the step already.

Cost: of a lookup or a push the rows that it names; of a step twice those that all named.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import SupportsInt

import torch
from torch import Tensor, nn

from shoal.comm.wire import BadFrame, tensor_of
from shoal.numerics.reserved import ReservedParameter, reserved_zeros
from shoal.parallel.layout import Slice, whole_slice
from shoal.parallel.striping import Stripes, Striping, sparse_rows, tables_of

_BEFORE = "before."


class ServerTables:
    """Made before the optimizer is, since it puts other weights into the model."""

    def __init__(self, model: nn.Module, number: int, num_servers: int):
        self.slabs: list[nn.Parameter] = []
        self.runs: dict[Tensor, Stripes] = {}
        for name, module in tables_of(model).items():
            stripes = Striping(module.num_embeddings, num_servers).stripes_of(number)
            rows, is_lazy = module.weight.detach(), isinstance(module.weight, ReservedParameter)
            if is_lazy:
                rows = reserved_zeros((sum(map(len, stripes)), rows.shape[1]), rows.dtype)
            elif len(rows) < module.num_embeddings:  # of another number of servers: new ones come
                rows = rows.new_zeros(sum(map(len, stripes)), rows.shape[1])
            elif num_servers > 1:
                rows = torch.cat([rows[:0], *(rows[s.start : s.stop] for s in stripes)])
            slab = ReservedParameter(rows) if is_lazy else nn.Parameter(rows)
            module.weight = slab
            self.slabs.append(slab)
            self.runs[slab] = Stripes(name, module.num_embeddings, stripes)
        self._number, self._num_servers = number, num_servers
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # by table: rows that a step changed
        self.keys: list[int] = []

    def number_from(self, first: int) -> None:
        """Number the parts of tables that servers hold, after the keys of everything else."""
        self.keys = [key_of(first, t, self._number, self._num_servers) for t in self._tables]

    @property
    def _tables(self) -> range:
        return range(len(self.slabs))

    @property
    def num_bytes(self) -> int:
        return sum(slab.nbytes + 8 * len(slab) for slab in self.slabs)

    @property
    def num_bytes_of_all(self) -> int:
        """The same for all servers together, of which one may hold no row."""
        widths = [slab.shape[1] * slab.itemsize for slab in self.slabs]
        return sum((8 + w) * run.num_rows for w, run in zip(widths, self.runs.values()))

    @torch.no_grad()
    def look_up(self, table: int, payload: Sequence[memoryview], before: bool) -> Tensor:
        """Some rows; with `before`, as they were before the last step."""
        if not 0 <= table < len(self.slabs):
            raise ValueError(f"there is no table {table} among {len(self.slabs)}")
        if len(payload) != 1:
            raise BadFrame(f"a lookup came with {len(payload)} frames, and its rows fill one")
        places = _places(payload[0], len(self.slabs[table]))
        found = self.slabs[table].index_select(0, places)
        if before and table in self._before:
            changed, rows = self._before[table]
            was = torch.isin(places, changed)
            found[was] = rows[torch.searchsorted(changed, places[was])]
        return found

    def rows_of(self, key: int, payload: Sequence[memoryview]) -> list[Tensor]:
        """What a push brings for each block: the numbers of rows, and the rows."""
        slab = self.slabs[self.keys.index(key)]
        width = slab.shape[1]
        found = []
        for ids, values in zip(payload[::2], payload[1::2], strict=True):
            places = tensor_of(ids, torch.int64, ids.nbytes // 8)
            numbers = places.numpy()  # which answers small questions sooner than torch
            if (numbers[1:] <= numbers[:-1]).any():
                raise ValueError(f"the rows of key {key} are not in their order")
            if len(numbers):
                _refuse_outside(numbers[0], numbers[-1], len(slab))
            rows = tensor_of(values, slab.dtype, len(places) * width).view(-1, width)
            found.append(sparse_rows(places, rows, len(slab)))
        return found

    @torch.no_grad()
    def take_gradients(
        self, sums: Mapping[int, Tensor], touched: Mapping[int, Sequence[bool]], scale: float
    ) -> None:
        """Get ready for a step: give the slabs their gradients, and remember what will change."""
        self._before = {}
        for table, (key, slab) in enumerate(zip(self.keys, self.slabs, strict=True)):
            if key not in sums or not touched[key][0] or not len(slab):
                slab.grad = None
                continue
            places, rows = sums[key]._indices()[0], sums[key]._values()
            self._before[table] = places, slab.index_select(0, places)
            slab.grad = sparse_rows(places, rows if scale == 1.0 else rows * scale, len(slab))

    def frames_of(self, sums: Mapping[int, Tensor]) -> list[Tensor]:
        """Sums for a journal."""
        pairs = [(sums[key]._indices()[0], sums[key]._values()) for key in self.keys]
        return [tensor.contiguous() for pair in pairs for tensor in pair]

    def sums_of(self, frames: Sequence[memoryview]) -> dict[int, Tensor]:
        """And from one."""
        return {
            key: self.rows_of(key, frames[2 * table : 2 * table + 2])[0]
            for table, key in enumerate(self.keys)
        }

    def moved_to(self, other: int, num_servers: int) -> Iterator[tuple[Stripes, tuple[int, ...]]]:
        """What a server will hold of this one's stripes when there are so many; with shapes."""
        for slab, own in self.runs.items():
            theirs = Striping(own.num_rows, num_servers).stripes_of(other)
            if moved := [stripe for stripe in own.stripes if stripe in theirs]:
                yield own._replace(stripes=moved), (sum(map(len, moved)), *slab.shape[1:])

    def before_state(self) -> dict[str, list[Slice]]:
        """The rows that the last step changed, as they were: for who takes this server's place."""
        found = {}
        for table, (places, rows) in self._before.items():
            found[f"{_BEFORE}{table}.places"] = [whole_slice(places)]
            found[f"{_BEFORE}{table}.rows"] = [whole_slice(rows)]
        return found

    def recall(self, tensors: Mapping[str, Sequence[Slice]]) -> None:
        """Remember what another did."""
        for table in self._tables:
            if f"{_BEFORE}{table}.rows" in tensors:
                (places,), (rows,) = (
                    tensors[f"{_BEFORE}{table}.{kind}"] for kind in ("places", "rows")
                )
                self._before[table] = places.tensor, rows.tensor

    def forget(self) -> None:
        """Another state was taken over: the rows before it are not needed."""
        self._before = {}


def key_of(first: int, table: int, server: int, num_servers: int) -> int:
    """The number of what a server holds of a table, where `first` keys are of other parameters."""
    return first + table * num_servers + server


def _places(frame: memoryview, num_rows: int) -> Tensor:
    places = tensor_of(frame, torch.int64, frame.nbytes // 8)
    if len(places):
        _refuse_outside(*places.aminmax(), num_rows)
    return places


def _refuse_outside(least: SupportsInt, most: SupportsInt, num_rows: int) -> None:
    if int(least) < 0 or int(most) >= num_rows:
        raise ValueError(f"a row outside of the {num_rows} that are held here was named")
