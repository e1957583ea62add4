"""Weights from elsewhere become a checkpoint: of step 0, with nothing but a model in it.

They stream through memory one tensor at a time, and are hashed as they are written. If the model
is known they are fitted to it: names and shapes must agree, elements take the model's type, and a
tensor that the model knows under two names is kept under the first.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash
from torch import Tensor, nn

from shoal.checkpoint import manifest as manifests
from shoal.checkpoint.chunks import Placed, header, place
from shoal.checkpoint.dealing import Held
from shoal.checkpoint.foreign.weights import MODEL, Model, bytes_of
from shoal.checkpoint.manifest import BadCheckpoint, Chunk, File, Manifest, Origin, Progress
from shoal.checkpoint.storage import Directory, Draft
from shoal.checkpoint.types import name_of_type
from shoal.errors import UsageError
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


def adopt(source: Model, wanted: dict[str, Wanted], path: Path, recipe: str) -> None:
    """Write a checkpoint at `path`; it appears whole or not at all."""
    if os.path.lexists(path):
        raise UsageError(f"{path} is there already. Choose another place, or remove it first.")
    whole = Path(os.path.abspath(path))
    store = Directory(whole.parent)
    try:
        draft = store.begin(whole.name, f"import-{os.getpid()}")
        try:
            _write(_Import(source, wanted, recipe), draft)
        except BaseException:
            draft.discard()
            raise
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror or error}. Nothing was left there."
        ) from error


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
    file = "rank-00000.safetensors"
    placed = place(content.held())
    head = header(placed)
    hashes: list[str] = []
    draft.write(file, _parts(content, placed, head, hashes))
    size = len(head) + (placed[-1].stop if placed else 0)
    chunks: dict[str, list[Chunk]] = {}
    for one, digest in zip(placed, hashes, strict=True):
        box, found = one.held.box, chunks.setdefault(one.held.name, [])
        if box.numel:
            found.append(Chunk(box.offset, box.shape, 0, len(head) + one.start, digest))
    described = manifests.encode(
        Manifest(
            manifests.FORMAT,
            manifests.VERSION,
            Progress(step=0, samples=0, epoch=0, batch=0),
            Origin(content.recipe, {}, "", 1, 0, {"torch": str(torch.__version__)}),
            {},
            (File(file, size, len(head), xxhash.xxh3_128_hexdigest(head)),),
            tuple(
                manifests.Tensor(held.name, held.dtype, held.whole, tuple(chunks[held.name]))
                for held in sorted(content.held())
            ),
        )
    )
    manifests.decode(described, manifests.seal(described))  # never commit what no one would load
    draft.write(manifests.MANIFEST, [described])
    draft.write(manifests.SEAL, [manifests.seal(described)])
    draft.commit(drop=[])


def _parts(
    content: _Import, placed: list[Placed], head: bytes, hashes: list[str]
) -> Iterator[memoryview | bytes]:
    """The bytes of the file, hashed as they go by; chunks of one tensor stand together."""
    yield head
    name, tensor = "", torch.empty(0)
    for one in placed:
        if one.held.name != name:
            name, tensor = one.held.name, content.tensor(one.held.name)
        part = bytes_of(one.held.box.of(tensor))
        hashes.append(xxhash.xxh3_128_hexdigest(part))
        yield part
