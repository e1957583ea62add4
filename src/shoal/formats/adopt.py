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
from shoal.checkpoint.chunks import Held, Placed, place
from shoal.checkpoint.finding import Where
from shoal.checkpoint.manifest import Manifest, Origin, Progress
from shoal.checkpoint.types import bytes_of, first_names, name_of_type
from shoal.checkpoint.writing import commit, free_place, joined, new_draft, write_chunks
from shoal.errors import BadCheckpoint
from shoal.formats.matching import match
from shoal.formats.weights import MODEL, Model
from shoal.parallel.boxes import whole_box
from shoal.storage.store import Draft


class Wanted(NamedTuple):
    """A tensor of the checkpoint to be: its name in the source, and the type it is to have."""

    source: str
    dtype: torch.dtype


def as_they_are(source: Model) -> dict[str, Wanted]:
    """Every tensor under its own name."""
    return {name: Wanted(name, source.dtype(name)) for name in source.names}


def fitted(source: Model, model: nn.Module) -> dict[str, Wanted]:
    """The tensors that a model needs; refuses a source that is of another model."""
    found = match(source, model)
    if problems := found.problems():
        raise BadCheckpoint(
            f"It does not match the model ({problems}). --prefix takes only names that begin with "
            "a prefix, and cuts it off."
        )
    first, own = first_names(model), model.state_dict()
    for name in source.names:
        kept = found.taken[first[name]] if name in first else name
        if kept != name and not torch.equal(source.whole(kept), source.whole(name)):
            raise BadCheckpoint(f"{kept} and {name} are one tensor in the model, and differ.")
    return {name: Wanted(found.taken[name], own[name].dtype) for name in own if name in found.taken}


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
    placed = place(content.held())
    contents = ([chunk] for chunk in _chunks(content, placed))
    file, tensors = write_chunks(draft, 0, placed, contents)
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
