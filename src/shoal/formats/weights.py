"""A model's tensors by name, wherever they come from, and one at a time.

What another program wrote becomes a `Foreign`: the same reading interface as a checkpoint of ours,
with the names a checkpoint gives them (`model.<name>`), so that whatever loads the one loads the
other. What is written for other programs goes through a `Model`: the tensors of the model alone,
under the names it gives them itself. Neither holds more than one tensor, or one part of it.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.checkpoint.manifest import ITEM_BYTES
from shoal.checkpoint.types import name_of_type
from shoal.errors import BadCheckpoint, RecipeError, sendable
from shoal.parallel.boxes import Box, tile, whole_box
from shoal.parallel.layout import Slice, whole
from shoal.sync.replicas import REPLICAS, Merged, of_replica
from shoal.sync.state import Source, read_whole
from shoal.sync.touched import TOUCHED

MODEL = "model."


class Weights(Source, Protocol):
    """What `Opened` and `Foreign` have in common."""

    def __iter__(self) -> Iterator[str]: ...
    def whole(self, name: str) -> Tensor: ...


class Part(NamedTuple):
    """A box of a tensor, and how to read it."""

    box: Box
    read: Callable[[], Tensor]


class Entry(NamedTuple):
    """A tensor in a foreign file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def entry(dtype: torch.dtype, shape: Sequence[int], read: Callable[[], Tensor]) -> Entry:
    """A tensor that lies in one piece."""
    box = whole_box(shape)
    return Entry(dtype, box.shape, (Part(box, read),) if box.numel else ())


class Foreign:
    """Tensors that another program wrote. `left_out` names what is there and is no tensor."""

    def __init__(self, entries: Mapping[str, Entry], left_out: Sequence[str] = ()):
        self.plain: Mapping[str, Any] = {}
        self.left_out = tuple(left_out)
        for name, found in entries.items():
            _check(name, found)
        self._entries = {f"{MODEL}{name}": found for name, found in entries.items()}

    def under(self, prefix: str) -> "Foreign":
        """Only what stands under a prefix, and without it."""
        inner = {
            name.removeprefix(MODEL + prefix): found
            for name, found in self._entries.items()
            if name.startswith(MODEL + prefix)
        }
        if not inner:
            example = next(iter(self._entries), MODEL).removeprefix(MODEL)
            raise BadCheckpoint(f"No name begins with {prefix!r}. The first one is {example!r}.")
        left = [name for name in self._entries if not name.startswith(MODEL + prefix)]
        return Foreign(inner, [*self.left_out, *(name.removeprefix(MODEL) for name in left)])

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def dtype(self, name: str) -> torch.dtype:
        return self._entries[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def fill(self, name: str, places: Sequence[Slice]) -> None:
        """Put a tensor's values where a rank holds parts of it."""
        found = self._entries[name]
        for place in places:
            if place.global_shape != found.shape or place.tensor.dtype != found.dtype:
                raise BadCheckpoint(
                    f"{name} is {_plain(found.dtype)} {list(found.shape)}, and "
                    f"{_plain(place.tensor.dtype)} {list(place.global_shape)} is wanted."
                )
            wanted = Box(place.offset, tuple(place.tensor.shape))
            for part in found.parts:
                common = wanted.meet(part.box)
                if common is not None:
                    source = common.inside(part.box).of(part.read())
                    common.inside(wanted).of(place.tensor).copy_(source)

    def whole(self, name: str) -> Tensor:
        """All of one tensor."""
        return read_whole(self, name)


class Model:
    """The tensors of a model in any source, under its own names.

    Of replicas that were apart it is the mean. `only` leaves out what a model holds but does not
    count as its state: buffers that it can make again. `inside` takes a part of the model alone.
    """

    def __init__(self, source: Weights, only: Collection[str] | None = None, inside: str = ""):
        self._source, self._inside = Merged(source), inside
        if lazy := next((name for name in source if name.startswith(TOUCHED)), ""):
            raise BadCheckpoint(
                f"It holds rows of a shoal.Table ({lazy}), which mean something in their own run "
                "alone: go on there, with --resume. Other programs find them in its "
                "model.safetensors."
            )
        prefix = of_replica(MODEL, 0) if source.plain.get(REPLICAS) else MODEL
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
        self.fill_part(name, whole(tensor))

    def fill_part(self, name: str, place: Slice) -> None:
        self._source.fill(self._full(name), [place])

    def num_bytes(self, name: str) -> int:
        item = ITEM_BYTES[name_of_type(self.dtype(name))]
        return whole_box(self.shape(name)).numel * item

    def _full(self, name: str) -> str:
        return MODEL + self._inside + name


def _check(name: str, found: Entry) -> None:
    if not name.isascii() and sendable(name) != name:
        raise BadCheckpoint(f"A tensor is named {name!r}, which cannot be written in UTF-8.")
    try:
        name_of_type(found.dtype)
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
