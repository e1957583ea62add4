"""Dataset identity: whether data is the data that a run began with, at the price of a few samples.

A resumed run finds its place in the data by its step alone, so it would train on other data of the
same length without a word. `content_name` gives a short text to keep beside the run and to compare.
It looks through wrappers (maps, caches, quarantine) to the sources below, and ignores paths and
times, so a file may be moved. A source may name its content itself (`identity()`, or
`content_name()` where the first depends on paths); of files it is their sizes and some blocks, of
tensors in memory some rows, and of any other source some samples (`sample_digest.py`).

Not proof against a change in the middle of a file: that is what shards are for, whose every byte
counts. Code does not count: a corrected transform is the recipe's business. Cost: milliseconds.
"""

from collections.abc import Iterator
from typing import Any

import torch
import xxhash
from torch import Tensor

from shoal.data.packing import pack
from shoal.data.sample_digest import (
    comparable_pairs,
    digest_sample,
    digests_differ,
    sample_digests,
    spread_indices,
)
from shoal.data.sources import TensorSource, WindowSource, map_tensors, recorded_name
from shoal.data.transforms.wrapped import FilteredSource, inner_sources
from shoal.errors import RecipeError

_NUM_ROWS = 256  # of a tensor
_NUM_SAMPLES = 64  # of a list
_MARKS = "glimpse "  # as run.json has it: before the digests of a source that has no identity


def content_name(data: Any, may_sample: bool = True) -> str:
    """The same for the same samples; empty if they cannot be identified cheaply.

    Unless it `may_sample`, a part that says nothing of itself is left out.
    """
    return ", ".join(filter(None, _parts(data, may_sample)))


def identities_differ(before: str, now: str) -> bool | None:
    """Whether two names are of different contents; None if that is unknown for some part."""
    ones, others = before.split(", "), now.split(", ")
    if len(ones) != len(others):  # there may be no marks in the older one
        ones, others = ([part for part in of if not _has_marks(part)] for of in (ones, others))
        return True if ones != others else None
    found = list(map(_differ, ones, others))
    return True if True in found else None if None in found else False


def short_identity(name: str) -> str:
    """A name for a message: marks are many."""
    parts = name.split(", ")
    return ", ".join(_named("glimpse", x.encode()) if _has_marks(x) else x for x in parts)


def _differ(one: str, other: str) -> bool | None:
    marked = [part.split()[1:] for part in (one, other) if _has_marks(part)]
    if not marked:
        return one != other
    if len(marked) == 1 or not comparable_pairs(*marked):
        return None
    return digests_differ(*marked)


def _has_marks(part: str) -> bool:
    return f"{part} ".startswith(_MARKS)


def _parts(source: Any, may_sample: bool = True) -> Iterator[str]:
    inner = inner_sources(source)
    if inner:
        for part in inner:
            yield from _parts(part, may_sample)
        if isinstance(source, FilteredSource):
            yield _named("kept", source.kept.tobytes())
        return
    for method in ("content_name", "identity"):
        if callable(tell := getattr(source, method, None)):
            yield f"{recorded_name(source)} {tell()}"
            return
    if isinstance(source, TensorSource):
        yield _named("tensors", *_rows(source.inputs), *_rows(source.target))
    elif isinstance(source, WindowSource):
        yield _named("windows", *_rows(source.spans))
    elif isinstance(source, list | tuple):
        yield _named("samples", *_packed(source))
    elif may_sample:
        yield f"{_MARKS}{' '.join(sample_digests(source))}".strip()


def _rows(value: Any) -> list[bytes]:
    """Of each tensor its form and some rows."""
    found: list[bytes] = []

    def look(tensor: Tensor) -> Tensor:
        rows = tensor[torch.from_numpy(spread_indices(len(tensor), _NUM_ROWS))].contiguous()
        found.append(f"{tensor.dtype} {list(tensor.shape)}".encode())
        found.append(rows.view(-1).view(torch.uint8).numpy().tobytes())
        return tensor

    map_tensors(look, value)
    return found


def _packed(samples: Any) -> Iterator[bytes]:
    yield str(len(samples)).encode()
    for index in spread_indices(len(samples), _NUM_SAMPLES):
        try:
            yield bytes(pack(samples[index]))
        except RecipeError:  # of no kind that has a form in bytes
            yield digest_sample(samples[index]).encode()


def _named(kind: str, *contents: bytes) -> str:
    hashed = xxhash.xxh3_64()
    for content in contents:
        hashed.update(len(content).to_bytes(8, "little"))
        hashed.update(content)
    return f"{kind} {hashed.hexdigest()}"
