"""Finds which matrices of a model can be cut over ranks, by running its forward a few times.

A matrix that meets a whole value is cut by columns, one that meets a part is cut by rows, so the
plan of Megatron-LM appears by itself: two matrices, one message. Where something between them
cannot be computed on parts, the matrices that led there are packed differently (query, key and
value in one) or stay whole, and the probe starts again. The reason is kept for each.

Nothing is sent: a probe plays rank 0 and makes up what others would send, so values are
meaningless and only shapes count. Cost: a forward for every matrix that cannot be cut as first
thought, a second or two in all for small models.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils import checkpoint as checkpoints
from torch.utils._pytree import tree_leaves

from shoal.comm.collectives import Group
from shoal.errors import PlanError, found_in
from shoal.numerics.compiled import is_transformed
from shoal.parallel.layout import Cut
from shoal.parallel.tensor.forward import DECOMPOSED, PART_RULES, CutForward, follow_rule
from shoal.parallel.tensor.matmul_rules import MATRIX_RULES
from shoal.parallel.tensor.part import (
    METADATA_FUNCTIONS,
    CannotCut,
    CutRegion,
    TensorPart,
    answer_metadata,
    cut_of,
)
from shoal.parallel.tensor.search_state import SearchState
from shoal.parallel.tensor.view_rules import SHAPE_RULES, Args, Kwargs

SMALL = 512  # elements of a matrix that is not worth a message
SMALL_TABLE = 32  # a table is cut if it holds more than this fraction of the model
_SPLITS = {func for func, rule in SHAPE_RULES.items() if rule.__name__ in ("split", "chunk")}
_TURNS = {func for func, rule in SHAPE_RULES.items() if "transpose" in rule.__name__}


class ParameterView(NamedTuple):
    """A parameter, or a view of one: dim i of it is dim `dims[i]` of the parameter."""

    name: str
    dims: tuple[int, ...]
    tensor: Tensor  # kept, so that its id is not given to another
    sizes: tuple[int, ...]  # of the parameter; the view may be a piece of it

    def in_parameter(self, cut: Cut) -> Cut:
        """The parameter's cut, for one of this view."""
        size, whole = self.tensor.shape[cut.dim], self.sizes[self.dims[cut.dim]]
        if whole * cut.packs % size:
            raise CannotCut("a piece of it is cut in packs that do not fit the whole", repack=True)
        return Cut(self.dims[cut.dim], whole * cut.packs // size)

    def from_parameter(self, cut: Cut) -> Cut:
        """This view's cut, for the parameter's."""
        if cut.dim not in self.dims:
            raise CannotCut("it is used twice, in different ways")
        at = self.dims.index(cut.dim)
        size, whole = self.tensor.shape[at], self.sizes[cut.dim]
        if size * cut.packs % whole:
            raise CannotCut("a piece of it is cut in packs that do not fit", repack=True)
        return Cut(at, size * cut.packs // whole)


class ProbeRegion(CutRegion):
    """Decides, and sends nothing."""

    def __init__(self, state: SearchState, model: nn.Module):
        group = Group()
        group.num_ranks = state.num_ranks
        super().__init__(group)
        self.state = state
        self.views = {
            id(p): ParameterView(name, tuple(range(p.ndim)), p, tuple(p.shape))
            for name, p in model.named_parameters()
        }
        self.cuts: dict[str, Cut] = {}
        self.hows: dict[str, str] = {}
        self.columns: dict[str, int] = {}  # matrices cut by columns so far, and their columns
        self.new: set[str] = set()
        self.notes: dict[str, str] = {}  # why a matrix was left whole in passing
        self.seen: set[str] = set()  # whatever a function was given
        self.running: list[nn.Module] = []
        self.open: set[nn.Module] = set()  # a part went into them or came out
        self.odd_heads: dict[int, int] = {}  # module -> heads that cannot be shared
        self.num_checkpoints = 0  # that are running, and would run again without a mode

    def enter(self, x: Tensor) -> Tensor:
        return x

    def leave(self, y: Tensor) -> Tensor:
        return y

    def whole(self, value: Tensor) -> Tensor:
        if type(value) is not TensorPart:
            return value
        return torch.cat([value.local] * self.num_ranks, value.cut.dim)

    def may_gather(self, part: TensorPart) -> bool:
        return part.origin <= self.state.gathered

    def matrix_cut(self, matrix: Tensor, out: int, into: int, x: Tensor, x_dim: int) -> Cut | None:
        view = self.views.get(id(matrix))
        if view is None:
            return cut_of(matrix)
        name = view.name
        self.state.order.setdefault(name, len(self.state.order))
        if name not in self.cuts:
            found = self._decide(view, out, into, x, x_dim)
            if found is None:
                return None
            if found.dim == out:
                self.new.add(name)
                self.columns[name] = matrix.shape[out]
            self.cuts[name] = view.in_parameter(found)
            self.hows[name] = "columns" if found.dim == out else "rows"
        at = view.from_parameter(self.cuts[name])
        if at.dim == out:
            self.new.add(name)
            self.columns[name] = matrix.shape[out]
        return at

    def _decide(
        self, view: ParameterView, out: int, into: int, x: Tensor, x_dim: int
    ) -> Cut | None:
        name, matrix = view.name, view.tensor
        choice, of_x = self.state.choices.get(name), cut_of(x)
        how = None if choice is None else choice.how
        if name in self.state.whole or how == "whole":
            return None
        if of_x is not None:
            is_row = of_x.dim == x_dim and how != "column"
            return Cut(into, of_x.packs) if is_row else None
        if how == "row":
            if matrix.shape[into] % self.num_ranks == 0:
                return Cut(into)
            self.state.keep_whole(
                name, f"{self.num_ranks} ranks do not divide {matrix.shape[into]}"
            )
            return None
        if matrix.numel() < SMALL and how is None and not self.state.cuts_small:
            self.notes[name] = f"it has fewer than {SMALL} elements"
            return None
        packs = 1 if how == "column" else self.state.packs_of(name, matrix.shape[out])
        if packs is None or matrix.shape[out] % self.num_ranks:
            reason = f"{self.num_ranks} ranks do not divide {matrix.shape[out]} columns"
            self.state.keep_whole(name, reason)
            return None
        return Cut(out, packs)

    def table_cut(self, table: Tensor) -> Cut | None:
        view = self.views.get(id(table))
        if view is None or view.name in self.state.whole:
            return None
        name, choice = view.name, self.state.choices.get(view.name)
        if choice is not None and choice.how == "whole":
            return None
        if name in self.cuts:
            return self.cuts[name]
        is_small = table.numel() * SMALL_TABLE < self.state.num_elements
        if is_small and choice is None and not self.state.cuts_small:
            self.state.keep_whole(name, "it is a small part of the model")
        for dim in (1, 0) if choice is not None and choice.how == "column" else (0, 1):
            if table.shape[dim] % self.num_ranks == 0 and name not in self.state.whole:
                self.cuts[name] = Cut(dim)
                self.hows[name] = "rows of a table" if dim == 0 else "columns of a table"
                return self.cuts[name]
        if name not in self.state.whole:
            sizes = " x ".join(map(str, table.shape))
            self.state.keep_whole(name, f"{self.num_ranks} ranks do not divide {sizes}")
        return None

    def follow(self, value: Tensor | None, cut: Cut) -> None:
        view, name = self.views.get(id(value)), self.state.names.get(id(value))
        if view is not None:
            name, cut = view.name, view.in_parameter(cut)
        if name is None or value is None:
            return
        if self.cuts.setdefault(name, cut) != cut:
            raise CannotCut("one of its vectors is used twice, in different ways")
        self.hows.setdefault(name, "with its columns")

    def check_join(self, value: Tensor, part: TensorPart) -> None:
        is_parameter = id(value) in self.views
        if not is_parameter and part.cut.dim == part.ndim - 1 and value.shape == part.shape:
            raise CannotCut("its result meets a whole activation (a residual)")

    def check_heads(self, num_heads: int, is_attention: bool) -> None:
        if num_heads % self.num_ranks == 0 or not self.running:
            return
        module = self.running[-1]
        named = f"{self.state.modules.get(id(module))} {type(module).__name__}".lower()
        if is_attention or "attention" in named or "attn" in named:
            self.odd_heads[id(module)] = num_heads


class Probe(CutForward):
    """One attempt: every function either works on parts or is refused, with who is to blame."""

    region: ProbeRegion

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA_FUNCTIONS:
            return (
                answer_metadata(func, args, kwargs)
                if type(args[0]) is TensorPart
                else func(*args, **kwargs)
            )
        leaves = tree_leaves((args, kwargs))
        parts = [leaf for leaf in leaves if type(leaf) is TensorPart]
        origin = frozenset().union(*(part.origin for part in parts))
        names = self.region.state.names
        self.region.seen.update(names[id(leaf)] for leaf in leaves if id(leaf) in names)
        self.region.new = set()
        try:
            result = self._try(func, args, kwargs, bool(parts))
            if (parts or self.region.new) and is_transformed():
                raise CannotCut("torch.func runs what computes with it")
        except CannotCut as refused:
            if not hasattr(refused, "blame"):
                refused.blame = origin | self.region.new  # type: ignore[attr-defined]
            raise
        if self.region.num_checkpoints and (parts or self.region.new):
            raise _computed_again("without a context_fn")
        for leaf in tree_leaves(result):
            if type(leaf) is TensorPart and not hasattr(leaf, "origin"):
                leaf.origin = origin | self.region.new
        return result

    def _try(self, func: Any, args: Args, kwargs: Kwargs, has_parts: bool) -> Any:
        if func in DECOMPOSED:
            with self:
                return DECOMPOSED[func](*args, **kwargs)
        rule, for_parts = MATRIX_RULES.get(func), PART_RULES.get(func) if has_parts else None
        name = getattr(func, "__name__", str(func))
        try:
            if rule is not None:
                return rule(self.region, func, args, kwargs)
            if for_parts is not None:
                return follow_rule(for_parts, self.region, func, args, kwargs)
            if has_parts:
                raise CannotCut(f"{name} has no rule for parts", gathers=True)
        except CannotCut as refused:
            if has_parts and refused.gathers:
                return self._gathered(func, args, kwargs, refused.reason)
            if has_parts or self.region.new:
                raise
        except PlanError:
            raise
        except Exception as error:
            reason = f"{name} failed on parts: {_first_line(error)}"
            if not has_parts:
                raise CannotCut(reason) from error
            return self._gathered(func, args, kwargs, reason)
        result = func(*args, **kwargs)
        self._track(func, args, result, name)
        return result

    def _gathered(self, func: Any, args: Args, kwargs: Kwargs, reason: str) -> Any:
        """Computed on whole values, as the forward will; refused if no result is cut again."""
        try:
            result = self.on_whole_values(func, args, kwargs, cuts_again=True)
        except Exception as error:
            raise CannotCut(f"{reason}, nor for the whole: {_first_line(error)}") from error
        is_written = result is None and func is Tensor.__setitem__ and type(args[0]) is TensorPart
        if not is_written and not any(type(leaf) is TensorPart for leaf in tree_leaves(result)):
            raise CannotCut(reason)
        return result

    def _watched_apply(self, cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Refuse what computes again outside; leave whole what is handed to a function's code."""
        region, leaves = self.region, tree_leaves((args, kwargs))
        if cls is checkpoints.CheckpointFunction:
            raise _computed_again("with use_reentrant=True")
        reason = f"{cls.__name__} is an autograd function of its own"
        given = {region.views[id(leaf)].name for leaf in leaves if id(leaf) in region.views}
        for name in given - region.state.whole.keys():
            region.state.keep_whole(name, reason)
        parts = [leaf for leaf in leaves if type(leaf) is TensorPart]
        origin = frozenset().union(*(part.origin for part in parts))
        apply = self._apply.__get__(None, cls)
        try:
            if given & region.cuts.keys():
                raise CannotCut(reason)
            if not parts:
                return apply(*args, **kwargs)
            result = self._gathered(apply, args, kwargs, reason)
        except CannotCut as refused:
            refused.blame = origin | given & region.cuts.keys()  # type: ignore[attr-defined]
            raise
        for leaf in tree_leaves(result):
            if type(leaf) is TensorPart:
                leaf.origin = origin
        return result

    def _track(self, func: Any, args: Args, result: Any, name: str) -> None:
        """Follow views of parameters; note by what else a parameter is used."""
        views = self.region.views
        first = views.get(id(args[0])) if args else None
        dims = None if first is None else _dims_after(func, args, result)
        if first is not None and dims is not None:
            kept = tuple(first.dims[dim] for dim in dims)
            for piece in result if isinstance(result, tuple | list) else [result]:
                views[id(piece)] = ParameterView(first.name, kept, piece, first.sizes)
            return
        if func in METADATA_FUNCTIONS or name == "__set__":
            return
        for value in tree_leaves(args):
            if isinstance(value, Tensor) and id(value) in views:
                self.region.notes.setdefault(views[id(value)].name, f"{name} cannot use parts")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _dims_after(func: Any, args: Args, result: Any) -> list[int] | None:
    """The dims that a view of a parameter has kept, in order; None if it is no such view."""
    x = args[0]
    if func in _SPLITS:
        return list(range(x.ndim))
    if x.ndim >= 2 and func in _TURNS:
        strides = list(range(1, x.ndim + 1))
        turned = func(torch.empty(1).as_strided([1] * x.ndim, strides), *args[1:])
        return [stride - 1 for stride in turned.stride()]
    if x.ndim >= 2 and func is Tensor.__getitem__ and isinstance(args[1], int):
        return list(range(1, x.ndim))
    return None


@contextmanager
def preserve_model(model: nn.Module) -> Iterator[None]:
    """Run the model without a trace: buffers, random state, tables that renormalise themselves."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    tables = [
        (module.weight, module.weight.detach().clone())
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
    ]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                buffer.copy_(before)
                module._buffers[name] = buffer
            for table, before in tables:
                table.copy_(before)


def _computed_again(how: str) -> PlanError:
    return PlanError(
        f"The model calls torch.utils.checkpoint {how}, which computes again outside of what runs "
        "a cut model. Leave it out of the model, and use recompute=blocks in the plan."
    )


@contextmanager
def _watched(region: ProbeRegion) -> Iterator[None]:
    """Know which module runs, and whether it would run again without the mode."""

    def begin(module: nn.Module, _: Any) -> None:
        region.running.append(module)

    def end(module: nn.Module, inputs: Any, output: Any) -> None:
        region.running.pop()
        if any(type(leaf) is TensorPart for leaf in tree_leaves((inputs, output))):
            region.open.add(module)

    begin_checkpoint = checkpoints._checkpoint_without_reentrant_generator

    def checkpointed(function: Any, preserve: bool, context: Any, *rest: Any, **more: Any) -> Any:
        is_bare = context is checkpoints.noop_context_fn
        region.num_checkpoints += is_bare
        try:  # a generator that pauses while the function runs
            yield from begin_checkpoint(function, preserve, context, *rest, **more)
        finally:
            region.num_checkpoints -= is_bare

    handles = [
        hooks.register_module_forward_pre_hook(begin),
        hooks.register_module_forward_hook(end, always_call=True),
    ]
    checkpoints._checkpoint_without_reentrant_generator = checkpointed  # type: ignore[assignment]
    try:
        yield
    finally:
        checkpoints._checkpoint_without_reentrant_generator = begin_checkpoint
        for handle in handles:
            handle.remove()


def search(
    model: nn.Module, forwards: Sequence[Callable[[], Any]], state: SearchState
) -> ProbeRegion:
    """Probe until an attempt comes through."""
    for _ in range(20 + 8 * len(state.names)):
        region = ProbeRegion(state, model)
        try:
            with preserve_model(model), _watched(region), Probe(region):
                for forward in forwards:
                    forward()
            return region
        except Exception as error:
            if (wrong := found_in(error, PlanError)) is not None:
                raise wrong from None
            if not region.columns:
                raise
            line = f"it fails on parts: {_first_line(error)}"
            refused = found_in(error, CannotCut) or CannotCut(line)
            blame: frozenset[str] = getattr(refused, "blame", frozenset())
            blamed = [name for name in region.columns if name in blame]
            state.learn(refused, blamed or list(region.columns)[-1:], region.columns)
            del refused  # with its frames, and all that they computed
    raise AssertionError("the probe does not end")
