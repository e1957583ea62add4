"""State that every replica has its own of, and how one becomes of many.

Where replicas train apart for a while, a checkpoint holds their tensors under the replica's
number. A run with as many replicas gives each its own back; any other takes the mean, or for whole
numbers (a step count, say) those of the first.
"""

import re
from collections.abc import Sequence

import torch

from shoal.parallel.layout import Slice
from shoal.sync.state import StateSource

REPLICAS = "replicas"  # how many there are, among what is plain
_OWN = re.compile(r"replica\.[0-9]+\.")


def replica_name(name: str, number: int) -> str:
    return f"replica.{number}.{name}"


def shared_name(name: str) -> str:
    """The name of a tensor without the replica's number, if it has one."""
    own = _OWN.match(name)
    return name[own.end() :] if own else name


class MergedReplicas:
    """A source in which each tensor exists once: replica `own`'s, or the mean over all."""

    def __init__(self, source: StateSource, own: int | None = None):
        self._source, self._own, self.plain = source, own, source.plain
        self._num_replicas = int(source.plain.get(REPLICAS, 0))

    def __contains__(self, name: str) -> bool:
        return self._first(name) in self._source

    def dtype(self, name: str) -> torch.dtype:
        return self._source.dtype(self._first(name))

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source.shape(self._first(name))

    def fill(self, name: str, places: Sequence[Slice]) -> None:
        self._source.fill(self._first(name), places)
        if self._first(name) == name or self._own is not None or not _can_average(places):
            return
        sums = [place.tensor.double() for place in places]
        for number in range(1, self._num_replicas):
            self._source.fill(replica_name(name, number), places)
            for sum_, place in zip(sums, places):
                sum_.add_(place.tensor)
        for sum_, place in zip(sums, places):
            place.tensor.copy_(sum_.div_(self._num_replicas))

    def _first(self, name: str) -> str:
        """Under which name a tensor is found, the first replica's if each has its own."""
        if not self._num_replicas or name in self._source:
            return name
        return replica_name(name, self._own or 0)


def _can_average(places: Sequence[Slice]) -> bool:
    return all(place.tensor.is_floating_point() for place in places)
