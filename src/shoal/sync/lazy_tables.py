"""Lazy tables in a state: only the rows that training touched, stripe by stripe.

A state lists the tensors of a lazy table (its values, and optimizer state of the same shape) as
parts of whole ones. Here these become, for each stripe (`parallel/striping.py`), the numbers of its
touched rows and those rows of each tensor; and the other way round. Stripes do not depend on the
plan, so a state of any plan has the same.

    touched.<stripe>.rows.<parameter>   numbers, rising
    touched.<stripe>.<tensor>           the rows of one tensor, in that order
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from shoal.numerics.reserved import ReservedParameter, clear_rows, touched_rows
from shoal.parallel.layout import Slice, whole_slice
from shoal.parallel.striping import MOST_STRIPES, Stripes, Striping

if TYPE_CHECKING:
    from shoal.sync.state import OptimizedPart, StateSource

TOUCHED = "touched."
READ_BYTES = 8 << 20  # of rows, at a time

Tensors = dict[str, list[Slice]]


def lazy_table_names(runs: Mapping[Tensor, "OptimizedPart"]) -> list[str]:
    """The names of those parameters that are only reserved."""
    return [run.name for p, run in runs.items() if isinstance(p, ReservedParameter)]


def rows_name(stripe: int, parameter: str) -> str:
    return f"{TOUCHED}{stripe:02d}.rows.{parameter}"


def part_name(stripe: int, tensor: str) -> str:
    return f"{TOUCHED}{stripe:02d}.{tensor}"


class CompactedTables(NamedTuple):
    tensors: Tensors
    copied: frozenset[str]  # what was made here


def compact_tables(tensors: Tensors, tables: Collection[str]) -> CompactedTables:
    """With the touched rows of some parameters in the place of all of them."""
    rest, made = dict(tensors), {}
    for table in tables:
        (num_rows, *_) = tensors[_values_of(table, tensors)][0].global_shape
        own = {name: rest.pop(name) for name in tensors if _is_of(name, table, tensors, num_rows)}
        for stripe, views in _by_stripe(own, num_rows):
            rows = touched_rows(list(views.values()))
            start = stripe * Striping(num_rows, 1).height
            made[rows_name(stripe, table)] = [whole_slice(rows + start)]
            for name, view in views.items():
                made[part_name(stripe, name)] = [whole_slice(view.index_select(0, rows))]
    return CompactedTables(rest | made, frozenset(made))


def _values_of(table: str, tensors: Tensors) -> str:
    return f"model.{table}" if f"model.{table}" in tensors else table


def _is_of(name: str, table: str, tensors: Tensors, num_rows: int) -> bool:
    if name == _values_of(table, tensors):
        return True
    shape = tensors[name][0].global_shape
    return name.startswith(f"optimizer.{table}.") and len(shape) > 1 and shape[0] == num_rows


def _by_stripe(own: Tensors, num_rows: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """What is held of each stripe, whole stripes only."""
    height = Striping(num_rows, 1).height
    found: dict[int, dict[str, Tensor]] = {}
    for name, parts in own.items():
        for tensor, _, offset in parts:
            for at in range(0, len(tensor), height):
                stripe = (offset[0] + at) // height
                found.setdefault(stripe, {})[name] = tensor[at : at + height]
    yield from sorted(found.items())


class ExpandedSource:
    """A source in which lazy tables are whole."""

    def __init__(self, source: "StateSource", tables: Collection[str]):
        self._source, self._tables, self.plain = source, tables, source.plain

    def __contains__(self, name: str) -> bool:
        return name in self._source or self._table_of(name) is not None

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._known(name))

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a lazy table, of the rows of some stripe."""
        return self._source.shape(self._known(name))

    def fill(self, name: str, places: Sequence[Slice]) -> None:
        table = self._table_of(name)
        if table is None:
            self._source.fill(name, places)
            return
        for place in places:
            clear_rows(place.tensor)
            height = Striping(place.global_shape[0], 1).height
            first = place.offset[0] // height
            for stripe in range(first, first + -(-len(place.tensor) // height)):
                if rows_name(stripe, table) in self._source:
                    self._fill(stripe, table, name, place)

    def _fill(self, stripe: int, table: str, name: str, place: Slice) -> None:
        (count,) = self._source.shape(rows_name(stripe, table))
        shape = self._source.shape(part_name(stripe, name))
        row_bytes = max(1, torch.Size(shape[1:]).numel() * place.tensor.itemsize)
        most = max(1, READ_BYTES // row_bytes)
        for at in range(0, count, most):
            some = min(most, count - at)
            rows = torch.empty(some, dtype=torch.int64)
            self._source.fill(rows_name(stripe, table), [Slice(rows, (count,), (at,))])
            values = torch.empty((some, *shape[1:]), dtype=place.tensor.dtype)
            start = (at, *[0] * (len(shape) - 1))
            self._source.fill(part_name(stripe, name), [Slice(values, shape, start)])
            rows -= place.offset[0]
            if int(rows.min()) < 0 or int(rows.max()) >= len(place.tensor):
                raise ValueError(f"{rows_name(stripe, table)} names rows of another stripe")
            place.tensor.index_copy_(0, rows, values)

    def _table_of(self, name: str) -> str | None:
        if name in self._source:
            return None
        of = (t for t in self._tables if name == f"model.{t}" or name.startswith(f"optimizer.{t}."))
        return next(of, None)

    def _known(self, name: str) -> str:
        """Under which name the type is recorded, and what follows the number of rows."""
        if self._table_of(name) is None:
            return name
        stripes = (part_name(stripe, name) for stripe in range(MOST_STRIPES))
        return next((part for part in stripes if part in self._source), name)


def stripes_in(source: "StateSource", own: Stripes) -> list[int]:
    """Those of some stripes of which a source has the touched rows."""
    height = Striping(own.num_rows, 1).height
    numbers = [stripe.start // height for stripe in own.stripes]
    return [number for number in numbers if rows_name(number, own.name) in source]


def join_stripes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A model's tensors, with the touched rows of each lazy table as its `state_dict` has them."""
    found = {name: t for name, t in tensors.items() if not name.startswith(TOUCHED)}
    rows: dict[str, list[Tensor]] = {}
    for name in sorted(tensors.keys() - found.keys()):
        table = name[len(TOUCHED) + 3 :]  # after the stripe
        kind = "rows" if table.startswith("rows.") else "values"
        path = table.removeprefix("rows.").removesuffix("weight")
        rows.setdefault(path + kind, []).append(tensors[name])
    return found | {name: torch.cat(parts) for name, parts in rows.items()}
