"""The samples of a source as bytes, in order, loaded by one process or by several.

With several, forks of this process take a few samples each in turn and send them back through
pipes; they are taken out in the same turn, so what comes does not depend on how many there are, and
a worker that is ahead waits when its pipe is full. One that dies is named with its signal. Nothing
is pickled: a message is a kind, a length and bytes.

Cost: a copy through the pipe. A source that holds connections or threads must bear being forked.
"""

import os
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from shoal.data.readers.records import load_many
from shoal.data.sources import SkipsBad, Source, load_sample
from shoal.data.stalls import STALLS
from shoal.errors import RecipeError, ShoalError, sendable
from shoal.storage.files import write_all
from shoal.system.processes import die_with_parent

TURN = 16  # samples that a worker loads before the next one's are taken
MOST_WORKERS = 256
_HEAD = struct.Struct("<BQ")
_SAMPLE, _UNLIKE, _FAILED, _LEFT_OUT, _NOT_REACHED = range(5)

Encode = Callable[[Any], bytes | bytearray]
Messages = Generator[tuple[int, bytes | bytearray], None, None]


class EncodedSample(NamedTuple):
    """A sample's bytes, and its number in the source."""

    number: int
    content: bytes | bytearray


class LayoutMismatch(Exception):
    """A sample does not fit the layout; `number` is its own."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def encode_samples(
    source: Source, encode: Encode, first: int, num_workers: int
) -> Generator[EncodedSample, None, None]:
    """The samples from `first` on. Those a source has left out are recorded there, and skipped."""
    messages: Messages
    num_workers = min(num_workers, -(-(len(source) - first) // TURN))  # others would have no turn
    if num_workers <= 1:
        messages = _loaded(source, encode, _turns(range(first, len(source))))
    else:
        messages = _from_workers(source, encode, first, num_workers)
    try:
        for number, (kind, content) in zip(range(first, len(source)), messages, strict=False):
            if kind == _SAMPLE:
                yield EncodedSample(number, content)
            elif kind == _UNLIKE:
                raise LayoutMismatch(number)
            elif kind == _LEFT_OUT:
                assert isinstance(source, SkipsBad)
                source.record(number, RecipeError(bytes(content).decode()))
            else:
                failed = RecipeError if kind == _FAILED else ShoalError
                raise failed(bytes(content).decode())
    finally:
        messages.close()  # ends the workers now, and not when the last traceback is forgotten


def _loaded(source: Source, encode: Encode, turns: Iterable[range]) -> Messages:
    """A message for each sample; a turn of them is asked for at once where that can be."""
    for turn in turns:
        try:
            with STALLS.on(np.array(turn)):
                samples = load_many(source, turn)
        except ShoalError as error:  # a server is gone, say: no sample is to blame
            yield _NOT_REACHED, sendable(f"sample {turn[0]}: {error}").encode()
            return
        for at, number in enumerate(turn):
            if samples is None:
                yield _message(source, encode, number, partial(load_sample, source, number))
            else:
                yield _message(source, encode, number, partial(samples.__getitem__, at))


def _turns(numbers: range, place: int = 0, num_workers: int = 1) -> list[range]:
    """Those of the worker at `place`."""
    starts = range(place * TURN, len(numbers), num_workers * TURN)
    return [numbers[start : start + TURN] for start in starts]


def _message(
    source: Source, encode: Encode, number: int, load: Callable[[], Any]
) -> tuple[int, bytes | bytearray]:
    try:
        with STALLS.on(np.array([number])):
            sample = load()
        return _SAMPLE, encode(sample)
    except LayoutMismatch:
        return _UNLIKE, b""
    except ShoalError as error:
        why = sendable(str(error))
        why = why if f"sample {number}" in why else f"sample {number}: {why}"
        if not isinstance(error, RecipeError):  # a server is gone, say: no sample is to blame
            return _NOT_REACHED, why.encode()
        return (_LEFT_OUT if isinstance(source, SkipsBad) else _FAILED), why.encode()


def _from_workers(source: Source, encode: Encode, first: int, num_workers: int) -> Messages:
    workers: list[_EncodeWorker] = []
    try:
        for place in range(num_workers):
            workers.append(
                _EncodeWorker(source, encode, range(first, len(source)), place, num_workers)
            )
            workers[-1].start([worker.descriptor for worker in workers[:-1]])
        for start in range(first, len(source), TURN):
            worker = workers[(start - first) // TURN % num_workers]
            for number in range(start, min(start + TURN, len(source))):
                yield worker.receive(number)
    finally:
        for worker in workers:
            worker.end()


class _EncodeWorker:
    """A fork that loads every `num_workers`-th turn, and this end of its pipe."""

    def __init__(
        self, source: Source, encode: Encode, numbers: range, place: int, num_workers: int
    ):
        self._source, self._encode = source, encode
        self._turns = _turns(numbers, place, num_workers)
        self.descriptor, self.pid = -1, -1

    def start(self, of_others: list[int]) -> None:
        self.descriptor, far_end = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._work(far_end, parent, [self.descriptor, *of_others])
        os.close(far_end)

    def _work(self, pipe: int, parent: int, of_others: list[int]) -> None:
        """In the fork: load and send until all is done or the pipe is closed. Never returns."""
        code = 1
        try:
            die_with_parent(parent)
            # Close the other workers' ends, or a worker would not notice that its pipe is closed.
            for descriptor in of_others:
                os.close(descriptor)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            torch.set_num_threads(1)
            with suppress(BrokenPipeError):
                for kind, content in _loaded(self._source, self._encode, self._turns):
                    write_all(pipe, _HEAD.pack(kind, len(content)))
                    write_all(pipe, content)
            code = 0
        except BaseException:  # noqa: BLE001 (the parent gets the exit code, no more)
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def receive(self, number: int) -> tuple[int, bytes]:
        with STALLS.on(np.array([number])):
            kind, length = _HEAD.unpack(self._read(_HEAD.size, number))
            return kind, self._read(length, number)

    def _read(self, length: int, number: int) -> bytes:
        parts = []
        while length:
            part = os.read(self.descriptor, min(length, 1 << 20))
            if not part:
                raise RecipeError(
                    f"the process that loads sample {number} died ({self._fate()}). Build with "
                    "workers=1 to see it happen, or with fewer workers if memory ran out."
                )
            parts.append(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _fate(self) -> str:
        _, status = os.waitpid(self.pid, 0)
        self.pid = -1
        if os.WIFSIGNALED(status):
            return f"killed by signal {signal.Signals(os.WTERMSIG(status)).name}"
        return f"exit code {os.WEXITSTATUS(status)}"

    def end(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
        if self.pid > 0:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
