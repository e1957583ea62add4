"""The state of the search for cuts: what stays whole and why, which packings failed.

Kept from one probe to the next (`find.py`); each refusal either advances a matrix to its
next packing or lets the blamed matrices stay whole.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from shoal.errors import PlanError
from shoal.parallel.tensor.part import CannotCut

MOST_REVIEWS = 200
_PACKS = (1, 3, 2)


class Choice(NamedTuple):
    """What one name was forced to be, and whether it may be given up."""

    how: str  # "whole", "column" or "row"
    source: str
    is_firm: bool


class SearchState:
    """What earlier probes have found; kept from one probe to the next."""

    def __init__(
        self, model: nn.Module, num_ranks: int, choices: Mapping[str, Choice], cuts_small: bool
    ):
        self.num_ranks, self.choices, self.cuts_small = num_ranks, choices, cuts_small
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.names |= {id(b): name for name, b in model.named_buffers()}
        self.modules = {id(m): name for name, m in model.named_modules()}
        self.num_elements = sum(p.numel() for p in model.parameters())
        self.whole: dict[str, str] = {}  # and why
        self.order: dict[str, int] = {}  # in which matrices are first met
        self.num_reviews = 0
        self.failed: dict[str, set[int]] = {}  # packs that did not work
        self.gathered: set[str] = set()  # of whose results pieces of unlike size are taken
        self._liked: dict[str, int] = {}  # packs that similar names ended with

    def packs_of(self, name: str, size: int) -> int | None:
        """The next way of packing to try for a matrix with so many columns."""
        left = [
            packs
            for packs in _PACKS
            if size % (packs * self.num_ranks) == 0 and packs not in self.failed.get(name, ())
        ]
        liked = self._liked.get(kind_of(name))
        return liked if liked in left else next(iter(left), None)

    def learn(self, refusal: CannotCut, blamed: Sequence[str], columns: Mapping[str, int]) -> None:
        """Try another packing for one of the blamed, or let all of them stay whole.

        What is met after them was judged under an assumption that was wrong: it is judged again.
        """
        if refusal.repack:
            for name in reversed(blamed):
                packs = self.packs_of(name, columns[name])
                self.failed.setdefault(name, set()).add(packs or 1)
                after = self.packs_of(name, columns[name])
                if after is not None:
                    self._liked[kind_of(name)] = after
                    return
        if refusal.uneven and not self.gathered.issuperset(blamed):
            self.gathered.update(blamed)
            for name in blamed:
                self.failed.pop(name, None)
            return
        # Where several met, the first and those beside it (query, key, value) are tried as whole.
        blamed = [name for name in blamed if _owner(name) == _owner(blamed[0])]
        for name in blamed:
            self.keep_whole(name, refusal.reason)
        self.num_reviews += 1
        if self.num_reviews > MOST_REVIEWS:
            return
        first = min(self.order[name] for name in blamed)
        for name in [n for n in self.whole if self.order.get(n, -1) > first and n not in blamed]:
            del self.whole[name]
            self.failed.pop(name, None)

    def keep_whole(self, name: str, reason: str) -> None:
        choice = self.choices.get(name)
        if choice is not None and choice.is_firm:
            raise PlanError(
                f"{choice.source} asks for {name} to be cut by {choice.how}s, which is not "
                f"possible: {reason}. Everything between a column and the next row must work on "
                "parts. Take this override out, or say whole."
            )
        if choice is not None:
            reason = f"{choice.source} says {choice.how}, but {reason}"
        self.whole[name] = reason


def _owner(name: str) -> str:
    """The module that holds a layer, for the name of the layer's parameter."""
    return ".".join(name.split(".")[:-2])


def kind_of(name: str) -> str:
    """A name without its numbers."""
    return re.sub(r"\d+", "*", name)


def kinds_of(name: str) -> list[str]:
    """A name without one of its numbers, for each of them."""
    words = name.split(".")
    numbers = [at for at, word in enumerate(words) if word.isdigit()]
    return [".".join([*words[:at], "*", *words[at + 1 :]]) for at in numbers]
