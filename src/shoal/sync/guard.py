"""State that one process alone holds: noted after an update, and looked at before the next.

Nobody can be asked what it should be. But between two updates nothing may change it, so bytes that
are others by then were corrupted where they stand. A slice is noted at a time (`digests.py`); of
what is small, that is all of it. What happens to the rest goes unnoticed, and so does a change
within the update.

A recipe's hooks may write to what they see between two steps. What they wrote through torch is
known by the tensor's version, and `refresh` lets go of it. Cost: the slice, twice a step.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shoal.sync.digests import Part, Reader

Name = tuple[str, ...]
Named = tuple[Tensor, Name]


class _Note(NamedTuple):
    tensor: Tensor
    name: Name
    part: Part
    version: int
    address: int
    digest: int


class Guard:
    """`note`, then any number of `changed`. With `follows`, also if tensors stand elsewhere by
    then: whoever moved them has copied them as they were."""

    def __init__(self, most_slices: int, follows: bool = False):
        self.most_slices, self._follows = most_slices, follows
        self._reader, self._notes = Reader(), list[_Note]()

    def note(self, named: Sequence[Named], turn: int) -> list[int]:
        """Remember the slice whose turn it is; its digests, tensor by tensor."""
        if not self.most_slices:
            return []
        tensors = [tensor for tensor, _ in named]
        found = self._reader.digests_of_slice(tensors, turn, self.most_slices)
        self._notes = [_noted(*named[part.number], part, digest) for part, digest in found]
        return [digest for _, digest in found]

    def refresh(self) -> None:
        """Let go of what somebody wrote to since."""
        self._notes = [n for n in self._notes if version_of(n.tensor) == n.version]

    def forget(self) -> None:
        self._notes = []

    def changed(self) -> list[str]:
        """The names of tensors that are not as they were noted."""
        return [".".join(note.name) for note in self._notes if self._is_changed(note)]

    def names(self) -> list[str]:
        """Of what was noted last."""
        return [".".join(note.name) for note in self._notes]

    def _is_changed(self, note: _Note) -> bool:
        if not self._follows and note.tensor.data_ptr() != note.address:
            return False  # it was given other memory, by somebody who knows why
        return self._reader.digest_of_part(note.tensor, note.part) != note.digest


def tensors_in(value: Any, name: Name) -> Iterator[Named]:
    """In what an optimizer keeps for a parameter."""
    if isinstance(value, Tensor):
        yield value, name
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_in(inner, (*name, str(key)))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from tensors_in(inner, (*name, str(number)))


def _noted(tensor: Tensor, name: Name, part: Part, digest: int) -> _Note:
    return _Note(tensor, name, part, version_of(tensor), tensor.data_ptr(), digest)


def version_of(tensor: Tensor) -> int:
    """How often torch has written to it."""
    return 0 if tensor.is_inference() else tensor._version
