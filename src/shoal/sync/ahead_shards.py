"""ZeRO with a codec: a rank steps on a copy of its shards, and sends by how much they changed.

What all ranks hold alike follows the copy by what was decoded, so the copy is ahead of it by what
packing dropped, and nothing else need be kept for the next step. A checkpoint has the copy beside
the model, by parameter; a state without it begins with none ahead.

Cost: this rank's shards once more. Read next: `zero.py`, and `CompressedGather`.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from shoal.comm.collectives import Group
from shoal.comm.compression import CompressedGather
from shoal.numerics.codecs import change_codec
from shoal.parallel.layout import LocalLayout, Slice, slices_of_run
from shoal.parallel.zero_layout import FlatBuffer, FlatSegment
from shoal.sync.state import StateSource

AHEAD = "codec.ahead."


class AheadShards:
    """Of the packed ones among some flat buffers, by number."""

    def __init__(
        self, group: Group, codec: str, buffers: Sequence[FlatBuffer], flats: Sequence[Tensor]
    ):
        self._rank, self._codec, self._buffers, self._flats = group.rank, codec, buffers, flats
        packed = [k for k, b in enumerate(buffers) if b.is_packed and codec != "none"]
        self._own = {k: self._shared(k).clone() for k in packed}

    def __contains__(self, number: int) -> bool:
        return number in self._own

    def run(self, number: int, segment: FlatSegment) -> Tensor:
        """Where a segment is stepped on: in the copy, or where all hold it."""
        if number not in self._own:
            return self._flats[number][segment.place : segment.place + segment.length]
        start = segment.place - self._buffers[number].cuts[self._rank]
        return self._own[number][start : start + segment.length]

    def follow(self, number: int, segment: FlatSegment) -> None:
        """What is frozen moves no further."""
        if number in self._own:
            flat = self._flats[number]
            self.run(number, segment).copy_(flat[segment.place : segment.place + segment.length])

    def gather(self, group: Group, number: int) -> CompressedGather:
        """Begin to hand the changes of a buffer round. Every rank must call it."""
        flat, cuts = self._flats[number], self._buffers[number].cuts
        return CompressedGather(group, change_codec(self._codec), flat, cuts, self._own[number])

    def parts(
        self,
        segments: Iterable[tuple[int, FlatSegment]],
        named: Sequence[tuple[str, nn.Parameter]],
        holding: LocalLayout,
    ) -> Iterator[tuple[str, list[Slice]]]:
        """What is stepped on, of segments with the numbers of their buffers, by name."""
        for number, s in segments:
            if number in self._own:
                name, p = named[s.parameter]
                run = self.run(number, s)
                yield AHEAD + name, slices_of_run(name, p.shape, s.start, run, holding)

    @torch.no_grad()
    def load(self, source: StateSource, parts: Iterable[tuple[str, list[Slice]]]) -> None:
        for number, own in self._own.items():
            own.copy_(self._shared(number))
        for name, places in parts:
            if name in source:
                source.fill(name, places)

    def _shared(self, number: int) -> Tensor:
        cuts = self._buffers[number].cuts
        return self._flats[number][cuts[self._rank] : cuts[self._rank + 1]]
