"""Beginning a run with what another one has learnt, or another program.

`--from` gives a new run the weights of a checkpoint, or of a file that could be imported; with
everything, also the optimizer, the step and the place in the data. What does not match the model
is refused; partly it can be left out, and is listed.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shoal.checkpoint.find import PathOrUrl
from shoal.checkpoint.load import CheckpointReader
from shoal.checkpoint.manifest import Origin
from shoal.errors import UsageError
from shoal.formats.match import TensorMatch, match_tensors
from shoal.formats.open_weights import open_weights
from shoal.formats.weights import MODEL, ModelWeights, Weights
from shoal.parallel.layout import Slice
from shoal.sync.state import MemorySource


class InitialWeights(NamedTuple):
    """What a run begins with, found before its ranks start."""

    place: str
    open: Callable[[], Weights]
    everything: bool
    match: TensorMatch
    origin: Origin | None = None  # of the run whose place in the data is taken as well
    told: str = ""  # which of several checkpoints it is, and which were passed over

    def __str__(self) -> str:
        what = "everything" if self.everything else f"{len(self.match.source_names)} tensors"
        notes = self.match.problems() or str(self.match.rule)
        begins = filter(None, (f"beginning with {what} of {self.place}", notes))
        return "\n".join(filter(None, (self.told, "; ".join(begins))))

    def source(self, own: MemorySource) -> "CheckpointReader | WeightsOverlay":
        """What a rank takes over; `own` is its state as the seed made it."""
        source = self.open()
        if self.everything:
            assert isinstance(source, CheckpointReader)
            return source
        return WeightsOverlay(own, source, self.match.source_names)


def find_initial_weights(
    where: PathOrUrl, model: nn.Module, *, everything: bool, partial: bool
) -> InitialWeights:
    """Look at a source before ranks start, and refuse what does not match."""
    source, place, again, told = open_weights(where)
    if everything and not (isinstance(source, CheckpointReader) and source.plain):
        raise UsageError(
            f"{place} holds weights alone. Leave --take everything out, or give a checkpoint of a "
            "run."
        )
    found = match_tensors(ModelWeights(source), model)
    if found.problems() and (everything or not partial):
        way_out = "" if everything else " --partial takes what matches and leaves out the rest."
        raise UsageError(f"{place} does not match the model ({found.problems()}).{way_out}")
    if not found.source_names:
        raise UsageError(f"{place} and the model have no tensor in common.")
    origin = source.manifest.origin if everything and isinstance(source, CheckpointReader) else None
    return InitialWeights(place, again, everything, found, origin, told)


class WeightsOverlay:
    """A rank's own state, with the model's tensors from elsewhere; elements take its own types."""

    def __init__(self, own: MemorySource, source: Weights, taken: dict[str, str]):
        self._own, self._source, self._taken = own, ModelWeights(source), taken
        self.plain: Any = own.plain

    def __contains__(self, name: str) -> bool:
        return name in self._own

    def dtype(self, name: str) -> torch.dtype:
        return self._own.dtype(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._own.shape(name)

    def fill(self, name: str, places: Sequence[Slice]) -> None:
        theirs = self._taken.get(name.removeprefix(MODEL)) if name.startswith(MODEL) else None
        if theirs is None:
            self._own.fill(name, places)
            return
        for place in places:
            self._source.fill_part(theirs, place)
