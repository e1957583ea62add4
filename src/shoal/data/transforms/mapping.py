"""A source whose samples are changed by a function: records into pairs, augmentation, features.

    shoal.data.mapped(rows, lambda row: (row["pixels"], row["label"]))
    shoal.data.mapped(pairs, shoal.data.on("inputs", images.flip))

The function is pure: `function(sample)`, or `function(sample, random)` with a generator that is
keyed by (seed, epoch, index of the sample). So an augmented sample is the same at every world size,
and another one in the next pass. The function must not write into the sample that it is given.

Cost: the function, once for each time that a sample is met; nothing is kept. Records of a server or
of blocks are asked for many at once, unless a function draws: put a cache between the two.
Next: `drawing.py`, `images.py`, `tokens.py`, `tabular.py`.
"""

from typing import Any

from shoal.data.readers.records import Many
from shoal.data.sources import Ids, Pass, Varied, collate_samples
from shoal.data.transforms.drawing import Change, draws, generator, name_of
from shoal.data.transforms.fingerprint import digest, identity_of
from shoal.data.transforms.layers import Layer, below, place_of, sample_of
from shoal.errors import RecipeError, ShoalError

ANY_PASS = Pass(0, 0)
"""The pass of `source[i]`, which is the same each time: evaluation, statistics, a look at it."""


class Mapped(Layer):
    """Samples through a function; made by `mapped`."""

    def __init__(self, source: Any, function: Change):
        super().__init__(source)
        self.function = function
        self.draws = draws(function)
        self._layer = num_drawing(self.source)
        if self.draws or isinstance(source, Varied):
            self.vary = self._vary
        elif isinstance(source, Many):
            self.many, self.take = self._many, self._take

    def __getitem__(self, index: int) -> Any:
        index = place_of(index, len(self))
        return self._changed(self.source[index], index, ANY_PASS)

    def _vary(self, index: int, of: Pass) -> Any:
        index = place_of(index, len(self))
        return self._changed(sample_of(self.source, index, of), index, of)

    def _many(self, ids: Ids) -> list[Any]:
        assert isinstance(self.source, Many)
        records = zip(self.source.many(ids), ids, strict=True)
        return [self._changed(record, int(index), ANY_PASS) for record, index in records]

    def _take(self, ids: Ids) -> tuple[Any, Any]:
        """Collated here: one question to what lies below is cheaper than one for each sample."""
        return collate_samples(self._many(ids), ids=ids)

    def _changed(self, sample: Any, index: int, of: Pass) -> Any:
        try:
            if self.draws:
                return self.function(sample, generator(of.seed, of.epoch, index, self._layer))
            return self.function(sample)
        except ShoalError as error:
            raise RecipeError(f"sample {index}: {name_of(self.function)}: {error}") from error
        except Exception as error:
            raise RecipeError(
                f"sample {index}: {name_of(self.function)} failed: {type(error).__name__}: {error}"
            ) from error

    def identity(self) -> str:
        """Names this content: what lies below, and the code of the function."""
        return digest("mapped", identity_of(self.source), self.function)


def mapped(source: Any, function: Change) -> Mapped:
    """The samples of `source`, each changed by `function(sample)` or `function(sample, random)`."""
    return Mapped(source, function)


def num_drawing(source: Any) -> int:
    """How many functions that draw lie on one another in a source."""
    own = int(isinstance(source, Mapped) and source.draws)
    return own + max(map(num_drawing, below(source)), default=0)
