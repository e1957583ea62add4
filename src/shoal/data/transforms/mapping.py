"""A source whose samples are changed by a function: records into pairs, augmentation, features.

    shoal.data.mapped(rows, lambda row: (row["pixels"], row["label"]))
    shoal.data.mapped(pairs, shoal.data.on("inputs", images.flip))

The function is pure: `function(sample)`, or `function(sample, random)` with a generator that is
keyed by (seed, epoch, index of the sample). So an augmented sample is the same at every world size,
and another one in the next pass. The function must not write into the sample that it is given.

Cost: the function, once for each time that a sample is met; nothing is kept. Records of a server or
of blocks are asked for many at once, unless a function draws: put a cache between the two.
Next: `randomness.py`, `images.py`, `tokens.py`, `tabular.py`.
"""

from typing import Any

from shoal.data.collating import collate_samples
from shoal.data.readers.records import BulkSource
from shoal.data.sources import Ids, Pass
from shoal.data.transforms.fingerprint import digest, identity_of
from shoal.data.transforms.randomness import Change, is_random, sample_generator
from shoal.data.transforms.wrapped import WrappedSource, apply_to_sample, inner_sources


class Mapped(WrappedSource):
    """Samples through a function; made by `mapped`."""

    def __init__(self, source: Any, function: Change):
        super().__init__(source)
        self.function = function
        self.draws = is_random(function)
        self._layer = num_random_layers(self.source)
        if self.draws:
            self.vary = self._vary
        if isinstance(source, BulkSource):
            self.take = self._take

    def _take(self, ids: Ids) -> tuple[Any, Any]:
        """Collated here: one question to what lies below is cheaper than one for each sample."""
        return collate_samples(self._many(ids), ids=ids)

    def _change(self, sample: Any, index: int, of: Pass) -> Any:
        if self.draws:
            random = sample_generator(of.seed, of.epoch, index, self._layer)
            return apply_to_sample(self.function, index, sample, random)
        return apply_to_sample(self.function, index, sample)

    def identity(self) -> str:
        """Names this content: what lies below, and the code of the function."""
        return digest("mapped", identity_of(self.source), self.function)


def mapped(source: Any, function: Change) -> Mapped:
    """The samples of `source`, each changed by `function(sample)` or `function(sample, random)`."""
    return Mapped(source, function)


def num_random_layers(source: Any) -> int:
    """How many functions that draw lie on one another in a source."""
    own = int(isinstance(source, Mapped) and source.draws)
    return own + max(map(num_random_layers, inner_sources(source)), default=0)
