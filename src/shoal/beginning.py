"""Beginning a run with what another one has learnt, or another program.

`--from` gives a new run the weights of a checkpoint, or of a file that could be imported; with
everything, also the optimizer, the step and the place in the data. What does not match the model
is refused; partly it can be left out, and is listed.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal.checkpoint.finding import Where
from shoal.checkpoint.foreign.adopt import first_names
from shoal.checkpoint.foreign.opening import locate
from shoal.checkpoint.foreign.weights import MODEL, Model, Weights
from shoal.checkpoint.load import Opened
from shoal.checkpoint.manifest import Origin
from shoal.errors import UsageError
from shoal.parallel.layout import Slice
from shoal.sync.state import Given

_NAMED = 5


class Match(NamedTuple):
    """How the tensors of a source and of a model go together."""

    taken: dict[str, str]  # of the model -> of the source
    missing: list[str]  # in the source
    strange: list[str]  # to the model
    other_shape: list[str]
    other_kind: list[str]  # whole numbers here, fractions there, or complex ones

    def problems(self) -> list[str]:
        told = (
            ("not in it", self.missing),
            ("not in the model", self.strange),
            ("of another shape", self.other_shape),
            ("of another kind of numbers", self.other_kind),
        )
        return [f"{what}: {_some(names)}" for what, names in told if names]


class Beginning(NamedTuple):
    """What a run begins with, found before its ranks start."""

    place: str
    open: Callable[[], Weights]
    everything: bool
    match: Match
    origin: Origin | None = None  # of the run whose place in the data is taken as well
    told: str = ""  # which of several checkpoints it is, and which were passed over

    def __str__(self) -> str:
        what = "everything" if self.everything else f"{len(self.match.taken)} tensors"
        begins = "; ".join([f"beginning with {what} of {self.place}", *self.match.problems()])
        return "\n".join(filter(None, (self.told, begins)))

    def source(self, own: Given) -> "Opened | Taken":
        """What a rank takes over; `own` is its state as the seed made it."""
        source = self.open()
        if self.everything:
            assert isinstance(source, Opened)
            return source
        return Taken(own, source, self.match.taken)


def find_beginning(where: Where, model: nn.Module, *, everything: bool, partial: bool) -> Beginning:
    """Look at a source before ranks start, and refuse what does not match."""
    source, place, again, told = locate(where)
    if everything and not (isinstance(source, Opened) and source.plain):
        raise UsageError(
            f"{place} holds weights alone. Leave --take everything out, or give a checkpoint of a "
            "run."
        )
    found = match(source, model)
    if found.problems() and (everything or not partial):
        way_out = "" if everything else " --partial takes what matches and leaves out the rest."
        raise UsageError(
            f"{place} does not match the model. {'; '.join(found.problems())}.{way_out}"
        )
    if not found.taken:
        raise UsageError(f"{place} and the model have no tensor in common.")
    origin = source.manifest.origin if everything and isinstance(source, Opened) else None
    return Beginning(place, again, everything, found, origin, told)


def match(source: Weights, model: nn.Module) -> Match:
    """By name; a tensor that the model has under several may come under any of them."""
    first = first_names(model)
    there = Model(source)
    own = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
    extra = {name for name, _ in model.named_buffers()} - shapes.keys()  # it can make them again
    taken: dict[str, str] = {}
    other_shape, other_kind = [], []
    for name in there.names:
        if name in first and there.shape(name) != shapes[name]:
            other_shape.append(name)
        elif name in first and _kind(there.dtype(name)) != _kind(own[name].dtype):
            other_kind.append(name)
        elif name in first:
            taken.setdefault(first[name], name)
    missing = sorted(set(first.values()) - taken.keys() - {*other_shape, *other_kind})
    strange = sorted(set(there.names) - first.keys() - extra)
    return Match(taken, missing, strange, other_shape, other_kind)


class Taken:
    """A rank's own state, with the model's tensors from elsewhere; elements take its own types."""

    def __init__(self, own: Given, source: Weights, taken: dict[str, str]):
        self._own, self._source, self._taken = own, Model(source), taken
        self.plain: Any = own.plain

    def __contains__(self, name: str) -> bool:
        return name in self._own

    def dtype(self, name: str) -> torch.dtype:
        return self._own.dtype(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._own.shape(name)

    def fill(self, name: str, places: Sequence[Slice]) -> None:
        theirs = self._taken.get(name.removeprefix(MODEL)) if name.startswith(MODEL) else None
        if theirs is None:
            self._own.fill(name, places)
            return
        for place in places:
            read = torch.empty(place.tensor.shape, dtype=self._source.dtype(theirs))
            self._source.fill_part(theirs, place._replace(tensor=read))
            place.tensor.copy_(read)


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
