"""Names of tensors that differ from a model's by a prefix: find it, from either side. Pure.

`bert.`, `model.`, `module.` or `_orig_mod.` stands before the names of a whole model inside of
another one, or of one that was wrapped. No list of such words is kept: a prefix is what is left of
a name whose end is a name of the other side. The one that lets most tensors match is taken, and
only if it lets more match than the names as they are.

Cost: a look at each name for each of its dots.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

Shapes = Mapping[str, tuple[int, ...]]


class PrefixRule(NamedTuple):
    """How names of a source become a model's: one of the two is empty, or both."""

    cut: str = ""
    add: str = ""

    def rename(self, name: str, known: Collection[str]) -> str:
        """The model's name for a source's; one that the rule makes nothing known of stays."""
        renamed = self.add + name.removeprefix(self.cut)
        return renamed if renamed in known and name.startswith(self.cut) else name

    def __str__(self) -> str:
        if self.cut:
            return f"{self.cut!r} was cut off its names"
        return f"{self.add!r} was put before its names" if self.add else ""


AS_THEY_ARE = PrefixRule()


def find_prefix(source: Shapes, model: Shapes) -> PrefixRule:
    """The rule by which most tensors of a source match a model by name and shape."""
    plain = sum(model.get(name) == shape for name, shape in source.items())
    cuts = _count(source, model, lambda name, tail: source[name] == model[tail])
    adds = _count(model, source, lambda name, tail: model[name] == source[tail])
    counted = [(count, PrefixRule(cut=prefix)) for prefix, count in cuts.items()]
    counted += [(count, PrefixRule(add=prefix)) for prefix, count in adds.items()]
    better = [(count, rule) for count, rule in counted if count > plain]
    if not better:
        return AS_THEY_ARE
    # Of as many matches, the shortest; and the same one whatever the order of names.
    return min(better, key=lambda one: (-one[0], len(one[1].cut + one[1].add), one[1]))[1]


def _count(
    longer: Iterable[str], shorter: Collection[str], fits: Callable[[str, str], bool]
) -> Counter[str]:
    """How often each prefix stands before a name of `shorter` that fits."""
    return Counter(
        name[: -len(tail)]
        for name in longer
        for tail in _tails(name)
        if tail in shorter and fits(name, tail)
    )


def _tails(name: str) -> Iterator[str]:
    """What follows each dot of a name."""
    at = name.find(".") + 1
    while at and name[at:]:
        yield name[at:]
        at = name.find(".", at) + 1
