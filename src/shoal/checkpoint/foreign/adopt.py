"""Weights from elsewhere become a checkpoint: of step 0, with nothing but a model in it.

They stream through memory one tensor at a time, and are hashed as they are written. If the model
is known they are fitted to it: names and shapes must agree, elements take the model's type, and a
tensor that the model knows under two names is kept under the first.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.chunks import Placed, place
from shoal.checkpoint.dealing import Held
from shoal.checkpoint.finding import Where
from shoal.checkpoint.foreign.weights import MODEL, Model
from shoal.checkpoint.manifest import BadCheckpoint, Manifest, Origin, Progress
from shoal.checkpoint.storage import Draft
from shoal.checkpoint.types import bytes_of, name_of_type
from shoal.checkpoint.writing import commit, free_place, hashed, joined, new_draft, write_chunks
from shoal.parallel.boxes import whole_box


class Wanted(NamedTuple):
    """A tensor of the checkpoint to be: its name in the source, and the type it is to have."""

    source: str
    dtype: torch.dtype


def as_they_are(source: Model) -> dict[str, Wanted]:
    """Every tensor under its own name."""
    return {name: Wanted(name, source.dtype(name)) for name in source.names}


def fitted(source: Model, model: nn.Module) -> dict[str, Wanted]:
    """The tensors that a model needs; refuses a source that is of another model."""
    first = first_names(model)
    own = model.state_dict()
    there = set(source.names)
    missing = sorted(set(first.values()) - {first[name] for name in there & first.keys()})
    strange = sorted(there - first.keys())
    for what, names in (("lacks", missing), ("has", strange)):
        if names:
            which = "which the model has" if what == "lacks" else "which the model does not have"
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise BadCheckpoint(
                f"It {what} {', '.join(names[:3])}{more}, {which}. Names must agree; "
                "--prefix takes only what stands under a prefix, and without it."
            )
    wanted: dict[str, Wanted] = {}
    for name in sorted(there, key=list(own).index):
        if source.shape(name) != tuple(own[name].shape):
            raise BadCheckpoint(
                f"{name} is {list(source.shape(name))}, and {list(own[name].shape)} in the model."
            )
        kept = wanted.setdefault(first[name], Wanted(name, own[name].dtype))
        if kept.source != name and not torch.equal(source.whole(kept.source), source.whole(name)):
            raise BadCheckpoint(
                f"{kept.source} and {name} are one tensor in the model, and differ."
            )
    return wanted


def first_names(model: nn.Module) -> dict[str, str]:
    """Of each name of a model's state the first name of the same tensor."""
    first: dict[str, str] = {}
    known: dict[tuple[int, tuple[int, ...], tuple[int, ...]], str] = {}
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        first[name] = known.setdefault(place, name) if tensor.numel() else name
    return first


def adopt(source: Model, wanted: dict[str, Wanted], where: Where, recipe: str) -> None:
    """Write a checkpoint at a path or URL; it appears whole or not at all."""
    with new_draft(free_place(where)) as draft:
        _write(_Import(source, wanted, recipe), draft)


class _Import(NamedTuple):
    source: Model
    wanted: dict[str, Wanted]
    recipe: str

    def held(self) -> list[Held]:
        shapes = {name: self.source.shape(one.source) for name, one in self.wanted.items()}
        return [
            Held(MODEL + name, name_of_type(one.dtype), shapes[name], whole_box(shapes[name]))
            for name, one in self.wanted.items()
        ]

    def tensor(self, name: str) -> Tensor:
        one = self.wanted[name.removeprefix(MODEL)]
        return self.source.whole(one.source).to(one.dtype)


def _write(content: _Import, draft: Draft) -> None:
    placed, hashes = place(content.held()), list[str]()
    parts = hashed(_chunks(content, placed), hashes)
    file, tensors = write_chunks(draft, 0, placed, parts, hashes)
    manifest = Manifest(
        manifests.FORMAT,
        manifests.VERSION,
        Progress(step=0, samples=0, epoch=0, batch=0),
        Origin(content.recipe, {}, "", 1, 0, {"torch": str(torch.__version__)}),
        {},
        (file,),
        joined([tensors]),
    )
    commit(draft, manifest)


def _chunks(content: _Import, placed: list[Placed]) -> Iterator[memoryview]:
    """The bytes of each chunk; those of one tensor stand together."""
    name, tensor = "", torch.empty(0)
    for one in placed:
        if one.held.name != name:
            name, tensor = one.held.name, content.tensor(one.held.name)
        yield bytes_of(one.held.box.of(tensor))
