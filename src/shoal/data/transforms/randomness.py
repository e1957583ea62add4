"""Random draws that depend on the sample and the pass alone, and functions made of functions.

A function that changes a sample may take a second argument, a numpy Generator. A new one is made
for each sample from (seed, epoch, index, layer), so the draws are the same on whichever rank,
thread or batch the sample is met, and others in the next pass. Layers that lie on one another have
numbers of their own, so that a crop does not repeat the draws of a flip below it.

Not for draws inside a model; those are `numerics/randomness.py`. Cost: a generator a sample and
layer; none is made for a function that takes one argument. The generator is PCG64; what numpy draws
from it may change between its versions, which the tests would notice.
Next: `mapping.py`, which applies such functions to a source.
"""

import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence, SeedSequence
from numpy.typing import DTypeLike, NDArray

from shoal.data.permutation import mix64
from shoal.data.transforms.fields import field
from shoal.data.validate import require_function
from shoal.errors import UsageError

Change: TypeAlias = Callable[..., Any]
Random: TypeAlias = np.random.Generator

_LONG = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN = 0x9E37_79B9_7F4A_7C15
_NUM_WORDS = 4  # of 64 bits: what PCG64 starts from


def sample_generator(seed: int, epoch: int, index: int, layer: int = 0) -> Random:
    """The generator of sample `index` in the pass `epoch` of a run with this seed."""
    state = _mixed((seed, epoch, index, layer))
    words = [mix64((state + turn * _GOLDEN) & _LONG) for turn in range(1, _NUM_WORDS + 1)]
    start = cast(SeedSequence, _Words(words))  # numpy takes any ISeedSequence, its types do not
    return np.random.Generator(np.random.PCG64(start))


@contextmanager
def drawing_from(key: Iterable[int]) -> Iterator[None]:
    """In this block, what is drawn from Python's, numpy's and torch's own generators follows from
    `key`; what is drawn after it is as if the block had drawn nothing."""
    state = _mixed(key)
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    random.seed(state)
    np.random.seed(state % (1 << 32))
    torch.default_generator.manual_seed(state)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])


def _mixed(key: Iterable[int]) -> int:
    state = 0x5348_4F41_4C00_0002
    for value in key:
        state = mix64((state + value) & _LONG)
    return state


def is_random(function: Change) -> bool:
    """Whether a function takes a generator: its second argument is needed, or named `random`."""
    require_function(function, "mapped(), on() or chain()")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some of those written in C do not say
        return False
    takes = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in takes if p.default is p.empty]
    named = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    any_number = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if named or len(needed) > 2 or not (takes or any_number):
        raise UsageError(
            f"{function_name(function)}{inspect.signature(function)} cannot be applied to samples. "
            "Such a function takes a sample, or a sample and a random generator; bind other "
            "arguments with functools.partial."
        )
    return len(takes) > 1 and (len(needed) == 2 or takes[1].name == "random")


def chain(*functions: Change) -> Change:
    """One function that applies these in turn; it draws if one of them does."""
    if not functions:
        raise UsageError("chain() was given no function.")
    steps = [(function, is_random(function)) for function in functions]

    def drawing(value: Any, random: Random) -> Any:
        for function, takes_random in steps:
            value = function(value, random) if takes_random else function(value)
        return value

    def plain(value: Any) -> Any:
        for function, _ in steps:
            value = function(value)
        return value

    return drawing if any(takes_random for _, takes_random in steps) else plain


def on(name: str, function: Change) -> Change:
    """A function of samples that changes one field, such as "inputs", and leaves the others."""
    place = field(name)

    def drawing(sample: Any, random: Random) -> Any:
        return place.put(sample, function(place.get(sample), random))

    def plain(sample: Any) -> Any:
        return place.put(sample, function(place.get(sample)))

    return drawing if is_random(function) else plain


def require_probability(chance: float) -> None:
    """Refuse what is no chance, such as a percentage."""
    if not 0 <= chance <= 1:
        raise UsageError(f"chance={chance}. A chance is from 0 to 1.")


def function_name(function: Change) -> str:
    """What to call a function in a message."""
    while isinstance(function, partial):
        function = function.func
    found = getattr(function, "__qualname__", type(function).__qualname__)
    return str(found).replace("<locals>.", "")


class _Words(ISeedSequence):
    """Hands a generator its state as it is: ours is mixed already, and mixing it again, as
    numpy does, takes longer than making the generator."""

    def __init__(self, words: list[int]):
        self._words = np.array(words, dtype=np.uint64)

    def generate_state(self, n_words: int, dtype: DTypeLike = np.uint32) -> NDArray[Any]:
        assert n_words == _NUM_WORDS and np.dtype(dtype) == np.uint64, (n_words, dtype)
        return self._words
