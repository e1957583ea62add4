"""A source as a row of pieces, each sample in one: for evaluation, and a look at some samples.

`pieces_in_order` cuts a source into neighbouring pieces, so the rank that takes a piece does not
change what is in it. A piece is loaded by its index; `ahead` goes through many of them, and lets
the loader processes of a Run's `loaders` load them ahead of time (`loader_processes.py`). They end
with it.

Cost: with loaders, one fork of each for every evaluation, some milliseconds. Next: `batches.py`.
"""

from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from shoal.data.batches import DEFAULT_LOADING, LoadOptions, Piece, load, to_device
from shoal.data.collating import SampleTypeCheck
from shoal.data.loader_processes import Loaders, PieceKey
from shoal.data.permutation import Ids
from shoal.data.sources import Source, as_source, normalize_index
from shoal.data.stalls import STALLS
from shoal.errors import UsageError


class PiecesInOrder:
    """A source cut into neighbouring pieces; made by `pieces_in_order`."""

    def __init__(self, source: Source, piece_size: int, loading: LoadOptions):
        self._source = source
        self._size = piece_size
        self._loading = loading
        self._type_check = SampleTypeCheck(source, lambda near: near, piece_size)

    def __len__(self) -> int:
        return (len(self._source) + self._size - 1) // self._size

    def __getitem__(self, index: int) -> Piece:
        return load(self._source, self._ids_of(index), self._loading, type_check=self._type_check)

    def ahead(self, indices: Sequence[int]) -> Generator[Piece, None, None]:
        """These pieces in turn. Close it if it is left before its end."""
        if not self._loading.loaders or len(indices) < 2:
            yield from map(self.__getitem__, indices)
            return
        loaders, num_asked = Loaders(self._to_pass_on, self._loading.loaders), 0
        try:
            for turn, index in enumerate(indices):
                num_asked = max(num_asked, turn)
                while num_asked < len(indices) and loaders.has_room:
                    loaders.ask(PieceKey(num_asked, 0), 0, self._ids_of(indices[num_asked]))
                    num_asked += 1
                if loaders.has(PieceKey(turn, 0)):
                    yield self._from_loaders(loaders, turn, index)
                else:  # no room: too much is still in use
                    yield self[index]
        finally:
            loaders.close()

    def _from_loaders(self, loaders: Loaders, turn: int, index: int) -> Piece:
        with STALLS.on(self._ids_of(index)):
            inputs, target, ids = loaders.take(PieceKey(turn, 0))
        device = self._loading.device
        return Piece(to_device(inputs, device), to_device(target, device), len(ids), ids)

    def _to_pass_on(self, _: int, ids: Ids) -> tuple[Any, Any, Ids]:
        """In a loader."""
        piece = load(
            self._source, ids, self._loading._replace(device="cpu"), type_check=self._type_check
        )
        return piece.inputs, piece.target, piece.ids

    def _ids_of(self, index: int) -> Ids:
        start = normalize_index(index, len(self), "piece") * self._size
        return np.arange(start, min(start + self._size, len(self._source)), dtype=np.int64)


def pieces_in_order(
    source: Any, piece_size: int, loading: LoadOptions = DEFAULT_LOADING
) -> PiecesInOrder:
    """A source as a row of pieces of `piece_size` samples, in order; the last may be short.

    For evaluation: ranks take some of the indices each, and every sample is met once.
    """
    if piece_size < 1:
        raise UsageError(f"piece_size={piece_size}: a piece holds at least 1 sample.")
    return PiecesInOrder(as_source(source), piece_size, loading)
