"""What is made best: a metric and its direction, as `--metric accuracy:max` says it. Pure.

Studies (`tuning/`) and fused models (`slim/`) choose by it.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, Self

from shoal.errors import UsageError, nearest

_DIRECTIONS = ("min", "max")
# Endings of names of which more is better; others are minimized unless the user says otherwise.
_LARGE_IS_BEST = (
    *("accuracy", "acc", "auc", "f1", "precision", "recall", "bleu", "r2", "score", "iou"),
)


class Goal(NamedTuple):
    """A metric, and whether its largest value is the best."""

    metric: str = "loss"
    is_max: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `loss`, `accuracy:max` or `error:min`."""
        metric, colon, direction = text.strip().partition(":")
        if not metric:
            raise UsageError(f"--metric {text!r} names no metric. Write loss, or accuracy:max.")
        if colon and direction not in _DIRECTIONS:
            raise UsageError(f"--metric {text}: {nearest(direction, _DIRECTIONS)}")
        is_max = direction == "max" if colon else metric.lower().endswith(_LARGE_IS_BEST)
        return cls(metric, is_max)

    def refuse_unknown(self, known: Collection[str]) -> None:
        """Refuse a metric that the recipe does not measure."""
        if self.metric not in known:
            raise UsageError(
                f"--metric {self.metric}: the recipe does not measure it. "
                f"{nearest(self.metric, known)} A recipe measures its loss, and with evaluate= "
                "the metrics= of its Run."
            )

    def score(self, metrics: Mapping[str, float]) -> float:
        """The larger the better; what is not a number is worse than all others."""
        value = metrics[self.metric] * (1 if self.is_max else -1)
        return -math.inf if math.isnan(value) else value

    def is_better(self, value: float, than: float | None) -> bool:
        return than is None or (value > than if self.is_max else value < than)

    def best_so_far(self, values: Iterable[float]) -> Iterator[float]:
        best: float | None = None
        for value in values:
            best = value if best is None or self.is_better(value, best) else best
            yield best

    def __str__(self) -> str:
        return f"{self.metric}:{'max' if self.is_max else 'min'}"
