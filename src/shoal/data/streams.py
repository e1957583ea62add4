"""Streams: samples that come one after the other, without a length and without an index.

    Run(data=dataset)                                an IterableDataset, of torch or of Hugging Face
    Run(data=read)                                   a function that returns an iterator
    shoal.data.stream(read, shuffle=10_000)          shuffled among every 10,000 neighbours
    shoal.data.stream(read, length=52_000)           so that a Run can count `epochs`

A sample's number is its position, counted through all passes: when the stream ends, its next pass
begins. So the batch of a step is a pure function of the step here too, at any number of ranks. Each
rank reads the whole stream and collates what its pieces need; work that is slow belongs into
`shoal.data.mapped(stream, function)`, which only the rank that needs a sample does. Each time that
it is opened the stream must give the same samples. Ranks compare what they read in the message that
commits a step (`ledger.py`), and another sample on one rank ends the run.

A process that begins in the middle (a resumed run, a newcomer) takes the position of a bookmark, if
the stream has `state_dict` and `load_state_dict`. What it reads there is compared with what was
read before; if it differs, or there is no bookmark, the stream is read from its beginning and
skipped, and the log says how many samples that takes.

Not for loaders, and not for what must see all samples at once: weights, lengths, statistics,
evaluation. Cost: the samples of two batches, or of two windows under `shuffle`, are kept on each
rank, and each is hashed once. Next: `orders.py` for the shuffle, `training/stream_state.py`.
"""

import base64
import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from shoal.data.orders import Order, Sequential, WindowShuffled
from shoal.data.packing import BadSample, pack, unpack
from shoal.data.sample_digest import digest_sample
from shoal.data.sources import Ids, is_iterable, raise_of_sample
from shoal.data.stalls import STALLS
from shoal.data.validate import require_whole
from shoal.errors import BadCheckpoint, RecipeError, UsageError
from shoal.logs import log, warn_once
from shoal.system.processes import WORK

LENGTH = 1 << 53
"""What `len()` says of a stream: no run comes to its end."""

_NUM_NOTED = 64  # samples that are read between two notes of where the stream is
_MOST_BYTES = 4 << 20  # of a bookmark
_END = object()


class Bookmark(NamedTuple):
    """A place in a stream, and the mark of the `num_marked` samples that follow it."""

    position: int = 0  # of the next sample
    number: int = 0  # of the pass, from 0
    began: int = 0  # the position at which this pass began
    state: Any = None  # what the stream said of itself; None if nothing
    num_marked: int = 0
    mark: int = 0


_BEGINNING = Bookmark()


class StreamSource:
    """Made by `stream`. Sample i can be asked for while it is near those that were asked for last.

    `hold` comes before the samples of a step are asked for. What was held for the step before stays
    too, since a step may be done again.
    """

    recorded_as = "Stream"
    is_lasting = True  # it gives the same samples from its beginning, whenever that is read
    _low: int  # the first of the last call

    def __init__(self, make: Callable[[], Any], shuffle: int, length: int | None):
        self.length, self.stream_below = length, self
        self.order: Order = WindowShuffled(LENGTH, shuffle) if shuffle > 1 else Sequential(LENGTH)
        self._make, self._window = make, max(1, shuffle)
        self._given: Bookmark | None = None  # from a checkpoint or a peer
        self._reader: _StreamReader | None = None
        self.close()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return self._entry(int(index))[0]

    def keys(self, ids: Ids) -> Ids:
        """A number for the position and the content of each of these samples."""
        if any(int(index) not in self._kept for index in ids):
            self.hold(ids)
        found = np.array([self._entry(int(index))[1] for index in ids], dtype=np.uint64)
        return found.view(np.int64)

    def _entry(self, position: int) -> tuple[Any, int]:
        if position not in self._kept or self._pid != os.getpid():
            self.hold(np.array([position]))
        return self._kept[position]

    def hold(self, ids: Ids) -> None:
        """Have these samples at hand, and let go of those from before the last call."""
        if not len(ids):
            return
        low, high = int(ids.min()), int(ids.max())
        low, stop = low - low % self._window, high - high % self._window + self._window
        if self._pid != os.getpid():
            self.close()  # files that a parent opened have one position for both
        if self._reader is None or low < self._first or low > self._reader.position:
            self._seek(low)
        if low > self._low:
            self._forget_before(self._low)
        self._low = low
        self._read_until(stop)

    def bookmark(self, ids: Ids) -> str:
        """Where to begin to read these samples, as text; empty if the stream cannot say it."""
        low = int(ids.min())
        at = [place for place in self._places if self._first <= place.position <= low]
        if not at or at[-1].state is None:
            return ""
        known = range(at[-1].position, self._first + len(self._kept))
        keys = np.array([self._kept[i][1] for i in known], dtype=np.uint64)
        try:
            packed = pack(tuple(at[-1]._replace(num_marked=len(known), mark=_sum(keys))))
        except RecipeError as error:
            warn_once(f"The stream's state_dict cannot be saved: {error} {_SKIPS}", "state_dict")
            return ""
        if len(packed) > _MOST_BYTES:
            warn_once(f"The stream's state_dict has {len(packed)} bytes. {_SKIPS}", "state_dict")
            return ""
        return base64.b64encode(packed).decode()

    def go_to(self, text: str) -> None:
        """Begin at this bookmark, once samples behind it are asked for."""
        try:
            self._given = Bookmark(*unpack(base64.b64decode(text, validate=True)))
        except (BadSample, TypeError, ValueError) as error:
            raise BadCheckpoint(
                f"What is kept of the stream's position cannot be read: {error}. Begin with the "
                "weights alone (--from)."
            ) from None

    def close(self) -> None:
        """Let go of all, and of what the stream has opened; the next sample opens it again."""
        if self._reader is not None and self._pid == os.getpid():
            self._reader.close()
        self._reader = None
        self._kept: dict[int, tuple[Any, int]] = {}  # by position: the sample and its key
        self._places: list[Bookmark] = []  # before the samples that are kept
        self._first: int = 0  # of those that are kept
        self._low = 0
        self._pid: int = os.getpid()

    def _seek(self, low: int) -> None:
        """Let the reader stand at `low`, where all that was kept is of no use."""
        if self._given is not None and self._given.position <= low:
            begin, self._given = self._given, None
            if self._begin_at(begin):
                self._skip_to(low)
                return
            log.warning("what the stream reads at its bookmark is not what it read there before")
        near = [place for place in self._places if place.position <= low and place.state]
        start, goes_on = (near or [_BEGINNING])[-1], self._reader
        if goes_on is None or not start.position <= goes_on.position <= low:
            self._open(start)
        self._skip_to(low)

    def _begin_at(self, place: Bookmark) -> bool:
        """Open the stream at a bookmark; False if other samples come there than did before."""
        try:
            self._open(place)
            self._read_until(place.position + place.num_marked)
        except RecipeError as error:
            log.warning("the stream's load_state_dict failed: %s", error)
            self.close()
            return False
        keys = np.array([key for _, key in self._kept.values()], dtype=np.uint64)
        if _sum(keys) != place.mark:
            self.close()
            return False
        return True

    def _open(self, place: Bookmark) -> None:
        self.close()
        self._reader = _StreamReader(self._make, self.length, place)
        self._first = self._low = place.position

    def _skip_to(self, low: int) -> None:
        assert self._reader is not None
        count = low - self._reader.position
        if count <= 0:
            return
        warn_once(
            f"The stream is read from sample {self._reader.position} on, and {count} samples are "
            f"skipped, to come to sample {low}. {_SAYS_NOTHING}",
            on_screen=True,
        )
        self._kept, self._places = {}, []
        for _ in self._reader.until(low):
            pass
        self._first = self._low = low

    def _read_until(self, stop: int) -> None:
        assert self._reader is not None
        if self._reader.position < stop:
            self._places.append(self._reader.place())
        for position, sample in self._reader.until(stop):
            self._kept[position] = sample, _key(sample, position)

    def _forget_before(self, position: int) -> None:
        for old in range(self._first, position):
            del self._kept[old]
        self._first = max(self._first, position)
        while self._places and self._places[0].position < position:
            del self._places[0]


class _StreamReader:
    """Reads a stream from a place on, pass after pass. `position` is that of the next sample."""

    def __init__(self, make: Callable[[], Any], length: int | None, place: Bookmark):
        self._make, self._length = make, length
        self.position, self._number, self._began = place.position, place.number, place.began
        self._open(place.state)

    def close(self) -> None:
        """End what the iterator has open: files, connections, threads."""
        end = getattr(self._iterator, "close", None)
        if end is not None:
            with suppress(Exception):  # what it gave is there
                end()

    def place(self) -> Bookmark:
        """Where it is, in the stream's own words if it has some."""
        state = None if self._teller is None else copy.deepcopy(self._teller.state_dict())
        return Bookmark(self.position, self._number, self._began, state)

    def until(self, stop: int) -> Iterator[tuple[int, Any]]:
        """The samples before `stop`, with their positions."""
        while self.position < stop:
            with STALLS.on(np.array([self.position])):
                for position in range(self.position, min(stop, self.position + _NUM_NOTED)):
                    yield position, self._next()
            WORK.done += 1

    def _next(self) -> Any:
        while True:
            with self._blamed():
                sample = next(self._iterator, _END)
            if sample is _END:
                self._end_pass()
                continue
            if self.position - self._began == self._length:
                raise RecipeError(
                    f"The stream goes on after sample {self.position}, and length={self._length} "
                    "says that a pass ends there. Give it its true length, or none."
                )
            self.position += 1
            return sample

    def _end_pass(self) -> None:
        count = self.position - self._began
        if not count:
            raise RecipeError(
                f"The stream gave no sample in pass {self._number + 1}. It is opened again for "
                "each pass, and in each process, and must give all of its samples each time; give "
                "the function that makes an iterator, not an iterator."
            )
        if self._length is not None and count != self._length:
            raise RecipeError(
                f"The stream ended after {count} samples of pass {self._number + 1}, and length="
                f"{self._length}. Give it its true length, or none."
            )
        self._number, self._began = self._number + 1, self.position
        self._open(None)

    def _open(self, state: Any) -> None:
        with self._blamed():
            made = self._make()
            if hasattr(made, "set_epoch"):
                made.set_epoch(self._number)
            teller = made if _tells(made) else None
            if state is not None and teller is not None:
                teller.load_state_dict(state)
            self._iterator = iter(made)
            if teller is None and _tells(self._iterator):
                teller = self._iterator
                if state is not None:
                    teller.load_state_dict(state)
            self._teller = teller

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Around the stream's own code: what fails there is said in a sentence."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 (it is raised)
            raise_of_sample(
                self.position,
                error,
                f"The stream failed at sample {self.position}",
                ". It cannot go on behind an error of its own; work that may fail for a sample "
                "belongs into shoal.data.mapped(stream, function), whose bad samples "
                "shoal.data.quarantine leaves out.",
            )


def stream(data: Any, *, shuffle: int = 0, length: int | None = None) -> StreamSource:
    """A source of samples that come one after the other.

    `data` is an iterable that can be iterated again, or a function that returns an iterator. With
    `shuffle`, samples are shuffled among every so many neighbours, by the run's seed. `length` is
    the number of samples in a pass, if it is known: then a Run can have `epochs`, and a pass of
    another length is an error.
    """
    refuse_below(0, shuffle, "stream(shuffle=...)")
    if length is not None:
        refuse_below(1, length, "stream(length=...)")
    if isinstance(data, Iterator) or not (callable(data) or is_iterable(data)):
        raise UsageError(
            f"stream() was given a {type(data).__name__}. It needs an iterable that can be "
            "iterated again, or a function that returns an iterator: each rank, and each pass, "
            "begins again. Give the function itself: stream(read), not stream(read())."
        )
    return StreamSource(_opener(data), shuffle, length)


def refuse_below(least: int, given: Any, what: str) -> None:
    require_whole(given, what)
    if given < least:
        raise UsageError(f"{what.replace('...', str(given))}: it is at least {least}.")


def _opener(data: Any) -> Callable[[], Any]:
    """What opens the stream: of a dataset a copy, so that none begins where another stopped."""
    if not is_iterable(data):
        made: Callable[[], Any] = data
        return made
    return lambda: _copied(data) if _tells(data) else data


def _copied(data: Any) -> Any:
    """With attributes of its own. Those of Hugging Face share theirs with a plain copy, and the
    number of the pass with other processes."""
    made = copy.copy(data)
    if hasattr(data, "__dict__"):
        own = data.__dict__.items()
        made.__dict__ = {k: v.clone() if isinstance(v, Tensor) else v for k, v in own}
    return made


_SAYS_NOTHING = (
    "A stream that has state_dict and load_state_dict, and comes back by them to the sample where "
    "it was, is not read from its beginning."
)
_SKIPS = "A resumed run will read the stream from its beginning, and skip what it has seen."


def _tells(made: Any) -> bool:
    return hasattr(made, "state_dict") and hasattr(made, "load_state_dict")


def _key(sample: Any, position: int) -> int:
    try:
        content: bytes | bytearray = pack(sample)
    except RecipeError:  # of a kind that has no form in bytes
        content = digest_sample(sample).encode()
    return xxhash.xxh3_64_intdigest(content, position)


def _sum(keys: NDArray[np.uint64]) -> int:
    return int(keys.sum(dtype=np.uint64)) & (LENGTH - 1)
