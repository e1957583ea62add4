"""Which checkpoints to keep. Pure.

`last=N` keeps the newest N, `every=K` one for each K steps, permanently, `best=METRIC` the one with
the best value of a metric of its last step or evaluation. Of those with a tag (`trainer.save`) the
newest stays. The newest checkpoint never expires, and one that has expired stays expired when more
checkpoints are added.
"""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Self

from shoal.errors import UsageError, nearest

_WORDS = ("last", "every", "best")
_ORDERS = ("min", "max")
_RULE = "A rule is for example 'last=3 every=1000 best=loss'."


class CheckpointSummary(NamedTuple):
    """What a retention policy needs of a checkpoint."""

    name: str
    step: int
    metrics: Mapping[str, float]
    tags: Sequence[str] = ()  # that callbacks gave it


class RetentionPolicy(NamedTuple):
    """What to keep; `every` and `best` are None if the rule is not used."""

    last: int = 2
    every: int | None = None
    best: str | None = None
    is_large_best: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `last=3 every=1000 best=accuracy:max`, separated by spaces or commas."""
        given: dict[str, str] = {}
        for word in re.split(r"[\s,]+", text.strip()):
            key, equals, value = word.partition("=")
            if not word:
                continue
            if key not in _WORDS:
                raise UsageError(f"{key!r} says nothing of what to keep. {nearest(key, _WORDS)}")
            if not equals or not value:
                raise UsageError(f"{key} needs a value, as in {key}={_EXAMPLES[key]}. {_RULE}")
            if key in given:
                raise UsageError(f"{key} is given twice, in {text!r}. Give it once.")
            given[key] = value
        if not given:
            raise UsageError(f"{text!r} does not say what to keep. {_RULE}")
        metric, is_large_best = _best(given["best"]) if "best" in given else (None, False)
        return cls(
            _count("last", given["last"]) if "last" in given else cls().last,
            _count("every", given["every"]) if "every" in given else None,
            metric,
            is_large_best,
        )

    def refuse_unknown(self, metrics: Collection[str], sentence: str) -> None:
        """Refuse `best` by an unknown metric; `sentence` says what does not have it."""
        if self.best is not None and self.best not in metrics:
            way_out = nearest(self.best, metrics) if metrics else "Leave best out."
            raise UsageError(f"best={self.best}: {sentence}. {way_out}")

    def __str__(self) -> str:
        words = [f"last={self.last}"]
        if self.every is not None:
            words.append(f"every={self.every}")
        if self.best is not None:
            words.append(f"best={self.best}{':max' if self.is_large_best else ''}")
        return " ".join(words)


_EXAMPLES = {"last": "3", "every": "1000", "best": "loss"}


def find_expired(
    known: Iterable[CheckpointSummary], keep: RetentionPolicy
) -> list[CheckpointSummary]:
    """The checkpoints that no rule keeps, oldest first."""
    ordered = sorted(known, key=lambda one: (one.step, one.name))
    kept = {one.name for one in ordered[-max(1, keep.last) :]}
    kept |= set({tag: one.name for one in ordered for tag in one.tags}.values())
    if keep.every is not None:
        kept |= _one_for_each(ordered, keep.every)
    if keep.best is not None:
        kept |= _best_of(ordered, keep.best, keep.is_large_best)
    return [one for one in ordered if one.name not in kept]


def _one_for_each(ordered: Sequence[CheckpointSummary], every: int) -> set[str]:
    """The first at or after each multiple of `every` steps: saves need not hit multiples."""
    first: dict[int, str] = {}
    for one in ordered:
        if one.step >= every:
            first.setdefault(one.step // every, one.name)
    return set(first.values())


def _best_of(ordered: Sequence[CheckpointSummary], metric: str, is_large_best: bool) -> set[str]:
    """Of equally good ones the newest; NaN is never the best."""
    sign = 1.0 if is_large_best else -1.0
    best, name = -math.inf, ""
    for one in ordered:
        value = sign * one.metrics.get(metric, math.nan)
        if value >= best:
            best, name = value, one.name
    return {name} - {""}


def _count(key: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        raise UsageError(f"{key}={text} must be a whole number of at least 1.")
    return int(text)


def _best(text: str) -> tuple[str, bool]:
    metric, colon, order = text.partition(":")
    if not metric:
        raise UsageError(f"best={text} names no metric. {_RULE}")
    if colon and order not in _ORDERS:
        raise UsageError(
            f"best={text} ends in {order!r}. After the colon stands what is best: min, which is "
            "the default, or max."
        )
    return metric, order == "max"
