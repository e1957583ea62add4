"""Digests of a few samples, for a source that does not say what it holds.

A source of one's own may open files and connections when it is first read, and ranks that are
forked later must not share them. So a fork reads the samples and sends their digests, and is killed
with all that it started. It has one second, or five if samples are slow; samples that it did not
read in that time have no digest. Each sample is read twice, from the same state of the global
random generators. One that differs from itself has no digest, and if none has one, the data is
known by its length alone.

A digest must be the same on another machine, whose kernels and decoders round differently. So it
has two parts: one of text and whole numbers as they are, and one of three numbers, to three digits,
for each array of fractions or pixels. Data is other data if any first part differs, or more than an
eighth of the second parts; if some samples were seen to vary, only if more digests differ than
chance explains.

A change in samples that were not read is not seen: `identity()` sees it. Cost: a fork and 128
samples, 0.1 s if they are quick to load, five seconds at most. Next: `identity.py`.
"""

import dataclasses
import datetime
import math
import numbers
import os
import random
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

from shoal.data.sources import Ids, Source, stream_of
from shoal.logs import warn_on_screen
from shoal.system.processes import die_with_parent, readable

NUM_SAMPLES = 64
NUM_OF_STREAM = 16
MOST_S = 1.0
ENOUGH = 8  # digests; with fewer, there is more time
LONGEST_S = 5.0
_MOST_ELEMENTS = 1 << 16  # of an array, and characters of a text
_PLAIN = (type(None), numbers.Number, datetime.date, datetime.time, uuid.UUID)
_CHANCE = 1e-4  # of taking the same data for other data, if every sample varies half of the time
_UNTOLD, _VARIES = "-", "~"  # in the place of a digest
_OVER = "."  # after the last one


def sample_digests(source: Source) -> list[str]:
    """A digest for each of some samples from the first to the last."""
    order = _reading_order(len(_looked_at(source)))
    told = _told_by_fork(source)
    if order and not set(told) - {_UNTOLD, _VARIES}:
        why = "are others each time that they are read"
        if _UNTOLD in told:
            why = "cannot be loaded"
        elif not told:
            why = "take more than two seconds to load"
        _tell_of_unknown(f"Samples of the {type(source).__name__} {why}")
    by_place = dict(zip(order, told, strict=False))
    return [by_place.get(place, _UNTOLD) for place in range(len(order))]


def comparable_pairs(before: list[str], now: list[str]) -> list[tuple[str, str]]:
    """Pairs of digests that can be compared."""
    pairs = zip(before, now, strict=False)
    return [pair for pair in pairs if not {_UNTOLD, _VARIES}.intersection(pair)]


def digests_differ(before: list[str], now: list[str]) -> bool:
    """Whether these are digests of other data."""
    pairs = comparable_pairs(before, now)
    num_other = sum(one != other for one, other in pairs)
    if _VARIES in (*before, *now):
        # Those that have a digest may vary too, and were equal twice by chance. If each is one of
        # two at random, half of them differ from the last time; how likely are as many as these?
        as_many = sum(math.comb(len(pairs), n) for n in range(num_other, len(pairs) + 1))
        return as_many / (1 << len(pairs)) < _CHANCE
    has_other_whole = any(one.split(":")[0] != other.split(":")[0] for one, other in pairs)
    return has_other_whole or 8 * num_other > len(pairs)


def digest_sample(sample: Any) -> str:
    """What a sample is like, in eight characters, and four more for what may be rounded."""
    exact, rounded = xxhash.xxh3_64(), xxhash.xxh3_64()
    parts = list(_parts(sample))
    for part in parts:
        hashed = rounded if isinstance(part, _Rounded) else exact
        hashed.update(part.encode(errors="surrogatepass") + b"\0")
    has_rounded = any(isinstance(part, _Rounded) for part in parts)
    return exact.hexdigest()[:8] + (f":{rounded.hexdigest()[:4]}" if has_rounded else "")


def spread_indices(length: int, most: int) -> Ids:
    """Some places from the first to the last."""
    return np.unique(np.linspace(0, length - 1, min(length, most)).astype(np.int64))


class _Rounded(str):
    """A part of a sample that another machine may round differently."""


def _reading_order(count: int) -> list[int]:
    """Of places: by their bits in reverse, so that any first few are spread over the data."""
    num_bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda place: f"{place:0{num_bits}b}"[::-1])


@cache
def _tell_of_unknown(why: str) -> None:
    warn_on_screen(
        f"{why}, so a resumed run knows this data by its length alone. To have it compared, "
        "give the class a method identity() that returns a text which changes with the data."
    )


def _told_by_fork(source: Source) -> list[str]:
    """The digests that a fork had the time for, in the order of reading."""
    ours, theirs = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        _tell(source, theirs, parent)
    os.close(theirs)
    told, began = b"", time.monotonic()
    try:
        while _OVER.encode() not in told:
            limit_s = MOST_S if told.count(b" ") >= ENOUGH else max(MOST_S, LONGEST_S)
            left_s = max(0.0, began + limit_s - time.monotonic())
            if not readable([ours], left_s) or not (chunk := os.read(ours, 4096)):
                break
            told += chunk
    finally:
        os.close(ours)
        for end in (os.killpg, os.kill):  # its group, and itself if it did not get to have one
            with suppress(ProcessLookupError):
                end(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return told[: told.rfind(b" ") + 1].decode().split()  # the last one may be cut off


def _tell(source: Source, pipe: int, parent: int) -> None:
    """In the fork: never returns."""
    try:
        die_with_parent(parent)
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (whatever stood there)
        torch.set_num_threads(1)
        places = _looked_at(source)
        in_turn = [int(places[place]) for place in _reading_order(len(places))]
        for first, second in _read_twice(source, in_turn):
            os.write(pipe, f"{first if first == second else _VARIES} ".encode())
        os.write(pipe, _OVER.encode())
    finally:
        os._exit(0)


def _looked_at(source: Source) -> Ids:
    """The samples that have a digest: of a stream the first ones."""
    is_stream = stream_of(source) is not None
    return np.arange(NUM_OF_STREAM) if is_stream else spread_indices(len(source), NUM_SAMPLES)


def _read_twice(source: Source, indices: list[int]) -> Iterator[tuple[str, str]]:
    stream = stream_of(source)
    if stream is None:
        yield from ((_read(source, index), _read(source, index)) for index in indices)
        return
    found = []
    for _ in range(2):  # as it is opened again
        stream.close()
        with suppress(Exception):  # a stream that fails is reported in training
            stream.hold(np.array(indices))
        found.append([_read(source, index) for index in indices])
    yield from zip(*found, strict=True)


def _read(source: Source, index: int) -> str:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    try:
        return digest_sample(source[index])
    except BaseException:  # noqa: BLE001 (a sample that fails is reported in training)
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
            yield from _of_array(array)
        else:
            yield str(value) if isinstance(value, _PLAIN) else type(value).__qualname__


def _array(value: Any) -> NDArray[Any] | None:
    """Arrays of any library; None for what is none, and is known by its type."""
    try:
        if isinstance(value, Tensor):
            value = value.detach().cpu().resolve_conj().to_dense()
            value = value.float() if value.dtype == torch.bfloat16 else value
        array = np.asarray(value)
    except Exception:  # noqa: BLE001 (whatever a foreign object raises when it is asked)
        return None
    return array if isinstance(value, np.ndarray) or array.dtype.kind != "O" else None


def _of_array(array: NDArray[Any]) -> Iterator[str]:
    """Fractions and pictures by their form, all else as it is."""
    kind, step = array.dtype.kind, max(1, array.size // _MOST_ELEMENTS)
    yield f"{kind} {list(array.shape)}"
    if kind == "V" and array.dtype.names:
        yield from _parts({name: array[name] for name in array.dtype.names})
    elif kind == "O":
        yield from _parts(array.reshape(-1)[::step].tolist())
    elif kind == "c":
        yield from (_Rounded(_form(part)) for part in (array.real, array.imag))
    elif kind == "f" or (array.dtype == np.uint8 and array.ndim > 1):
        yield _Rounded(_form(array))
    else:
        flat = array.reshape(-1)[::step]
        plain = flat.astype(np.int64) if kind in "biu" else flat  # whatever their width
        yield xxhash.xxh3_64_hexdigest(plain.tobytes())


def _form(array: NDArray[Any]) -> str:
    """How large its numbers are, and where they lie; not their last digits."""
    flat = array.reshape(-1)
    if flat.size == 1:
        return f"{float(flat[0]):.5e}"
    flat = np.nan_to_num(flat[:: max(1, flat.size // _MOST_ELEMENTS)].astype(np.float64))
    size = float(np.abs(flat).mean()) if flat.size else 0.0
    scaled = flat / (size or 1.0)
    slope = float((scaled * np.cos(np.arange(flat.size))).sum()) / max(1.0, flat.size**0.5)
    mean = float(scaled.sum()) / max(1, flat.size)
    places = [round(number, 2) + 0.0 for number in (mean, slope)]  # there is no -0.0
    return f"{size:.2e} {places}"
