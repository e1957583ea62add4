"""A glimpse of a source that does not say what it holds: marks of a few samples throughout.

A source of one's own may open files and connections when it is first read, which ranks that are
forked later must not share; so a fork reads the samples, tells their marks and is gone. It hears
nothing, says nothing and has a second; what it did not get to counts for nothing. Each sample is
read twice, from the same state of the global random generators: one that is another each time has
no mark, and if all are, the data is known by its length alone.

A mark must be the same on another machine, whose kernels and decoders round differently. So text
and whole values count as they are, and of arrays three numbers to three digits. Some marks that
differ are still a chance; most of them are other data (`are_other`).

Not proof against a change in other samples than these: `identity()` is. Cost: a fork and sixteen
samples, 0.1 s if they are quick to load, a second at most.
"""

import dataclasses
import datetime
import numbers
import os
import random
import select
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.sources import Ids, Source
from shoal.logs import warn_on_screen
from shoal.processes import die_with_parent

NUM_SAMPLES = 8
MOST_S = 1.0
_MOST_ELEMENTS = 1 << 16  # of an array, and characters of a text
_PLAIN = (type(None), numbers.Number, datetime.date, datetime.time, uuid.UUID)
_UNTOLD, _VARIES = "-", "~"  # in the place of a mark


def marks_of(source: Source) -> list[str]:
    """A mark for each of some samples from the first to the last."""
    told = _told_by_fork(source).split()[:NUM_SAMPLES]
    if _VARIES in told and not set(told) - {_UNTOLD, _VARIES}:
        _tell_of_draws(type(source).__name__)
    return [_UNTOLD if mark == _VARIES else mark for mark in told]


def are_other(before: list[str], now: list[str]) -> bool:
    """Whether these are marks of other data: most of those that both know differ."""
    pairs = [pair for pair in zip(before, now, strict=False) if _UNTOLD not in pair]
    return 2 * sum(one != other for one, other in pairs) > len(pairs)


def mark_of(sample: Any) -> str:
    """What a sample is like, in eight characters."""
    hashed = xxhash.xxh3_64()
    for part in _parts(sample):
        hashed.update(part.encode(errors="surrogatepass") + b"\0")
    return hashed.hexdigest()[:8]


def spread(length: int, most: int) -> Ids:
    """Some places from the first to the last."""
    return np.unique(np.linspace(0, length - 1, min(length, most)).astype(np.int64))


@cache
def _tell_of_draws(kind: str) -> None:
    warn_on_screen(
        f"Samples of the {kind} are others each time that they are read, so a run that goes on "
        "knows this data by its length alone. To have it compared, give the class a method "
        "identity() that returns a text which changes with the data."
    )


def _told_by_fork(source: Source) -> str:
    ours, theirs = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        _tell(source, theirs, parent)
    os.close(theirs)
    told, deadline = b"", time.monotonic() + MOST_S
    try:
        while (left := deadline - time.monotonic()) > 0 and select.select([ours], [], [], left)[0]:
            if not (chunk := os.read(ours, 4096)):
                break
            told += chunk
    finally:
        os.close(ours)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return told[: told.rfind(b" ") + 1].decode()  # the last mark may be a part of one


def _tell(source: Source, pipe: int, parent: int) -> None:
    """In the fork: never returns."""
    try:
        die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (whatever stood there)
        torch.set_num_threads(1)
        for index in spread(len(source), NUM_SAMPLES).tolist():
            first, second = _read(source, index), _read(source, index)
            os.write(pipe, f"{first if first == second else _VARIES} ".encode())
    finally:
        os._exit(0)


def _read(source: Source, index: int) -> str:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    try:
        return mark_of(source[index])
    except BaseException:  # noqa: BLE001 (a sample that fails is told of when it is trained on)
        return _UNTOLD


def _parts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield str(name)
            yield from _parts(part)
    elif isinstance(value, tuple | list):
        yield f"{len(value)} parts"
        for part in value:
            yield from _parts(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _parts({of.name: getattr(value, of.name) for of in dataclasses.fields(value)})
    elif isinstance(value, str | bytes | bytearray | memoryview):
        content = value if isinstance(value, str) else bytes(value)
        yield f"{len(content)} {content[:_MOST_ELEMENTS]!r}"
    else:
        array = None if isinstance(value, int) else _array(value)
        if array is not None:
            yield _form(array)
        else:
            yield str(value) if isinstance(value, _PLAIN) else type(value).__qualname__


def _array(value: Any) -> NDArray[Any] | None:
    """Numbers of any library as an array; None for what has none, and is known by its type."""
    try:
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            value = value.float() if value.dtype == torch.bfloat16 else value
        array = np.asarray(value)
    except Exception:  # noqa: BLE001 (whatever a foreign object raises when it is asked)
        return None
    return array if array.dtype.kind in "biuf" else None


def _form(array: NDArray[Any]) -> str:
    """Its shape, how large its numbers are, and where they lie; not their last digits."""
    flat = array.reshape(-1)
    flat = np.nan_to_num(flat[:: max(1, flat.size // _MOST_ELEMENTS)].astype(np.float64))
    size = float(np.abs(flat).mean()) if flat.size else 0.0
    scaled = flat / (size or 1.0)
    slope = float((scaled * np.cos(np.arange(flat.size))).sum()) / max(1.0, flat.size**0.5)
    mean = float(scaled.sum()) / max(1, flat.size)
    places = [round(number, 2) + 0.0 for number in (mean, slope)]  # there is no -0.0
    return f"{array.dtype.kind} {list(array.shape)} {size:.2e} {places}"
