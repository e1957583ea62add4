"""Guards state that one process alone holds: digests after an update, compared before the next.

No other process has a copy to compare with. But between two updates nothing may change this state,
so bytes that differ by then were corrupted in memory. One slice is noted at a time (`digests.py`);
small state is one slice. Changes of the rest, and changes within the update, go unnoticed.

A recipe's hooks may write to tensors between two steps. A write through torch raises the tensor's
version, and `refresh` drops the note of it. Cost: the slice, twice a step.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from shoal.errors import ShoalError
from shoal.formatting import plural
from shoal.sync.digests import ByteSpan, DigestReader, Name, NamedTensor, TensorListing

NAMED = 4  # tensors that a sentence names


class CorruptState(ShoalError):
    """State changed, or differs between replicas, and no majority shows which is right."""


class _NotedSlice(NamedTuple):
    """A slice of some tensors, part by part."""

    listing: TensorListing
    parts: list[ByteSpan]
    digests: list[int]
    addresses: list[int]
    versions: list[int]


_NOTHING = _NotedSlice(TensorListing([], []), [], [], [], [])


class Guard:
    """`note`, then any number of `changed`. With `follows`, also if tensors stand elsewhere by
    then: a move copies them unchanged."""

    def __init__(self, most_slices: int, follows: bool = False):
        self._most_slices, self._follows = most_slices, follows
        self._reader, self._note = DigestReader(), _NOTHING

    def note(self, listing: TensorListing, turn: int) -> list[int]:
        """Remember the slice whose turn it is; its digests, part by part."""
        if not self._most_slices or not listing.tensors:
            return []
        parts = self._reader.parts(listing.tensors, turn, self._most_slices)
        held = [listing.tensors[part.number] for part in parts]
        digests = self._reader.digests(listing.tensors, parts)
        addresses = [tensor.data_ptr() for tensor in held]
        self._note = _NotedSlice(listing, parts, digests, addresses, list(map(version_of, held)))
        return digests

    def refresh(self) -> None:
        """Forget tensors that were written to since."""
        note = self._note
        versions = [version_of(note.listing.tensors[part.number]) for part in note.parts]
        if versions != note.versions:
            self._keep([i for i, now in enumerate(versions) if now == note.versions[i]])

    def forget(self) -> None:
        self._note = _NOTHING

    def changed(self) -> list[str]:
        """The names of tensors that are not as they were noted."""
        if not self._note.parts:
            return []
        digests = self._reader.digests(self._note.listing.tensors, self._note.parts)
        if digests == self._note.digests:
            return []
        if not self._follows:  # one may have been given other memory on purpose
            held = [self._note.listing.tensors[part.number] for part in self._note.parts]
            same = [t.data_ptr() == at for t, at in zip(held, self._note.addresses, strict=True)]
        else:
            same = [True] * len(digests)
        pairs = enumerate(zip(digests, self._note.digests, same, strict=True))
        return [self.names()[i] for i, (now, old, is_there) in pairs if is_there and now != old]

    def names(self) -> list[str]:
        """Of what was noted last, part by part."""
        return [self._note.listing.names[part.number] for part in self._note.parts]

    def _keep(self, which: list[int]) -> None:
        note = self._note
        self._note = _NotedSlice(
            note.listing,
            [note.parts[i] for i in which],
            [note.digests[i] for i in which],
            [note.addresses[i] for i in which],
            [note.versions[i] for i in which],
        )


def tensors_in(value: Any, name: Name) -> Iterator[NamedTensor]:
    """In what an optimizer keeps for a parameter, in an order that does not depend on its past."""
    if isinstance(value, Tensor):
        yield value, name
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from tensors_in(value[key], (*name, str(key)))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from tensors_in(inner, (*name, str(number)))


def version_of(tensor: Tensor) -> int:
    """How often torch has written to it."""
    return 0 if tensor.is_inference() else tensor._version


def list_names(names: Sequence[str]) -> str:
    """A few names, and how many more there are."""
    shown, rest = ", ".join(names[:NAMED]), len(names) - NAMED
    return f"{shown} and {plural(rest, 'other tensor')}" if rest > 0 else shown


def corruption_message(who: str, names: Sequence[str], when: str = "") -> str:
    """Of state that is held once."""
    return (
        f"State of {who} was corrupted{when}: {list_names(names)} changed between two updates, "
        "when nothing may change it. Memory is broken, or code of the recipe writes to it (then "
        "set check_every=0, with which ranks share no weights). It was not saved; resume from the "
        "newest checkpoint with --resume."
    )


def find_address(named: Iterable[NamedTensor], what: str) -> tuple[int, int, int] | None:
    """Of the first with `what` in its name: its address, its bytes, and those of an element."""
    for tensor, name in named:
        if what in ".".join(name) and tensor.numel():
            return tensor.data_ptr(), tensor.nbytes, tensor.itemsize
    return None
