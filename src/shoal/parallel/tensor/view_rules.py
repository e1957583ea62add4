"""Where the cut goes when a part is viewed, moved about, split or joined.

A dim that is cut can be seen as three, (packs, ranks, rest). A view keeps the order of elements,
so it is possible on the parts alone if the `ranks` factor falls into one dim of the new shape;
what lies before it in that dim becomes the number of packs. Query, key and value in one matrix
are three packs; a batch and its heads in one dim are as many packs as samples.

Every rule takes (region, function, arguments, keywords), the first argument a part, and returns
parts; it raises `CannotCut` where the result cannot stay cut.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.parallel.layout import Cut
from shoal.parallel.tensor.part import CannotCut, CutRegion, TensorPart, cut_of

Rule = Callable[[CutRegion, Any, tuple[Any, ...], dict[str, Any]], Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]


def functions(names: str) -> list[Any]:
    """All that torch offers under these names: functions, methods, operators."""
    places = (torch, Tensor, F, torch._C._nn, torch.special, torch.linalg)
    found = [getattr(place, name, None) for name in names.split() for place in places]
    return [function for function in found if callable(function)]


def argument(args: Args, kwargs: Kwargs, name: str, at: int, default: Any = None) -> Any:
    """An argument that may be given by name or by place."""
    return kwargs[name] if name in kwargs else args[at] if len(args) > at else default


def table(*rows: tuple[str, Rule]) -> dict[Any, Rule]:
    return {function: rule for names, rule in rows for function in functions(names)}


def viewed(shape: Sequence[int], cut: Cut, num_ranks: int, new: Sequence[int]) -> Cut | None:
    """The cut after a view of the whole `shape` as `new`; None if parts cannot be viewed so."""
    outer = prod(size or 1 for size in shape[: cut.dim]) * cut.packs  # 0: an empty batch
    before = 1
    for dim, size in enumerate(new):
        after = before * (size or 1)
        if size > 1 and outer % before == 0 and after % (outer * num_ranks) == 0:
            return Cut(dim, outer // before)
        before = after
    return None


def _as_shape(x: TensorPart, given: Sequence[Any]) -> list[int]:
    if len(given) == 1 and not isinstance(given[0], int):
        given = given[0]
    shape = [int(size) for size in given]
    if -1 in shape:
        at = shape.index(-1)
        shape[at] = x.numel() // max(1, -prod(shape))
    return shape


def _view_as(region: CutRegion, x: TensorPart, shape: list[int]) -> TensorPart:
    cut = viewed(x.shape, x.cut, region.num_ranks, shape)
    if cut is None:
        raise CannotCut(
            f"{region.num_ranks} ranks cannot share a view of {list(x.shape)} as {shape}",
            repack=True,
        )
    shape[cut.dim] //= region.num_ranks
    return region.part(x.local.reshape(shape), cut)


def view(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    given = args[1:] or tuple(kwargs.values())
    if given and isinstance(given[0], torch.dtype):
        raise CannotCut("it is viewed as another type", gathers=True)
    return _view_as(region, args[0], _as_shape(args[0], given))


def view_as(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, other = args[0], argument(args, kwargs, "other", 1)
    if type(x) is not TensorPart:  # only the shape of the other is needed
        return x.reshape(other.shape) if func is Tensor.reshape_as else x.view(other.shape)
    return _view_as(region, x, list(other.shape))


def flatten(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    x = args[0]
    start = int(argument(args, kwargs, "start_dim", 1, 0)) % x.ndim
    end = int(argument(args, kwargs, "end_dim", 2, -1)) % x.ndim
    merged = prod(x.shape[start : end + 1])
    return _view_as(region, x, [*x.shape[:start], merged, *x.shape[end + 1 :]])


def unflatten(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    x = args[0]
    dim = int(argument(args, kwargs, "dim", 1)) % x.ndim
    sizes = list(argument(args, kwargs, "sizes", 2))
    if -1 in sizes:
        sizes[sizes.index(-1)] = x.shape[dim] // max(1, -prod(sizes))
    return _view_as(region, x, [*x.shape[:dim], *sizes, *x.shape[dim + 1 :]])


def permute(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    x = args[0]
    dims = kwargs.get("dims", args[1:])
    if len(dims) == 1 and not isinstance(dims[0], int):
        dims = dims[0]
    order = [int(dim) % x.ndim for dim in dims]
    return region.part(x.local.permute(order), Cut(order.index(x.cut.dim), x.cut.packs))


def transpose(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    a, b = args[1:] or kwargs.values()
    return _swap(region, args[0], int(a), int(b))


def transpose_last(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    """`.T`, `.mT` and `t()`."""
    x = args[0]
    if x.ndim != 2 and func != Tensor.mT.__get__:  # type: ignore[attr-defined]
        raise CannotCut(f"all {x.ndim} dims are turned round")
    return _swap(region, x, -2, -1)


def _swap(region: CutRegion, x: TensorPart, a: int, b: int) -> TensorPart:
    order = list(range(x.ndim))
    order[a], order[b] = order[b], order[a]
    return region.part(x.local.transpose(a, b), Cut(order.index(x.cut.dim), x.cut.packs))


def movedim(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    x = args[0]
    order = torch.empty((1,) * x.ndim).as_strided([1] * x.ndim, tuple(range(1, x.ndim + 1)))
    moved = func(order, *args[1:], **kwargs).stride()
    return region.part(
        func(x.local, *args[1:], **kwargs), Cut(moved.index(x.cut.dim + 1), x.cut.packs)
    )


def unsqueeze(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    x = args[0]
    dim = int(argument(args, kwargs, "dim", 1)) % (x.ndim + 1)
    return region.part(x.local.unsqueeze(dim), Cut(x.cut.dim + (dim <= x.cut.dim), x.cut.packs))


def squeeze(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    x = args[0]
    given = argument(args, kwargs, "dim", 1, range(x.ndim))
    dims = {dim % x.ndim for dim in ([given] if isinstance(given, int) else given)}
    gone = {dim for dim in dims if x.shape[dim] == 1}
    shape = [size for dim, size in enumerate(x.local.shape) if dim not in gone]
    before = sum(dim < x.cut.dim for dim in gone)
    return region.part(x.local.reshape(shape), Cut(x.cut.dim - before, x.cut.packs))


def expand_as(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, other = args[0], argument(args, kwargs, "other", 1)
    if type(x) is TensorPart:
        return expand(region, func, (x, other.shape), {})
    dim = x.ndim + other.cut.dim - other.ndim  # of a whole value, along the cut of the other
    if dim >= 0 and x.shape[dim] != 1:
        return x.expand(other.shape)
    return region.part(region.enter(x).expand(other.local.shape), other.cut)


def expand(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    x, sizes = args[0], _sizes_given(args, kwargs)
    dim = x.cut.dim + len(sizes) - x.ndim
    if sizes[dim] not in (-1, x.shape[x.cut.dim]):
        raise CannotCut("it is expanded along the dim that is cut")
    sizes[dim] = -1
    return region.part(x.local.expand(sizes), Cut(dim, x.cut.packs))


def repeat(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    x, times = args[0], _sizes_given(args, kwargs)
    dim = x.cut.dim + len(times) - x.ndim
    if not times[dim]:
        raise CannotCut("nothing of it is kept", gathers=True)
    return region.part(x.local.repeat(times), Cut(dim, x.cut.packs * times[dim]))


def _sizes_given(args: Args, kwargs: Kwargs) -> list[int]:
    """Numbers that follow the tensor, or are a list of their own."""
    given = args[1:] or tuple(kwargs.values())
    return list(given[0] if len(given) == 1 and not isinstance(given[0], int) else given)


def repeat_interleave(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    x = args[0]
    times = argument(args, kwargs, "repeats", 1)
    dim = argument(args, kwargs, "dim", 2)
    if not isinstance(times, int) or not isinstance(dim, int):
        raise CannotCut("it is repeated unevenly", gathers=True)
    return region.part(x.local.repeat_interleave(times, dim), x.cut)


def _dim_of(x: TensorPart, args: Args, kwargs: Kwargs, at: int, default: int = 0) -> int:
    return int(argument(args, kwargs, "dim", at, default)) % x.ndim


def split(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> tuple[Tensor, ...]:
    x, dim = args[0], _dim_of(args[0], args, kwargs, 2)
    size = args[1] if len(args) > 1 else next(v for k, v in kwargs.items() if k != "dim")
    whole = x.shape[dim]
    if isinstance(size, int):
        size = [min(size, whole - start) for start in range(0, whole, size)]
    return _split(region, x, dim, list(size))


def chunk(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> tuple[Tensor, ...]:
    x, dim = args[0], _dim_of(args[0], args, kwargs, 2)
    count = int(argument(args, kwargs, "chunks", 1))
    size = -(-x.shape[dim] // count)
    sizes = [min(size, x.shape[dim] - start) for start in range(0, x.shape[dim], size)]
    return _split(region, x, dim, sizes)


def _split(region: CutRegion, x: TensorPart, dim: int, sizes: list[int]) -> tuple[Tensor, ...]:
    if dim != x.cut.dim:
        return tuple(region.part(piece, x.cut) for piece in x.local.split(sizes, dim))
    pack = x.shape[dim] // x.cut.packs
    if any(size % pack for size in sizes):
        if not region.may_gather(x):
            raise CannotCut(f"{x.shape[dim]} columns are split into {sizes}", True, uneven=True)
        return tuple(region.piece(x, v, dim) for v in region.gathered(x).split(sizes, dim))
    pieces = x.local.split([size // region.num_ranks for size in sizes], dim)
    return tuple(
        region.part(piece, Cut(dim, size // pack))
        for piece, size in zip(pieces, sizes, strict=True)
    )


def unbind(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> tuple[TensorPart, ...]:
    x, dim = args[0], _dim_of(args[0], args, kwargs, 1)
    if dim == x.cut.dim:
        raise CannotCut("the dim that is cut is taken apart", repack=True)
    cut = Cut(x.cut.dim - (dim < x.cut.dim), x.cut.packs)
    return tuple(region.part(piece, cut) for piece in x.local.unbind(dim))


def narrow(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    x, dim = args[0], _dim_of(args[0], args, kwargs, 1)
    if dim == x.cut.dim:
        raise CannotCut("a piece of the dim that is cut is taken", repack=True)
    local = func(x.local, *args[1:], **kwargs)
    gone = x.ndim - local.ndim  # 1 for select
    return region.part(local, Cut(x.cut.dim - (gone if dim < x.cut.dim else 0), x.cut.packs))


def getitem(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    x, index = args
    if isinstance(index, Tensor) and type(index) is not TensorPart:
        return _pick(region, x, index)
    try:
        items, dim = _local_index(x, index)
    except CannotCut as refused:
        if not refused.uneven or not region.may_gather(x):
            raise
        _, dim = _local_index(x, index, takes_pieces=True)
        return region.piece(x, region.gathered(x)[index], dim)
    return region.part(x.local[items], Cut(dim, x.cut.packs))


def _local_index(
    x: TensorPart, index: Any, takes_pieces: bool = False
) -> tuple[tuple[Any, ...], int]:
    """An index of the part that leaves the dim that is cut as it is, and where that comes out."""
    items = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(i, bool) for i in items):
        raise CannotCut("it is indexed by True or False, which make a dim", gathers=True)
    if not all(i is None or i is ... or isinstance(i, int | slice) for i in items):
        raise CannotCut("it is indexed by several tensors", gathers=True)
    taken = sum(i is not None and i is not ... for i in items)
    if ... not in items:
        items.append(...)
    at = items.index(...)
    items[at : at + 1] = [slice(None)] * (x.ndim - taken)
    before, new, old = 0, 0, 0  # dims of the result and of x, up to the one that is cut
    for item in items:
        if item is None:
            new += 1
            continue
        if old == x.cut.dim:
            is_slice = isinstance(item, slice)
            is_whole = is_slice and item.indices(x.shape[old]) == (0, x.shape[old], 1)
            if not is_whole and not (is_slice and takes_pieces):
                raise CannotCut("a piece of the dim that is cut is taken", True, uneven=is_slice)
            before = new
        old, new = old + 1, new + (not isinstance(item, int))
    # The slice that keeps the cut dim may name the whole's size.
    kept = [i for i, item in enumerate(items) if item is not None][x.cut.dim]
    items[kept] = slice(None)
    return tuple(items), before


def setitem(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> None:
    """Writes into a part what is cut alike, or of the whole its share."""
    x, index, value = args
    if type(x) is not TensorPart:
        raise CannotCut("a part is written into a whole value")
    x.check_write()
    items: Any = index
    if isinstance(index, Tensor) and type(index) is not TensorPart:
        dim = _picked_dim(x, index)
    else:
        items, dim = _local_index(x, index)
    if isinstance(value, Tensor):
        at = value.ndim + dim - x.local[items].ndim
        if type(value) is TensorPart:
            if value.cut != Cut(at, x.cut.packs):
                raise CannotCut("it is written into a value that is cut differently", gathers=True)
            value = value.local
        elif at >= 0 and value.shape[at] != 1:
            value = region.local(value, Cut(at, x.cut.packs))
        else:
            value = region.enter(value)
    x.local[items] = value


def _pick(region: CutRegion, x: TensorPart, index: Tensor) -> TensorPart:
    """Rows of the first dims, by numbers or by a mask."""
    return region.part(x.local[index], Cut(_picked_dim(x, index), x.cut.packs))


def _picked_dim(x: TensorPart, index: Tensor) -> int:
    """Where the dim that is cut comes out behind rows of the first ones."""
    is_mask = index.dtype in (torch.bool, torch.uint8)
    used, made = (index.ndim, 1) if is_mask else (1, index.ndim)
    if x.cut.dim < used:
        raise CannotCut("the dim that is cut is indexed by a tensor", gathers=True)
    return x.cut.dim - used + made


def cat(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    values = list(argument(args, kwargs, "tensors", 0))
    first = next(value for value in values if type(value) is TensorPart)
    dim = int(argument(args, kwargs, "dim", 1, 0)) % first.ndim
    # torch lets one be of no dim and no element, as a cache is that holds nothing yet.
    filled = [value for value in values if value.shape != (0,)]
    if dim != first.cut.dim:
        for value in filled:
            if cut_of(value) is None:
                region.check_join(value, first)
        local = [
            value if value.shape == (0,) else region.local(value, first.cut) for value in values
        ]
        return region.part(func(local, dim), first.cut)
    cuts = [cut_of(value) for value in filled]
    sizes = {value.shape[dim] // cut.packs for value, cut in zip(filled, cuts) if cut is not None}
    if None in cuts or len(sizes) != 1 or {cut.dim for cut in cuts if cut is not None} != {dim}:
        raise CannotCut("it is joined with a whole or differently cut value")
    joint = func([value if value.shape == (0,) else value.local for value in values], dim)
    return region.part(joint, Cut(dim, sum(cut.packs for cut in cuts if cut is not None)))


def stack(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    values = list(argument(args, kwargs, "tensors", 0))
    first = next(value for value in values if type(value) is TensorPart)
    dim = int(argument(args, kwargs, "dim", 1, 0)) % (first.ndim + 1)
    local = func([region.local(value, first.cut) for value in values], dim)
    return region.part(local, Cut(first.cut.dim + (dim <= first.cut.dim), first.cut.packs))


def in_place(rule: Rule) -> Rule:
    """`x.unsqueeze_(...)`: as without the dash, and `x` is what comes out."""

    def changes(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
        x: TensorPart = args[0]
        return x.become(rule(region, func, args, kwargs))

    return changes


def pick_along(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    """`gather`: along a dim that is not cut, by numbers for each element."""
    x, index = args[0], argument(args, kwargs, "index", 2)
    part = x if type(x) is TensorPart else index
    cut, dim = part.cut, int(argument(args, kwargs, "dim", 1)) % part.ndim
    if dim == cut.dim or x.ndim != index.ndim or x.shape[cut.dim] != index.shape[cut.dim]:
        raise CannotCut("it is picked along the dim that is cut", gathers=True)
    sparse = bool(argument(args, kwargs, "sparse_grad", 3, False))
    picked = torch.gather(region.local(x, cut), dim, region.local(index, cut), sparse_grad=sparse)
    return region.part(picked, cut)


def along_dims(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    """`flip` and `roll`: the order of elements along some dims."""
    x, given = args[0], args[1:] or tuple(kwargs.values())
    if func.__name__ == "roll":
        dims: Any = argument(args, kwargs, "dims", 2, range(x.ndim))
    else:
        dims = given[0] if len(given) == 1 and not isinstance(given[0], int) else given
    if x.cut.dim in [int(d) % x.ndim for d in ([dims] if isinstance(dims, int) else dims)]:
        raise CannotCut(f"{func.__name__} has no rule for the dim that is cut", gathers=True)
    return region.part(func(x.local, *args[1:], **kwargs), x.cut)


def unfold(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    """Windows along a dim, in a new last one."""
    x, dim = args[0], int(argument(args, kwargs, "dimension", 1)) % args[0].ndim
    if dim == x.cut.dim:
        raise CannotCut("unfold has no rule for the dim that is cut", gathers=True)
    return region.part(func(x.local, *args[1:], **kwargs), x.cut)


def as_pairs(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    """Complex numbers from pairs in the last dim, and back."""
    x = args[0]
    if func is torch.view_as_complex and x.cut.dim == x.ndim - 1:
        raise CannotCut("the two parts of complex numbers are cut", gathers=True)
    return region.part(func(x.local), x.cut)


def pack_sequence(
    region: CutRegion, func: Any, args: Args, kwargs: Kwargs
) -> tuple[TensorPart, Tensor]:
    """Features of sequences of unlike length, step by step in one first dim."""
    x = args[0]
    if x.cut.dim < 2:
        raise CannotCut("it is packed along the dim that is cut", gathers=True)
    data, sizes = func(x.local, *args[1:], **kwargs)
    return region.part(data, Cut(x.cut.dim - 1, x.cut.packs)), sizes


def pad_sequence(
    region: CutRegion, func: Any, args: Args, kwargs: Kwargs
) -> tuple[TensorPart, Tensor]:
    x = args[0]
    if x.cut.dim < 1:
        raise CannotCut("it is padded along the dim that is cut", gathers=True)
    padded, lengths = func(x.local, *args[1:], **kwargs)
    return region.part(padded, Cut(x.cut.dim + 1, x.cut.packs)), lengths


def new_like(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`x.new_zeros(...)`: plain, of the shape asked for."""
    return func(args[0].local, *args[1:], **kwargs)


SHAPE_RULES: dict[Any, Rule] = {
    **table(
        ("view reshape _unsafe_view", view),
        ("view_as reshape_as", view_as),
        ("flatten", flatten),
        ("unflatten", unflatten),
        ("permute", permute),
        ("transpose swapaxes swapdims", transpose),
        ("t", transpose_last),
        ("movedim moveaxis", movedim),
        ("unsqueeze", unsqueeze),
        ("squeeze", squeeze),
        ("expand broadcast_to", expand),
        ("expand_as", expand_as),
        ("repeat", repeat),
        ("repeat_interleave", repeat_interleave),
        ("split split_with_sizes", split),
        ("chunk", chunk),
        ("unbind", unbind),
        ("narrow select index_select", narrow),
        ("__getitem__", getitem),
        ("__setitem__", setitem),
        ("unsqueeze_", in_place(unsqueeze)),
        ("squeeze_", in_place(squeeze)),
        ("transpose_ swapaxes_ swapdims_", in_place(transpose)),
        ("t_", in_place(transpose_last)),
        ("gather", pick_along),
        ("flip roll", along_dims),
        ("view_as_complex view_as_real", as_pairs),
        ("_pack_padded_sequence", pack_sequence),
        ("_pad_packed_sequence", pad_sequence),
        ("cat concat concatenate", cat),
        ("stack", stack),
        ("new_zeros new_ones new_full new_empty new_tensor", new_like),
    ),
    Tensor.T.__get__: transpose_last,  # type: ignore[attr-defined]
    Tensor.mT.__get__: transpose_last,  # type: ignore[attr-defined]
    Tensor.unfold: unfold,  # and not the other one, of torch.nn.functional
}
