"""What can be computed on parts alone: element by element, along other dims, channel by channel.

Whole values that take part are made ready for it: sliced where they span the dim that is cut,
used as they are where they do not, and in both cases their gradients are summed over ranks. A
random mask is drawn at the whole's shape and sliced, so that it is the one the uncut model draws.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.parallel.layout import Cut
from shoal.parallel.tensor.part import (
    CannotCut,
    CutRegion,
    TensorPart,
    cut_of,
    share_of,
    strides_of_whole,
)
from shoal.parallel.tensor.view_rules import Args, Kwargs, Rule, argument, table

_POINTWISE = """
abs absolute neg negative exp exp2 expm1 log log1p log2 sqrt rsqrt sin cos tan asin acos atan sinh
cosh tanh sigmoid relu relu_ relu6 elu elu_ selu celu gelu silu mish softplus softsign hardtanh
hardtanh_ hardswish hardsigmoid leaky_relu leaky_relu_ logsigmoid tanhshrink softshrink hardshrink
threshold erf erfc square pow float_power reciprocal clamp clamp_ clamp_min clamp_min_ clamp_max
clamp_max_ clip add sub subtract mul multiply div divide true_divide floor_divide remainder fmod
maximum minimum fmax fmin where masked_fill masked_fill_ lerp addcmul addcdiv atan2 hypot eq ne lt
le gt ge greater less logical_not logical_and logical_or logical_xor bitwise_not bitwise_and
bitwise_or isnan isinf isfinite sign sgn round floor ceil trunc frac nan_to_num logit sinc expit
float half bfloat16 double long int bool contiguous clone detach positive conj zeros_like ones_like
empty_like full_like add_ sub_ mul_ div_ pow_ exp_ neg_ sigmoid_ tanh_ sqrt_ rsqrt_ zero_ fill_
copy_ square_ abs_ __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__
__truediv__ __rtruediv__ __itruediv__ __div__ __rdiv__ __floordiv__ __rfloordiv__ __mod__ __pow__
__rpow__ __neg__ __pos__ __abs__ __invert__ __and__ __or__ __xor__ __rand__ __ror__ __eq__ __ne__
__lt__ __le__ __gt__ __ge__ rsub xlogy
"""


def pointwise(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Element by element, with torch's broadcasting."""
    first = args[0] if args else None
    if _is_in_place(func):  # to be refused before it is written, not after
        if type(first) is not TensorPart:
            raise CannotCut("a part is written into a whole value")
        first.check_write()
    if (
        type(first) is TensorPart
        and not kwargs
        and not any(isinstance(a, Tensor) for a in args[1:])
    ):
        return _result(region, func, args, func(first.local, *args[1:]), first.cut)
    if "out" in kwargs:
        raise CannotCut("it is written into another tensor", gathers=True)
    values = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    parts = [value for value in values if type(value) is TensorPart]
    ndim = max(value.ndim for value in values)
    from_end, packs = parts[0].cut.dim - parts[0].ndim, parts[0].cut.packs
    if any((p.cut.dim - p.ndim, p.cut.packs) != (from_end, packs) for p in parts):
        raise CannotCut("two values that are cut differently meet", repack=True)

    def ready(value: Any) -> Any:
        return beside(region, value, parts[0], from_end) if isinstance(value, Tensor) else value

    local = func(*map(ready, args), **{name: ready(value) for name, value in kwargs.items()})
    return _result(region, func, args, local, Cut(ndim + from_end, packs))


def beside(region: CutRegion, value: Tensor, part: TensorPart, from_end: int) -> Tensor:
    """The share of a value that is broadcast against a part."""
    if type(value) is TensorPart:
        return value.local
    dim = value.ndim + from_end
    if cut_of(value) is None and (dim < 0 or value.shape[dim] == 1):
        return region.enter(value)
    region.check_join(value, part)
    return region.local(value, Cut(dim, part.cut.packs))


def _result(region: CutRegion, func: Any, args: Args, local: Tensor, cut: Cut) -> TensorPart:
    return args[0] if _is_in_place(func) else region.part(local, cut)


def _is_in_place(func: Any) -> bool:
    name: str = getattr(func, "__name__", "")
    is_operator = name.startswith("__i") and name != "__invert__"
    return is_operator or (name.endswith("_") and not name.endswith("__"))


def cast(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """`x.to(...)` and `x.type_as(y)`, where y gives its dtype only."""
    rest = [value.local if type(value) is TensorPart else value for value in args[1:]]
    named = {
        key: value.local if type(value) is TensorPart else value for key, value in kwargs.items()
    }
    if type(args[0]) is not TensorPart:
        return func(args[0], *rest, **named)
    return region.part(func(args[0].local, *rest, **named), args[0].cut)


def _along(at: int, default: int | None) -> Rule:
    """A rule for functions that work along a dim, given as the argument with number `at`."""

    def along(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> Any:
        x = args[0] if args else kwargs["input"]
        if type(x) is not TensorPart or any(isinstance(value, Tensor) for value in args[1:]):
            raise CannotCut(f"{_name(func)} is given several tensors", gathers=True)
        given = kwargs.get("dim", kwargs.get("axis", args[at] if len(args) > at else default))
        if given is None or isinstance(given, bool):
            raise CannotCut(f"{_name(func)} is taken over the dim that is cut")
        dims = {int(d) % x.ndim for d in ([given] if isinstance(given, int) else given)}
        if x.cut.dim in dims or not dims:
            raise CannotCut(f"{_name(func)} is taken over the dim that is cut")
        return _shifted(region, x, dims, func(x.local, *args[1:], **kwargs))

    return along


def _shifted(region: CutRegion, x: TensorPart, dims: set[int], result: Any) -> Any:
    if isinstance(result, tuple):
        return type(result)([_shifted(region, x, dims, one) for one in result])
    gone = sum(d < x.cut.dim for d in dims) if result.ndim < x.ndim else 0
    return region.part(result, Cut(x.cut.dim - gone, x.cut.packs))


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def layer_norm(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    x, *rest = args
    shape = argument(args, kwargs, "normalized_shape", 1)
    if x.cut.dim >= x.ndim - len(shape):
        raise CannotCut("a norm is taken over the dim that is cut")
    ready = [region.enter(v) if isinstance(v, Tensor) else v for v in rest]
    named = {k: region.enter(v) if isinstance(v, Tensor) else v for k, v in kwargs.items()}
    return region.part(func(x.local, *ready, **named), x.cut)


def channel_norm(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    """BatchNorm and its kin: statistics and affine parameters belong to channels."""
    x, *rest = args
    if type(x) is not TensorPart or x.cut.dim != 1:
        raise CannotCut("it is normalised over the dim that is cut")
    along = Cut(0, x.cut.packs)

    def ready(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        region.follow(value, along)
        if value.shape[0] == x.local.shape[1] and cut_of(value) is None:
            return value  # statistics that were cut, in a buffer that was replaced since
        return region.local(value, along)

    if func is F.group_norm or func is torch.group_norm:
        groups = kwargs.pop("num_groups", None) or rest.pop(0)
        if groups % (region.num_ranks * x.cut.packs):
            raise CannotCut(f"{region.num_ranks} ranks do not divide {groups} groups")
        rest.insert(0, groups // region.num_ranks)
    named = {key: ready(value) for key, value in kwargs.items()}
    return region.part(func(x.local, *map(ready, rest), **named), x.cut)


def channelwise(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Pooling, resizing: over the dims behind the channels."""
    x = args[0]
    digits = [int(letter) for letter in _name(func) if letter.isdigit()]
    if x.cut.dim >= x.ndim - (digits[0] if digits else x.ndim - 2):
        raise CannotCut(f"{_name(func)} is taken over the dim that is cut")
    return _shifted(region, x, set(), func(x.local, *args[1:], **kwargs))


def pad(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    x = args[0]
    padding = argument(args, kwargs, "pad", 1)
    if x.cut.dim >= x.ndim - len(padding) // 2:
        raise CannotCut("the dim that is cut is padded")
    return region.part(func(x.local, *args[1:], **kwargs), x.cut)


def triangle(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    if args[0].cut.dim >= args[0].ndim - 2:
        raise CannotCut("the dim that is cut is cut to a triangle")
    return region.part(func(args[0].local, *args[1:], **kwargs), args[0].cut)


def glu(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    x = args[0]
    dim = int(argument(args, kwargs, "dim", 1, -1)) % x.ndim
    if dim == x.cut.dim and x.cut.packs % 2:
        raise CannotCut("its two halves gate each other", repack=True)
    packs = x.cut.packs // 2 if dim == x.cut.dim else x.cut.packs
    return region.part(func(x.local, dim), Cut(x.cut.dim, packs))


def ones_of_whole(part: TensorPart) -> Tensor:
    """Ones of the whole's shape, laid out in memory as the uncut model's value would be."""
    blank = torch.empty_strided(
        tuple(part.shape), strides_of_whole(part), dtype=part.local.dtype, device=part.local.device
    )
    return blank.fill_(1)


def dropout(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> TensorPart:
    """The mask is drawn for all and sliced: one stream of numbers for any number of ranks."""
    x, *rest = args
    given = dict(zip(("p", "training", "inplace"), rest)) | kwargs
    given["training"] = given.pop("train", given.get("training", True))
    p, in_place = given.get("p", 0.5), given.get("inplace", False)
    if not given["training"] or p == 0:
        return x  # type: ignore[no-any-return]
    with torch.no_grad():
        mask = func(ones_of_whole(x), p, True)
        mask = share_of(mask, x.cut, region.rank, region.num_ranks)
    if in_place:
        x.check_write()
        x.local.mul_(mask)
        return x  # type: ignore[no-any-return]
    return region.part(x.local * mask, x.cut)


def made_whole(region: CutRegion, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Losses: what the model would return next is made whole a moment earlier."""
    ready = [region.whole(value) if type(value) is TensorPart else value for value in args]
    named = {k: region.whole(v) if type(v) is TensorPart else v for k, v in kwargs.items()}
    return func(*ready, **named)


_POOLS = " ".join(
    f"{kind}_pool{dims}d _{kind}_pool{dims}d {kind}_pool{dims}d_with_indices"
    for kind in ("max", "avg", "lp", "adaptive_max", "adaptive_avg")
    for dims in (1, 2, 3)
)

ELEMENT_RULES: dict[Any, Rule] = table(
    (_POINTWISE, pointwise),
    ("to type_as type", cast),
    ("sum mean amax amin max min argmax argmin prod any all logsumexp var std", _along(1, None)),
    ("cumsum cumprod softmax log_softmax", _along(1, None)),
    ("sort argsort", _along(1, -1)),
    ("topk", _along(2, -1)),
    ("norm", _along(2, None)),
    ("normalize", _along(2, 1)),
    ("layer_norm rms_norm", layer_norm),
    ("batch_norm instance_norm group_norm", channel_norm),
    (_POOLS + " interpolate upsample", channelwise),
    ("pad", pad),
    ("tril triu", triangle),
    ("glu", glu),
    ("dropout dropout1d dropout2d dropout3d dropout_ feature_dropout", dropout),
    (
        "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
        "binary_cross_entropy_with_logits kl_div gaussian_nll_loss",
        made_whole,
    ),
)
