"""Products with cut matrices: by columns on whole values, by rows on parts.

A matrix cut along what comes out of it (`column`) turns a whole value into a part; one cut along
what goes into it (`row`) turns a part into summands of a whole value, and one message adds them.
Linear layers, convolutions and products with a parameter differ only in which dims those are.
Attention works head by head, so heads are a dim like any other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn import functional as F

from shoal.parallel.layout import Cut
from shoal.parallel.tensor.elementwise_rules import beside
from shoal.parallel.tensor.part import CannotCut, CutRegion, TensorPart, cut_of, share_of
from shoal.parallel.tensor.view_rules import Args, Kwargs, Rule, argument, table


class ProductDims(NamedTuple):
    """Dims of a product: of the matrix, of what goes in, of what comes out."""

    out: int
    into: int
    x_dim: int
    y_dim: int


MatrixProduct = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def contract(
    region: CutRegion,
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    use: ProductDims,
    run: MatrixProduct,
) -> Tensor:
    """`run(x, matrix, bias)` on what the rank holds of each."""
    found = region.matrix_cut(matrix, use.out, use.into, x, use.x_dim)
    of_x = cut_of(x)
    if found is None:
        if of_x is None:
            return run(x, matrix, bias)
        if of_x.dim == use.x_dim:
            raise CannotCut("the next matrix stays whole")
        entered = None if bias is None else region.enter(bias)
        return region.part(run(region.local(x, of_x), region.enter(matrix), entered), of_x)
    if found.dim == use.out:
        if of_x is not None:
            raise CannotCut("the next matrix is cut by columns too", repack=True)
        if bias is not None:
            along = Cut(0, found.packs)
            region.follow(bias, along)
            bias = region.local(bias, along)
        y = run(region.enter(x), region.local(matrix, found), bias)
        return region.part(y, Cut(use.y_dim, found.packs))
    if found.dim != use.into:
        raise CannotCut("it is multiplied along a dim that is not cut")
    share = region.local(x, Cut(use.x_dim, found.packs))
    y = region.leave(run(share, region.local(matrix, found), None))
    if bias is None:
        return y
    bias = region.whole(bias)
    # In place, so that autocast's narrow type is kept.
    return y.add_(bias if use.y_dim == y.ndim - 1 else bias.view(-1, *[1] * (y.ndim - 2)))


def linear(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    given = dict(zip(("input", "weight", "bias"), args)) | kwargs
    x, last = given["input"], given["input"].ndim - 1
    return contract(
        region, x, given["weight"], given.get("bias"), ProductDims(0, 1, last, last), F.linear
    )


def addmm(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    if kwargs:
        raise CannotCut("addmm scales its summands")
    bias, x, matrix = args
    if bias.ndim != 1:
        raise CannotCut("addmm adds a matrix")

    def run(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        return x @ matrix if bias is None else torch.addmm(bias, x, matrix)

    return contract(region, x, matrix, bias, ProductDims(1, 0, 1, 1), run)


_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_CONV_TRANSPOSE = (*_CONV[:5], "output_padding", "groups", "dilation")


def convolve(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    is_transposed = "transpose" in func.__name__
    given = dict(zip(_CONV_TRANSPOSE if is_transposed else _CONV, args)) | kwargs
    x, matrix, bias = given.pop("input"), given.pop("weight"), given.pop("bias", None)
    if given.get("groups", 1) != 1:
        return _convolve_groups(region, func, x, matrix, bias, given)
    channels = x.ndim - matrix.ndim + 1  # 1, or 0 without a batch

    def run(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = func(x, matrix, bias, **given)
        return y

    out, into = (1, 0) if is_transposed else (0, 1)
    return contract(region, x, matrix, bias, ProductDims(out, into, channels, channels), run)


def _convolve_groups(
    region: CutRegion, func: Any, x: Tensor, matrix: Tensor, bias: Tensor | None, given: Kwargs
) -> Tensor:
    """Groups of channels are apart from each other, so a rank can have some of them."""
    cut = cut_of(x)
    if cut is None:
        if cut_of(matrix) is not None or cut_of(bias) is not None:
            raise CannotCut("a whole value meets groups of channels that are cut")
        y: Tensor = func(x, matrix, bias, **given)
        return y
    if cut != Cut(x.ndim - matrix.ndim + 1) or given["groups"] % region.num_ranks:
        raise CannotCut(f"{region.num_ranks} ranks do not divide {given['groups']} groups")
    along = Cut(0)
    for value in (matrix, bias):
        region.follow(value, along)
    local_bias = None if bias is None else region.local(bias, along)
    given = given | {"groups": given["groups"] // region.num_ranks}
    y = func(region.local(x, cut), region.local(matrix, along), local_bias, **given)
    return region.part(y, cut)


def matmul(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    a, b = args if len(args) == 2 else (*args, *kwargs.values())
    if func.__name__ == "__rmatmul__":
        a, b = b, a
    if isinstance(a, Tensor) and min(a.ndim, b.ndim) >= 2:
        for_b = ProductDims(b.ndim - 1, b.ndim - 2, a.ndim - 1, max(a.ndim, b.ndim) - 1)
        if (
            region.matrix_cut(b, *for_b[:2], a, for_b.x_dim) is not None
            and type(b) is not TensorPart
        ):
            return contract(region, a, b, None, for_b, lambda x, w, _: torch.matmul(x, w))
        for_a = ProductDims(a.ndim - 2, a.ndim - 1, b.ndim - 2, max(a.ndim, b.ndim) - 2)
        if (
            region.matrix_cut(a, *for_a[:2], b, for_a.x_dim) is not None
            and type(a) is not TensorPart
        ):
            return contract(region, b, a, None, for_a, lambda x, w, _: torch.matmul(w, x))
        return multiply(region, a, b)
    raise CannotCut("a part is multiplied by a vector")


def multiply(region: CutRegion, a: Tensor, b: Tensor) -> Tensor:
    """A product of two values of which one at least may be a part."""
    cut_a, cut_b = cut_of(a), cut_of(b)
    ndim = max(a.ndim, b.ndim)
    if cut_a is None and cut_b is None:
        if a.ndim == b.ndim == 4:
            region.check_heads(a.shape[1], is_attention=False)
        return torch.matmul(a, b)
    end_a = None if cut_a is None else cut_a.dim - a.ndim
    end_b = None if cut_b is None else cut_b.dim - b.ndim
    packs = cut_a.packs if cut_a is not None else cut_b.packs  # type: ignore[union-attr]
    if end_a in (None, -1) and end_b in (None, -2):  # summed over
        shares = region.local(a, Cut(a.ndim - 1, packs)), region.local(b, Cut(b.ndim - 2, packs))
        return region.leave(torch.matmul(*shares))
    if end_a == -2 and end_b is None:
        assert cut_a is not None
        return region.part(
            torch.matmul(region.local(a, cut_a), region.enter(b)), Cut(ndim - 2, packs)
        )
    if end_b == -1 and end_a is None:
        assert cut_b is not None
        return region.part(
            torch.matmul(region.enter(a), region.local(b, cut_b)), Cut(ndim - 1, packs)
        )
    end = end_a if end_a is not None else end_b
    if end is None or end > -3 or end_b not in (None, end) or end_a not in (None, end):
        raise CannotCut("two values that are cut differently are multiplied", repack=True)
    if cut_a is not None and cut_b is not None and cut_a.packs != cut_b.packs:
        raise CannotCut("two values that are packed differently are multiplied", repack=True)
    part = a if type(a) is TensorPart else b
    assert type(part) is TensorPart
    y = torch.matmul(beside(region, a, part, end), beside(region, b, part, end))
    return region.part(y, Cut(ndim + end, packs))


def baddbmm(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    """A product of batches plus a batch, as attention with a bias for distance has it."""
    plus = args[0]
    a, b = argument(args, kwargs, "batch1", 1), argument(args, kwargs, "batch2", 2)
    if type(a) is not TensorPart or type(b) is not TensorPart or a.cut != b.cut or a.cut.dim != 0:
        raise CannotCut("two values that are cut differently are multiplied", repack=True)
    scales = {name: value for name, value in kwargs.items() if name in ("alpha", "beta")}
    y = func(beside(region, plus, a, -3), a.local, b.local, *args[3:], **scales)
    return region.part(y, a.cut)


def einsum(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    equation, operands = args[0].replace(" ", ""), list(args[1:])
    if len(operands) == 1 and not isinstance(operands[0], Tensor):
        operands = list(operands[0])
    if "." in equation or "->" not in equation:
        raise CannotCut("an einsum without named dims")
    names, out = equation.split("->")
    letters = names.split(",")
    cuts = [_einsum_cut(region, i, letters, out, operands) for i in range(len(operands))]
    found = {(letters[i][cut.dim], cut.packs) for i, cut in enumerate(cuts) if cut is not None}
    if not found:
        whole: Tensor = func(equation, *operands)
        return whole
    if len(found) > 1:
        raise CannotCut("two values that are cut differently are multiplied", repack=True)
    ((letter, packs),) = found
    ready = [
        region.local(value, Cut(of.index(letter), packs)) if letter in of else region.enter(value)
        for of, value in zip(letters, operands)
    ]
    y = func(equation, *ready)
    return region.part(y, Cut(out.index(letter), packs)) if letter in out else region.leave(y)


def _einsum_cut(
    region: CutRegion, i: int, letters: list[str], out: str, operands: list[Tensor]
) -> Cut | None:
    """How an operand is or will be cut, if the other one makes it a matrix."""
    if len(operands) != 2 or type(operands[i]) is TensorPart:
        return cut_of(operands[i])
    own, other, x = letters[i], letters[1 - i], operands[1 - i]
    outs = [at for at, letter in enumerate(own) if letter in out and letter not in other]
    of_x = cut_of(x)
    shared = [at for at, letter in enumerate(own) if letter in other and letter not in out]
    if not outs or not shared:
        return cut_of(operands[i])
    into = shared[0]
    if of_x is not None and other[of_x.dim] in own:
        into = own.index(other[of_x.dim])
    return region.matrix_cut(operands[i], outs[0], into, x, other.index(own[into]))


def grouped_mm(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    x, experts = args[:2]
    rest = args[2:]

    def run(x: Tensor, experts: Tensor, _: Tensor | None) -> Tensor:
        if 1 not in (experts.stride(-2), experts.stride(-1)):
            experts = experts.contiguous()
        y: Tensor = func(x.contiguous(), experts, *rest, **kwargs)
        return y

    return contract(region, x, experts, None, ProductDims(2, 1, x.ndim - 1, x.ndim - 1), run)


def embedding(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq")
    given = dict(zip((*names, "sparse"), args)) | kwargs
    ids, rows = given["input"], given["weight"]
    changes = given.get("max_norm") is not None or bool(given.get("scale_grad_by_freq"))
    cut = cut_of(rows) if changes else region.table_cut(rows)
    if cut is None:
        if type(ids) is TensorPart:
            raise CannotCut("a part is looked up in a table")
        found: Tensor = func(*args, **kwargs)
        return found
    if changes:
        raise CannotCut("a table changes its rows as they are looked up")
    local, padding = region.local(rows, cut), given.get("padding_idx")
    if cut.dim == 1:
        columns = F.embedding(ids, local, padding)
        return region.whole(region.part(columns, Cut(columns.ndim - 1)))
    first = region.rank * local.shape[0]
    if padding is not None:
        padding = padding % (local.shape[0] * region.num_ranks) - first
        padding = padding if 0 <= padding < local.shape[0] else None
    at = ids - first
    is_mine = (at >= 0) & (at < local.shape[0])
    found = F.embedding(at.clamp(0, local.shape[0] - 1), local, padding)
    return region.leave(found * is_mine.unsqueeze(-1))


_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def attention(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> Tensor:
    given = dict(zip(_ATTENTION, args)) | kwargs
    values = [given.pop(name) for name in _ATTENTION[:3]]
    mask = given.get("attn_mask")
    cut_values = [value for value in (*values, mask) if type(value) is TensorPart]
    if not cut_values:
        region.check_heads(values[0].shape[-3] if values[0].ndim > 3 else 0, is_attention=True)
        mixed: Tensor = func(*values, **given)
        return mixed
    part = cut_values[0]
    from_end, packs = part.cut.dim - part.ndim, part.cut.packs
    if part is mask:
        raise CannotCut("whole queries meet a mask that is cut")
    if from_end > -3 or any(
        (p.cut.dim - p.ndim, p.cut.packs) != (from_end, packs) for p in cut_values
    ):
        raise CannotCut("attention is not cut by heads", repack=True)
    if given.get("enable_gqa") and packs != 1:
        raise CannotCut("attention with fewer keys than queries is cut in packs", repack=True)
    if mask is not None and type(mask) not in (Tensor, Parameter, TensorPart):
        raise CannotCut(f"the mask of attention is a {type(mask).__name__}")
    local = [region.local(v, Cut(v.ndim + from_end, packs)) for v in values]
    if mask is not None:
        given["attn_mask"] = beside(region, mask, part, from_end)
    if given.get("dropout_p"):
        y = _attend_dropping(region, values, local, given, Cut(part.ndim + from_end, packs))
    else:
        y = func(*local, **given)
    return region.part(y, Cut(y.ndim + from_end, packs))


def _attend_dropping(
    region: CutRegion, values: list[Tensor], local: list[Tensor], given: Kwargs, cut: Cut
) -> Tensor:
    """Attention whose weights are dropped as the uncut model drops them."""
    if given["dropout_p"] >= 1:
        raise CannotCut("all weights of attention are dropped")  # torch divides by what is kept
    query, key = values[:2]
    device, mask = local[0].device, given.get("attn_mask")
    if torch.is_autocast_enabled(device.type):  # which does not know the inner function
        narrow = torch.get_autocast_dtype(device.type)
        local = [value.to(narrow) for value in local]
        mask = mask if mask is None or mask.dtype == torch.bool else mask.to(narrow)
    ones = torch.ones((*query.shape[:-1], key.shape[-2]), dtype=local[0].dtype, device=device)
    drawn = F.dropout(ones, given["dropout_p"], True)
    kept = share_of(drawn, cut, region.rank, region.num_ranks) != 0
    mixed: Tensor = torch._scaled_dot_product_attention_math(
        local[0],
        local[1],
        local[2],
        _added(mask, local[0].dtype),
        given["dropout_p"],
        given.get("is_causal", False),
        kept,
        scale=given.get("scale"),
        enable_gqa=given.get("enable_gqa", False),
    )[0]
    return mixed


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as what is added to scores: the inner function takes True, "attend", for 1.0."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        mask.logical_not(), float("-inf")
    )


# Rules that look at parameters themselves; they serve whole arguments as well.
MATRIX_RULES: dict[Any, Rule] = table(
    ("linear", linear),
    ("addmm", addmm),
    ("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d", convolve),
    ("matmul mm bmm __matmul__ __rmatmul__", matmul),
    ("baddbmm", baddbmm),
    ("einsum", einsum),
    ("grouped_mm _grouped_mm", grouped_mm),
    ("embedding", embedding),
    ("scaled_dot_product_attention", attention),
)
