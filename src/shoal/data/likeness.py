"""Whether data is the data that a run began with: told by content, at the price of a few samples.

A run that goes on finds its place in the data by its step alone, so it would train on other data
of the same length without a word. `content_name` gives a short text to keep beside the run and to
compare. It looks through layers (maps, caches, quarantine) to what lies below, and does not go by
paths or times, so a file may be moved. What a source says itself counts (`identity()`, or
`content_name()` where the first goes by paths); of files it is their sizes and some blocks, of
what lies in memory some rows. A source of one's own without `identity()` has no name, and is known
by its length alone: to load a sample of it here might open what forks must not share.

Not proof against a change in the middle of a file: that is what shards are for, whose every byte
counts. Code counts neither: a mended transform is the recipe's business. Cost: milliseconds.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from shoal.data.packing import pack
from shoal.data.sources import TensorSource, WindowSource, map_tensors
from shoal.data.transforms.cleaning import Cleaned
from shoal.data.transforms.layers import below
from shoal.errors import RecipeError

_NUM_ROWS = 256  # of a tensor
_NUM_SAMPLES = 64  # of a list


def content_name(data: Any) -> str:
    """The same for the same samples; empty if nothing can be told of them cheaply."""
    return ", ".join(filter(None, _parts(data)))


def _parts(source: Any) -> Iterator[str]:
    inner = below(source)
    if inner:
        for part in inner:
            yield from _parts(part)
        if isinstance(source, Cleaned):
            yield _named("kept", source.kept.tobytes())
        return
    for method in ("content_name", "identity"):
        if callable(tell := getattr(source, method, None)):
            yield f"{type(source).__name__} {tell()}"
            return
    if isinstance(source, TensorSource):
        yield _named("tensors", *_rows(source.inputs), *_rows(source.target))
    elif isinstance(source, WindowSource):
        yield _named("windows", *_rows(source.spans))
    elif isinstance(source, list | tuple):
        yield _named("samples", *_packed(source))


def _rows(value: Any) -> list[bytes]:
    """Of each tensor its form and some rows."""
    found: list[bytes] = []

    def look(tensor: Tensor) -> Tensor:
        rows = tensor[torch.from_numpy(_spread(len(tensor), _NUM_ROWS))].contiguous()
        found.append(f"{tensor.dtype} {list(tensor.shape)}".encode())
        found.append(rows.view(-1).view(torch.uint8).numpy().tobytes())
        return tensor

    map_tensors(look, value)
    return found


def _packed(samples: Any) -> Iterator[bytes]:
    yield str(len(samples)).encode()
    for index in _spread(len(samples), _NUM_SAMPLES):
        try:
            yield bytes(pack(samples[index]))
        except RecipeError:  # of no kind that has a form in bytes
            yield type(samples[index]).__qualname__.encode()


def _spread(length: int, most: int) -> Any:
    """Some places from the first to the last."""
    return np.unique(np.linspace(0, length - 1, min(length, most)).astype(np.int64))


def _named(kind: str, *contents: bytes) -> str:
    hashed = xxhash.xxh3_64()
    for content in contents:
        hashed.update(len(content).to_bytes(8, "little"))
        hashed.update(content)
    return f"{kind} {hashed.hexdigest()}"
