"""A value of which each rank of the tensor axis holds a part, and how values become one.

Between a matrix cut by columns and the next one cut by rows an activation is a `TensorPart`: to the
model it looks like the whole tensor (shape, dtype), and it carries only this rank's share, a
plain tensor with its own autograd graph. Everything outside such a region is plain and equal on
all ranks. Four operations cross its border, each the transpose of another (Megatron-LM, 1909.08053,
where they are copy_to, scatter_to, reduce_from and gather_from the tensor parallel region); where a
gradient is itself differentiated (a penalty on it), backward runs the transposed operation:

    enter   whole -> whole, to be used with parts    backward sums over ranks
    take    whole -> part, by slicing after `enter`  backward sums over ranks
    leave   partial sums -> whole                    forward sums over ranks
    gather  part -> whole                            forward copies to all ranks

Cost: one message of the activation's size for each operation that communicates. A `TensorPart` is
no DTensor, because every operation on one of those costs tens of microseconds in Python, forward
and backward again. Read next: `forward.py`.
"""

from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import Function

from shoal.comm.collectives import Group
from shoal.errors import RecipeError
from shoal.parallel.layout import Cut

TAG = "_shoal_held"  # the attribute of a parameter or buffer that is cut
RECORDS = "_shoal_cuts"  # the attribute of a module that owns such


class CutRecord(NamedTuple):
    """What a local parameter or buffer is a part of."""

    cut: Cut
    shape: tuple[int, ...]


class CannotCut(Exception):
    """A rule cannot keep a value cut.

    `repack`: another way of packing might help; `gathers`: the function is computed on whole values
    and what comes out is cut again, since nothing but a missing rule speaks against it; `uneven`:
    so are pieces of unlike size, if no packing helps.
    """

    def __init__(
        self, reason: str, repack: bool = False, gathers: bool = False, uneven: bool = False
    ):
        super().__init__(reason)
        self.reason, self.repack, self.gathers, self.uneven = reason, repack, gathers, uneven


class TensorPart(Tensor):
    """This rank's part of an activation, under the whole's shape."""

    local: Tensor
    cut: Cut
    origin: frozenset[str]  # the matrices it comes from; kept by the probe alone
    made_of: tuple[Tensor, int] | None = None  # the whole that it was cut from, at this version
    is_apart = False  # a copy of what is a view of another value in the uncut model
    viewed: tuple[Tensor, int] | None = None  # a copy of this one that has views, at this version
    copies: tuple["ref[Tensor]", ...] = ()  # of it, which are views of it in the uncut model
    _sizes: torch.Size

    # Asked all the time; torch's own answers go through a mode and back.

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self._sizes

    @property
    def ndim(self) -> int:  # type: ignore[override]
        return len(self._sizes)

    def dim(self) -> int:
        return len(self._sizes)

    def size(self, dim: int | None = None) -> Any:
        return self._sizes if dim is None else self._sizes[dim]

    def __len__(self) -> int:
        return self._sizes[0]

    def stride(self, dim: int | None = None) -> Any:
        strides = strides_of_whole(self)
        return strides if dim is None else strides[dim]

    def is_contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
        return self.local.is_contiguous(memory_format=memory_format)

    def has_copy(self, copy: Tensor) -> None:
        self.copies = (*(known for known in self.copies if known() is not None), ref(copy))

    def check_write(self) -> None:
        """What is written must be seen by all that are views of it, and by what it is a view of."""
        if self.is_apart or any(known() is not None for known in self.copies):
            raise CannotCut("it is written in place, and views of it are copies")

    def become(self, other: "TensorPart") -> "TensorPart":
        """Take another's place, after a function that changes a shape in place."""
        self.local, self.cut, self._sizes = other.local, other.cut, other._sizes
        self.made_of = None
        return self

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in METADATA_FUNCTIONS:
            return answer_metadata(func, args, kwargs or {})
        name = getattr(func, "__name__", str(func))
        raise RecipeError(
            f"{name} was called outside the forward pass on a value of which each rank of the "
            "tensor axis holds a part. Such values live within the model's forward only. Return "
            "the value from forward, which makes it whole."
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise CannotCut(f"{func} does not tell torch of its arguments before it runs")


_GET = (
    *("shape", "dtype", "device", "ndim", "layout", "is_cuda", "is_cpu", "is_meta", "is_sparse"),
    *("is_nested", "is_quantized", "is_mps", "is_xpu", "itemsize", "nbytes", "is_mkldnn"),
)
_CALL = (
    *("size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex"),
    *("ndimension", "is_signed", "get_device", "__hash__"),
)
_LOCAL = ("requires_grad", "grad_fn", "is_leaf", "_version")
# Questions about a tensor that a part answers without looking at its values.
METADATA_FUNCTIONS = {
    *(getattr(Tensor, name).__get__ for name in (*_GET, *_LOCAL)),
    *(getattr(Tensor, name) for name in _CALL),
    *(torch.is_floating_point, torch.is_complex, torch.numel),
    *(Tensor.__repr__, Tensor.__format__),
}
_ABOUT_LOCAL = {getattr(Tensor, name).__get__ for name in _LOCAL}
_WORDS = {Tensor.__repr__, Tensor.__format__}


def answer_metadata(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    part = args[0]
    if func in _ABOUT_LOCAL:
        return func(part.local)
    if func in _WORDS:
        return f"Part({part.cut} of {tuple(part.local.shape)} on this rank)"
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def cut_of(value: Any) -> Cut | None:
    """How an activation, a parameter or a buffer is cut; None if it is whole."""
    if type(value) is TensorPart:
        return value.cut
    held: CutRecord | None = getattr(value, TAG, None)
    return None if held is None else held.cut


def make_part(local: Tensor, cut: Cut, num_ranks: int) -> TensorPart:
    shape = list(local.shape)
    shape[cut.dim] *= num_ranks
    part = Tensor._make_wrapper_subclass(TensorPart, shape, dtype=local.dtype, device=local.device)
    part.local, part.cut, part._sizes = local, cut, torch.Size(shape)
    return part


def strides_of_whole(part: TensorPart) -> tuple[int, ...]:
    """How the uncut model's value would lie in memory."""
    steps = part.local.stride()
    order = sorted(range(part.ndim), key=lambda dim: -steps[dim])
    strides, step = [0] * part.ndim, 1
    for dim in reversed(order):
        strides[dim], step = step, step * part.shape[dim]
    return tuple(strides)


def share_of(whole: Tensor, cut: Cut, rank: int, num_ranks: int) -> Tensor:
    """The view (or, of several packs, the copy) that one rank holds; gradients flow."""
    dim, packs = cut
    size = whole.shape[dim] // (packs * num_ranks)
    if packs == 1:
        return whole.narrow(dim, rank * size, size)
    split = whole.unflatten(dim, (packs, num_ranks, size))
    share: Tensor = split.select(dim + 1, rank).flatten(dim, dim + 1)
    return share


def joined(parts: Tensor, cut: Cut) -> Tensor:
    """The whole, from all ranks' parts stacked along a first dim."""
    dim, packs = cut
    num_ranks = parts.shape[0]
    spread = parts.unflatten(dim + 1, (packs, -1)).movedim(0, dim + 1)
    assert spread.shape[dim + 1] == num_ranks
    whole: Tensor = spread.flatten(dim, dim + 2)
    return whole


class _RegionFunction(Function):
    # As it is before a forward that watches the functions of the model replaces it.
    apply = Function.__dict__["apply"]


class _CopyToRegion(_RegionFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # The gradient may be another node's too, so it is not summed in place.
        grad = grads[0].clone(memory_format=torch.contiguous_format)
        if torch.is_grad_enabled():  # to be differentiated again
            return _ReduceFromRegion.apply(grad, ctx.group), None
        ctx.group.all_reduce(grad).wait()
        return grad, None


class _ReduceFromRegion(_RegionFunction):
    @staticmethod
    def forward(ctx: Any, y: Tensor, group: Group) -> Tensor:
        ctx.group = group
        ctx.mark_dirty(y)
        group.all_reduce(y).wait()
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            return _CopyToRegion.apply(grads[0], ctx.group), None
        return grads[0], None


class _GatherFromRegion(_RegionFunction):
    @staticmethod
    def forward(ctx: Any, local: Tensor, cut: Cut, group: Group) -> Tensor:
        ctx.cut, ctx.group = cut, group
        parts = local.new_empty((group.num_ranks, *local.shape))
        parts[group.rank] = local
        group.all_gather_shards(list(parts)).wait()
        whole = joined(parts, cut).contiguous()
        if not whole._is_view():
            return whole
        # Under its own name, since torch lets no view that a function returns be written in place.
        own = whole.untyped_storage(), whole.storage_offset(), whole.shape, whole.stride()
        return whole.new_empty(0).set_(*own)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        whole = grads[0]
        if torch.is_grad_enabled():
            whole = _CopyToRegion.apply(whole, ctx.group)
        part = share_of(whole, ctx.cut, ctx.group.rank, ctx.group.num_ranks)
        return part.contiguous(), None, None


class CutRegion:
    """The operations between whole values and parts, on one group."""

    def __init__(self, group: Group):
        self.group = group
        self.rank, self.num_ranks = group.rank, group.num_ranks
        self._entered: dict[int, tuple[Tensor, int, Tensor]] = {}

    def forget(self) -> None:
        self._entered.clear()

    def enter(self, x: Tensor) -> Tensor:
        """A whole value for use with parts. Several uses share one sum in backward."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return x
        known = self._entered.get(id(x))
        if known is not None and known[0] is x and known[1] == x._version:
            return known[2]
        if len(self._entered) >= 8:  # keeps few activations alive
            del self._entered[next(iter(self._entered))]
        entered: Tensor = _CopyToRegion.apply(x, self.group)
        self._entered[id(x)] = x, x._version, entered
        return entered

    def leave(self, y: Tensor) -> Tensor:
        """The whole value of which every rank computed a summand."""
        y = y.contiguous()
        if y._is_view() or (y.is_leaf and y.requires_grad):
            y = y.clone()
        whole: Tensor = _ReduceFromRegion.apply(y, self.group)
        return whole

    def whole(self, value: Tensor) -> Tensor:
        """A part, a cut parameter or a whole value as a whole value."""
        cut = cut_of(value)
        if cut is None:
            return value
        known = value.made_of if type(value) is TensorPart else None
        if known is not None and known[1] == value.local._version:  # type: ignore[attr-defined]
            return known[0]
        local = value.local if type(value) is TensorPart else value
        gathered: Tensor = _GatherFromRegion.apply(local, cut, self.group)
        return gathered

    def part(self, local: Tensor, cut: Cut) -> TensorPart:
        return make_part(local, cut, self.num_ranks)

    def cut_again(self, whole: Tensor, cut: Cut) -> TensorPart:
        """A part of a whole value, which is remembered for who wants it whole."""
        part = self.part(self.local(whole, cut).clone(), cut)
        if not whole.is_inference():  # inference tensors have no version counter
            part.made_of = whole, part.local._version
        return part

    def local(self, value: Tensor, cut: Cut) -> Tensor:
        """This rank's share of a value that is cut so or whole."""
        found = cut_of(value)
        if found is None:
            if value.shape[cut.dim] % (cut.packs * self.num_ranks):
                raise CannotCut(
                    f"{self.num_ranks} ranks do not divide {value.shape[cut.dim]} evenly"
                )
            return share_of(self.enter(value), cut, self.rank, self.num_ranks)
        if found != cut:
            raise CannotCut(f"a value cut by {found} meets one cut by {cut}", repack=True)
        return value.local if type(value) is TensorPart else value

    def gathered(self, part: TensorPart) -> Tensor:
        """The whole value, which is remembered: others will take pieces of it too."""
        whole = self.whole(part)
        if not part.local.is_inference():
            part.made_of = whole, part.local._version
        return whole

    def piece(self, of: TensorPart, view: Tensor, dim: int) -> Tensor:
        """A view of what was gathered of a part, cut again where the ranks divide it."""
        if view.shape[dim] % self.num_ranks == 0:
            part = self.cut_again(view, Cut(dim))
            part.is_apart = True
            of.has_copy(part)
            return part
        of.has_copy(view)
        if view._base is not None and not view.is_inference():
            of.viewed = view._base, view._version
        return view

    # What is cut, and how, was decided before; the probe decides instead.

    def may_gather(self, part: TensorPart) -> bool:
        """Whether pieces of unlike size are taken of the whole value."""
        return True

    def matrix_cut(self, matrix: Tensor, out: int, into: int, x: Tensor, x_dim: int) -> Cut | None:
        """How a matrix is cut that is about to meet `x`, `into` against `x_dim`."""
        return cut_of(matrix)

    def table_cut(self, table: Tensor) -> Cut | None:
        """How an embedding is cut."""
        return cut_of(table)

    def follow(self, value: Tensor | None, cut: Cut) -> None:
        """A vector along a cut dim (bias, running mean) is used; it can be cut alike."""

    def check_join(self, value: Tensor, part: TensorPart) -> None:
        """A whole activation is about to be used element by element with a part."""

    def check_heads(self, num_heads: int, is_attention: bool) -> None:
        """Whole values are about to be multiplied head by head."""
