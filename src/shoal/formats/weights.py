"""A model's tensors by name, from any source, one at a time.

`ForeignWeights` are tensors that another program wrote, with the same interface as a checkpoint and
the names of a checkpoint (`model.<name>`), so that the same code loads both. `ModelWeights` are the
tensors of the model only, under the model's own names: all exports read them. Neither holds more
than one tensor, or one part of it, in memory.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.checkpoint.dtypes import dtype_name
from shoal.checkpoint.manifest import ITEM_BYTES
from shoal.errors import BadCheckpoint, RecipeError, UsageError, sendable
from shoal.parallel.boxes import Box, tile, whole_box
from shoal.parallel.layout import Slice, whole_slice
from shoal.sync.lazy_tables import TOUCHED
from shoal.sync.replicas import REPLICAS, MergedReplicas, replica_name
from shoal.sync.state import StateSource, read_whole

MODEL = "model."


class Weights(StateSource, Protocol):
    """The interface of `CheckpointReader` and `ForeignWeights`."""

    def __iter__(self) -> Iterator[str]: ...
    def whole(self, name: str) -> Tensor: ...


class StoredPart(NamedTuple):
    """A box of a tensor, and how to read it."""

    box: Box
    read: Callable[[], Tensor]


class StoredTensor(NamedTuple):
    """A tensor in a foreign file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[StoredPart, ...]


def stored_whole(
    dtype: torch.dtype, shape: Sequence[int], read: Callable[[], Tensor]
) -> StoredTensor:
    """A tensor that is stored as one part."""
    box = whole_box(shape)
    return StoredTensor(dtype, box.shape, (StoredPart(box, read),) if box.numel else ())


class ForeignWeights:
    """Tensors that another program wrote. `left_out` names the entries that are no tensors."""

    def __init__(self, entries: Mapping[str, StoredTensor], left_out: Sequence[str] = ()):
        self.plain: Mapping[str, Any] = {}
        self.left_out = tuple(left_out)
        for name, found in entries.items():
            _check(name, found)
        self._entries = {f"{MODEL}{name}": found for name, found in entries.items()}

    def under(self, prefix: str) -> "ForeignWeights":
        """Only the tensors under a prefix, with the prefix removed."""
        inner = {
            name.removeprefix(MODEL + prefix): found
            for name, found in self._entries.items()
            if name.startswith(MODEL + prefix)
        }
        if not inner:
            example = next(iter(self._entries), MODEL).removeprefix(MODEL)
            raise BadCheckpoint(f"No name begins with {prefix!r}. The first one is {example!r}.")
        left = [name for name in self._entries if not name.startswith(MODEL + prefix)]
        return ForeignWeights(inner, [*self.left_out, *(name.removeprefix(MODEL) for name in left)])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def dtype(self, name: str) -> torch.dtype:
        return self._entries[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def fill(self, name: str, places: Sequence[Slice]) -> None:
        """Copy a tensor's values into the slices that a rank holds."""
        found = self._entries[name]
        for place in places:
            if place.global_shape != found.shape or place.tensor.dtype != found.dtype:
                raise BadCheckpoint(
                    f"{name} is {_plain(found.dtype)} {list(found.shape)}, and "
                    f"{_plain(place.tensor.dtype)} {list(place.global_shape)} is wanted."
                )
            wanted = Box(place.offset, tuple(place.tensor.shape))
            for part in found.parts:
                common = wanted.intersect(part.box)
                if common is not None:
                    source = common.relative_to(part.box).of(part.read())
                    common.relative_to(wanted).of(place.tensor).copy_(source)

    def whole(self, name: str) -> Tensor:
        """One tensor, whole."""
        return read_whole(self, name)


class AveragedWeights:
    """A checkpoint whose parameters are an average that a callback kept under `name`; buffers, and
    what the average does not have, are the model's."""

    def __init__(self, source: Weights, name: str):
        self._source, self._name = source, name
        if not any(found.startswith(f"{name}.") for found in source):
            raise UsageError(
                f"It holds no weights named {name!r}. The callback shoal.callbacks.EMA(name=...) "
                "keeps such an average in checkpoints."
            )

    @property
    def plain(self) -> Mapping[str, Any]:
        return self._source.plain

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __contains__(self, name: str) -> bool:
        return name in self._source

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._of(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._of(name))

    def fill(self, name: str, places: Sequence[Slice]) -> None:
        self._source.fill(self._of(name), places)

    def whole(self, name: str) -> Tensor:
        return self._source.whole(self._of(name))

    def _of(self, name: str) -> str:
        averaged = f"{self._name}.{name.removeprefix(MODEL)}"
        return averaged if name.startswith(MODEL) and averaged in self._source else name


class ModelWeights:
    """The tensors of a model in any source, under its own names.

    Replicas that differ are averaged. `only` restricts the names, to leave out non-persistent
    buffers. `inside` takes a submodule only.
    """

    def __init__(self, source: Weights, only: Collection[str] | None = None, inside: str = ""):
        self._source, self._inside = MergedReplicas(source), inside
        if lazy := next((name for name in source if name.startswith(TOUCHED)), ""):
            raise BadCheckpoint(
                f"It holds rows of a shoal.Table ({lazy}), which mean something in their own run "
                "only: resume that run with --resume. Other programs find them in its "
                "model.safetensors."
            )
        prefix = replica_name(MODEL, 0) if source.plain.get(REPLICAS) else MODEL
        found = {
            name.removeprefix(start): None
            for start in (MODEL, prefix)
            for name in source
            if name.startswith(start)
        }
        kept = [name for name in found if only is None or name in only]
        self.names = [name.removeprefix(inside) for name in kept if name.startswith(inside)]
        taken = {inside + name for name in self.names}
        self.left_out = [name for name in found if name not in taken]
        if not self.names:
            raise BadCheckpoint(f"It holds no tensor of a model{inside and f' under {inside}'}.")

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._full(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._full(name))

    def whole(self, name: str) -> Tensor:
        return read_whole(self._source, self._full(name))

    def fill(self, name: str, tensor: Tensor) -> None:
        self.fill_part(name, whole_slice(tensor))

    def fill_part(self, name: str, place: Slice) -> None:
        """Copy values into a slice; elements take its type."""
        if self.dtype(name) == place.tensor.dtype:
            self._source.fill(self._full(name), [place])
            return
        read = torch.empty(place.tensor.shape, dtype=self.dtype(name))
        self._source.fill(self._full(name), [place._replace(tensor=read)])
        place.tensor.copy_(read)

    def num_bytes(self, name: str) -> int:
        item = ITEM_BYTES[dtype_name(self.dtype(name))]
        return whole_box(self.shape(name)).numel * item

    def _full(self, name: str) -> str:
        return MODEL + self._inside + name


def _check(name: str, found: StoredTensor) -> None:
    if not name.isascii() and sendable(name) != name:
        raise BadCheckpoint(f"A tensor is named {name!r}, which cannot be written in UTF-8.")
    try:
        dtype_name(found.dtype)
    except RecipeError as error:
        raise BadCheckpoint(f"{name}: {error}") from None
    boxes = [part.box for part in found.parts]
    for box in boxes:
        if not box.fits(found.shape):
            raise BadCheckpoint(
                f"{name}: the part at {list(box.offset)} of shape {list(box.shape)} lies outside "
                f"of {list(found.shape)}."
            )
    if not tile(boxes, found.shape):
        raise BadCheckpoint(f"{name}: its parts do not cover {list(found.shape)} exactly once.")


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
