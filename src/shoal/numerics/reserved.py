"""Zeros that take no memory until they are written to.

Pages of a private mapping come into being when they are first written, so a tensor may be larger
than the machine as long as few of its rows are touched. The system knows which pages exist; so the
rows that hold anything are found without a list of them, and without reading the rest.

Cost: a page, 4 KB, for each row that stands alone. To find rows: 24 bytes read for each run of
pages that exist, or before Linux 6.7 eight for each page, whether it does or not.
"""

import fcntl
import mmap
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shoal.errors import RecipeError

_NO_RESERVE = 0x4000  # of mmap: nothing is set aside, so more than the machine has can be mapped
_LOOK = 1 << 20  # pages that are asked after at a time
_BATCH = 1 << 14  # pages that are looked through at a time
_SCAN = 0xC060_6610  # PAGEMAP_SCAN of Linux
_ASKED = struct.Struct("<12Q")  # its argument, of which a field is where it stopped
_STOPPED_AT = struct.Struct("<32xQ")
_EXISTS = 0b11000  # in memory, or swapped out
_RUNS = 1 << 12  # of pages, that are found at a time


def reserved_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    if not num_bytes:
        return torch.zeros(tuple(shape), dtype=dtype)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    try:
        mapped = mmap.mmap(-1, num_bytes, flags=flags)
    except OSError as error:
        raise RecipeError(
            f"The system does not reserve {num_bytes / 1e9:,.1f} GB of address space: "
            f"{error.strerror}. Raise the limit (ulimit -v), or make the table smaller."
        ) from error
    mapped.madvise(mmap.MADV_NOHUGEPAGE)  # or else a row takes 2 MB
    return torch.frombuffer(mapped, dtype=dtype).view(*shape)


class ReservedParameter(nn.Parameter):
    """A parameter in memory that is only reserved, as are zeros that an optimizer makes alike."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.zeros_like, torch.empty_like, torch.full_like):
            if any(args[1:]) or kwargs.get("fill_value"):
                raise RecipeError(
                    "An optimizer was to begin with numbers other than 0 for all rows of a "
                    "shoal.Table, which would fill them. Use 0 (Adagrad's "
                    "initial_accumulator_value, say)."
                )
            return reserved_zeros(args[0].shape, kwargs.get("dtype") or args[0].dtype)
        if func in (Tensor.new_zeros, Tensor.new_empty):
            return reserved_zeros(args[1], kwargs.get("dtype") or args[0].dtype)
        return torch._C._disabled_torch_function_impl(func, types, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReservedParameter":
        made = reserved_zeros(self.shape, self.dtype)
        rows = touched_rows([self])
        made[rows] = self.detach()[rows]
        copied = memo[id(self)] = ReservedParameter(made, self.requires_grad)
        return copied


@torch.no_grad()
def touched_rows(tensors: Sequence[Tensor]) -> Tensor:
    """The numbers of the rows in which any of some tensors of as many rows is not zero."""
    found = [rows for tensor in tensors for rows in _with_bits(tensor.detach())]
    rows: Tensor = torch.cat([torch.empty(0, dtype=torch.int64), *found]).unique()
    return rows


def clear_rows(tensor: Tensor) -> None:
    """Make all of it zero again."""
    tensor.detach()[touched_rows([tensor])] = 0


def _with_bits(tensor: Tensor) -> Iterator[Tensor]:
    """Rows with a bit that is set: so a negative zero counts as well."""
    assert tensor.dim() > 1 and tensor.is_contiguous()
    if not tensor.numel():
        return
    row_bytes = tensor.nbytes // len(tensor)
    start, page = tensor.data_ptr(), mmap.PAGESIZE
    first, last = start // page, -(-(start + tensor.nbytes) // page)
    several = torch.arange(page // row_bytes + 2)  # rows that may lie in a page
    for pages in (some for at in _present(first, last) for some in at.split(_BATCH)):
        rows = (pages * page - start).clamp_(min=0) // row_bytes
        near = (rows[:, None] + several).flatten().unique()
        near = near[near < len(tensor)]
        held = tensor.index_select(0, near).flatten(1).view(torch.uint8)
        yield near[(held != 0).any(1)]


def _present(first: int, last: int) -> Iterator[Tensor]:
    """Which pages of a range exist; all, if the system does not tell."""
    try:
        yield from _scanned(first, last)
    except OSError:  # an older system
        yield from _looked_at(first, last)


def _scanned(first: int, last: int) -> Iterator[Tensor]:
    found, page = torch.empty(_RUNS, 3, dtype=torch.int64), mmap.PAGESIZE
    at, end = first * page, last * page
    with open("/proc/self/pagemap", "rb") as file:
        while at < end:
            room = found.data_ptr(), _RUNS, _LOOK
            question = _ASKED.pack(_ASKED.size, 0, at, end, 0, *room, 0, 0, _EXISTS, _EXISTS)
            asked = bytearray(question)  # in which the system writes
            count = fcntl.ioctl(file, _SCAN, asked)
            (at,) = _STOPPED_AT.unpack_from(asked)
            starts, stops = found[:count, 0] // page, found[:count, 1] // page
            lengths = stops - starts
            before = lengths.cumsum(0) - lengths
            yield torch.arange(int(lengths.sum())) + (starts - before).repeat_interleave(lengths)


def _looked_at(first: int, last: int) -> Iterator[Tensor]:
    for at in range(first, last, _LOOK):
        count = min(_LOOK, last - at)
        try:
            with open("/proc/self/pagemap", "rb") as file:
                file.seek(8 * at)
                found = bytearray(file.read(8 * count))
        except OSError:
            found = bytearray()
        if len(found) < 8 * count:
            yield torch.arange(at, at + count)
        else:
            entries = torch.frombuffer(found, dtype=torch.int64)
            yield (entries >> 62 != 0).nonzero().flatten() + at  # in memory, or swapped out
