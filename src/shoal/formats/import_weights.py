"""Import weights as a checkpoint of step 0 that holds only a model.

Tensors stream through memory one at a time and are hashed as they are written. If the model is
known they are fitted to it: names and shapes must agree, elements are cast to the model's dtype,
and a tensor that the model has under two names is stored under the first.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.chunks import PlacedChunk, TensorRegion, lay_out_file
from shoal.checkpoint.commit import (
    commit_checkpoint,
    merge_tensors,
    new_target,
    open_draft,
    write_chunks,
)
from shoal.checkpoint.dtypes import canonical_names, dtype_name, tensor_bytes
from shoal.checkpoint.find import PathOrUrl
from shoal.checkpoint.manifest import Manifest, Origin, Progress
from shoal.errors import BadCheckpoint
from shoal.formats.match import match_tensors
from shoal.formats.weights import MODEL, ModelWeights
from shoal.parallel.boxes import whole_box
from shoal.storage.store import Draft


class TargetTensor(NamedTuple):
    """A tensor of the new checkpoint: its name in the source, and its new dtype."""

    source: str
    dtype: torch.dtype


def target_all(source: ModelWeights) -> dict[str, TargetTensor]:
    """Take every tensor, under its own name and in its own dtype."""
    return {name: TargetTensor(name, source.dtype(name)) for name in source.names}


def target_model(source: ModelWeights, model: nn.Module) -> dict[str, TargetTensor]:
    """Take the tensors of a model; refuses a source of another model."""
    found = match_tensors(source, model)
    if problems := found.problems():
        raise BadCheckpoint(
            f"It does not match the model ({problems}). --prefix takes only names that begin with "
            "a prefix, and cuts it off."
        )
    first, own = canonical_names(model), model.state_dict()
    for name in source.names:
        known_as = found.rule.rename(name, own)
        kept = found.source_names[first[known_as]] if known_as in first else name
        if kept != name and not torch.equal(source.whole(kept), source.whole(name)):
            raise BadCheckpoint(f"{kept} and {name} are one tensor in the model, and differ.")
    return {
        name: TargetTensor(found.source_names[name], own[name].dtype)
        for name in own
        if name in found.source_names
    }


def import_weights(
    source: ModelWeights, wanted: dict[str, TargetTensor], where: PathOrUrl, recipe: str
) -> None:
    """Write a checkpoint at a path or URL; it appears whole or not at all."""
    with open_draft(new_target(where)) as draft:
        _write(_Import(source, wanted, recipe), draft)


class _Import(NamedTuple):
    source: ModelWeights
    wanted: dict[str, TargetTensor]
    recipe: str

    def held(self) -> list[TensorRegion]:
        shapes = {name: self.source.shape(one.source) for name, one in self.wanted.items()}
        return [
            TensorRegion(MODEL + name, dtype_name(one.dtype), shapes[name], whole_box(shapes[name]))
            for name, one in self.wanted.items()
        ]

    def tensor(self, name: str) -> Tensor:
        one = self.wanted[name.removeprefix(MODEL)]
        return self.source.whole(one.source).to(one.dtype)


def _write(content: _Import, draft: Draft) -> None:
    placed = lay_out_file(content.held())
    contents = ([chunk] for chunk in _chunks(content, placed))
    file, tensors = write_chunks(draft, 0, placed, contents)
    manifest = Manifest(
        manifests.FORMAT,
        manifests.VERSION,
        Progress(step=0, samples=0, epoch=0, batch=0),
        Origin(content.recipe, {}, "", 1, 0, {"torch": str(torch.__version__)}),
        {},
        (file,),
        merge_tensors([tensors]),
    )
    commit_checkpoint(draft, manifest)


def _chunks(content: _Import, placed: list[PlacedChunk]) -> Iterator[memoryview]:
    """The bytes of each chunk; the chunks of a tensor follow one another."""
    name, tensor = "", torch.empty(0)
    for one in placed:
        if one.region.name != name:
            name, tensor = one.region.name, content.tensor(one.region.name)
        yield tensor_bytes(one.region.box.of(tensor))
