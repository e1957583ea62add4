"""The tape of one forward pass: its events, with what each used, made and cost.

A tape holds names, numbers, shapes and costs, and no tensors. Recorded from the same inputs it is
the same on every rank, so ranks decide on it alone and agree.

Read next: `recorder.py`, which writes a tape, `cuts.py`, which decides on it, and
`stage_runner.py`, which runs a part of it.
"""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from shoal.numerics.randomness import PieceSeeds

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)


class TapeValue(NamedTuple):
    """A tensor that an event made."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    @property
    def order(self) -> tuple[int, ...]:
        """Its dims as memory has them. Sent so, it arrives in the layout that it was made in."""
        dims = tuple(range(len(self.shape)))
        like = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        if like.is_contiguous() or 0 in self.stride:
            return dims
        return tuple(sorted(dims, key=lambda dim: -self.stride[dim]))

    @property
    def sent_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[dim] for dim in self.order)


class ValueLeaf(NamedTuple):
    """A leaf of an event's result: the value of this number, new or there before."""

    number: int


class ArgumentLeaf(NamedTuple):
    """A leaf of an event's result: the argument at this place, as it is."""

    place: int


class OpaqueLeaf(NamedTuple):
    """A leaf of an event's result: an object of some kind, a cache say, that is not carried."""

    kind: type


class PlainLeaf(NamedTuple):
    """A leaf of an event's result that is not a tensor."""

    value: Any


Leaf = ValueLeaf | ArgumentLeaf | OpaqueLeaf | PlainLeaf
Path = tuple[Any, ...]  # of keys, to something in a tree


@dataclass(frozen=True)
class Event:
    name: str  # of the unit, or of the operation
    is_unit: bool
    where: str  # the open module whose code called it
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]  # of the unit, by their first names
    changes: tuple[str, ...]  # those of them that it writes into
    uses: frozenset[int]
    result: tuple[Leaf, ...]
    spec: TreeSpec
    only: int | None  # the number of the result if that is a single value
    passes: bool  # whether a leaf of the result is an argument
    adopts: tuple[tuple[int, int], ...]  # (place, number): raw arguments that it wrote into
    mutates: bool
    cost: float
    block: int  # that the random generator was last set for, before the event
    block_after: int | None  # that it was last set for by the event
    is_fresh: bool  # no event has drawn since it was last set: what was drawn can be drawn again
    is_inside: bool  # of the same checkpointed region as the event before it


@dataclass
class Tape:
    model: str
    signature: Any  # of the inputs it was recorded with
    open: frozenset[str]
    drawing: frozenset[str]  # what has to be an event because it draws
    parameters: dict[str, bool]  # name -> whether it is trained
    seeds: PieceSeeds | None
    events: list[Event] = field(default_factory=list)
    values: dict[int, TapeValue] = field(default_factory=dict)
    need_gradient: set[int] = field(default_factory=set)
    made_at: dict[int, int] = field(default_factory=dict)  # value -> event
    final: frozenset[int] = frozenset()  # values in the model's output
    draws_again: set[str] = field(default_factory=set)  # raw operations that draw, on every stage
    # Objects in the output that events filled which did not return them, by the first of those.
    partial: dict[Path, int] = field(default_factory=dict)
    uncut: set[int] = field(default_factory=set)  # between these events views would come apart


def is_trained(parameter: nn.Parameter) -> bool:
    """Whether it needs a gradient, here or, if it was dropped, on the rank that holds it."""
    return bool(getattr(parameter, "trained_elsewhere", parameter.requires_grad))


def signature(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """What decides which tape fits: form of the inputs, training or not, gradients or not."""
    return form_of(args), form_of(kwargs), model.training, torch.is_grad_enabled()


def form_of(item: Any) -> Any:
    """The same for items that differ only in the numbers of their tensors. Asked for every input of
    a round, so the usual containers are gone through without torch's tree."""
    if isinstance(item, Tensor):
        return tuple(item.shape), item.dtype
    kind = type(item)
    if kind is tuple or kind is list:
        return kind, *map(form_of, item)
    if kind is dict:
        return kind, tuple(item), *map(form_of, item.values())
    if is_plain(item):
        return repr(item)
    items, spec = tree_flatten(item)
    is_leaf = len(items) == 1 and items[0] is item
    return kind if is_leaf else (str(spec), *map(form_of, items))


def units_of(model: nn.Module, open_modules: frozenset[str]) -> frozenset[str]:
    """The submodules that stay whole: children of open modules, seen through containers."""
    found: dict[int, str] = {}  # a module with two names is one unit

    def walk(prefix: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            path = f"{prefix}.{name}" if prefix else name
            if path in open_modules or isinstance(child, nn.ModuleList | nn.ModuleDict):
                walk(path, child)
            else:
                found.setdefault(id(child), path)

    walk("", model)
    return frozenset(found.values())


def find_tensors(tree: Any, depth: int = 5) -> Iterator[Tensor]:
    """The tensors in any objects, modules left out."""
    if isinstance(tree, Tensor):
        yield tree
    elif depth and not isinstance(tree, (nn.Module, type, *_PLAIN)):
        items: Any = ()
        if isinstance(tree, dict):
            items = tree.values()
        elif isinstance(tree, list | tuple | set):
            items = tree
        elif isinstance(tree, slice):
            items = (tree.start, tree.stop, tree.step)
        elif hasattr(tree, "__dict__") and not inspect.isroutine(tree):
            items = vars(tree).values()
        for item in items:
            yield from find_tensors(item, depth - 1)


def objects_in(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The objects in the lists, tuples and dicts of an output that are none, with their paths."""
    if isinstance(tree, dict | list | tuple):
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from objects_in(item, (*path, key))
    elif not isinstance(tree, Tensor) and not is_plain(tree):
        yield path, tree


def is_plain(item: Any) -> bool:
    return isinstance(item, _PLAIN)


def names_of_buffers(model: nn.Module) -> dict[tuple[int, str], str]:
    """The first name of each buffer, by the module that holds it and its name in there."""
    first: dict[int, str] = {}
    return {
        (id(module), name): first.setdefault(id(buffer), f"{path}.{name}".lstrip("."))
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }
