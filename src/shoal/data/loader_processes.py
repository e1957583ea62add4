"""Loader processes: they load pieces ahead of their step, beside a rank.

For samples that are slow to read or decode: `loaders=2` in a Run gives each rank two processes that
load its next pieces. They are forked from the rank, so a source needs no code of its own; a piece
comes back in shared memory, packed (`packing.py`) so that it is read without a copy. The order is a
pure function of the step, so there is no state to save: after a restart the same pieces are
requested again. A loader that dies is replaced by a new fork, which repeats its work; the third
death over one piece ends the run with an error that names the samples.

Not for sources that gather rows in memory: passing them on would cost more than loading them.
Cost: a copy of each piece, and memory for the pieces that are loaded ahead. Next: `batches.py`.
"""

import builtins
import mmap
import os
import signal
import stat
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from shoal.data.packing import pack, unpack
from shoal.data.permutation import Ids
from shoal.data.readers.records import SourceLost
from shoal.data.sources import format_ids, load_failure
from shoal.data.stalls import judge_wait
from shoal.errors import RecipeError, ShoalError, sendable
from shoal.logs import for_the_screen, log
from shoal.storage.files import write_all
from shoal.system.fork_server import trace_of_cause
from shoal.system.processes import die_with_parent, readable
from shoal.system.traces import user_traceback

Load = Callable[[int, Ids], tuple[Any, Any, Ids]]  # (epoch, ids) -> inputs, target, ids that count
_MOST_DEATHS = 3
_AHEAD = 2  # pieces that a loader has to load, or has loaded and the rank did not take yet
_SLOTS = 6  # pieces that may be in memory at once, those that the rank still uses among them
_PATIENCE_S = 30.0
_CLOSING_S = 2.0
_MOST_TRACE = 16_000  # characters


class PieceKey(NamedTuple):
    step: int
    piece: int


class PieceSchedule:
    """The order in which pieces are needed: in each step the same as in the step before."""

    def __init__(self) -> None:
        self._step, self._own, self._before = -1, [], []  # type: tuple[int, list[int], list[int]]

    def after(self, key: PieceKey) -> Iterator[PieceKey]:
        """This piece, and those that will be asked for next, as far as that is known."""
        if key.step != self._step:
            self._step, self._own, self._before = key.step, [], self._own
        if key.piece not in self._own:
            self._own.append(key.piece)
        turn = self._before if key.piece in self._before else [key.piece]
        yield from (PieceKey(key.step, piece) for piece in turn[turn.index(key.piece) :])
        for step in count(key.step + 1):
            yield from (PieceKey(step, piece) for piece in turn)


class _LoadRequest(msgspec.Struct, array_like=True):
    number: int
    epoch: int
    num_ids: int
    slot: int  # where the ids stand, and where the piece goes


class _LoadReply(msgspec.Struct, array_like=True):
    number: int
    num_bytes: int
    error: str = ""
    kinds: list[str] = []  # the error's class and those above it, by name
    trace: str = ""  # of what caused the error, if that was not ours
    warnings: list[str] = []  # for the screen, which only the rank reaches


class _PendingPiece(NamedTuple):
    number: int
    epoch: int
    ids: Ids


class LoaderTraceback(Exception):
    """What an error of a loader came from: the traceback there, as text."""


class Loaders:
    """`ask` for pieces ahead of time, `take` them when they are needed. `close` at the end.

    Processes start with the first `ask`: a run that fails before has nothing to leave behind.
    """

    def __init__(self, load: Load, num_loaders: int):
        self._loaders = [_Loader(load) for _ in range(num_loaders)]
        self._asked: dict[PieceKey, tuple[_Loader, int]] = {}
        self._number = 0

    def has(self, key: PieceKey) -> bool:
        return key in self._asked

    @property
    def has_room(self) -> bool:
        """Whether one more may be asked for: two are enough to keep a loader busy."""
        return any(loader.has_room for loader in self._loaders)

    def ask(self, key: PieceKey, epoch: int, ids: Ids) -> None:
        """Let the loader with least to do load these samples. Only if there is room."""
        self._number += 1
        able = (loader for loader in self._loaders if loader.has_room)
        loader = min(able, key=lambda loader: len(loader.waiting))
        self._asked[key] = loader, self._number
        loader.ask(_PendingPiece(self._number, epoch, ids))

    def take(self, key: PieceKey) -> tuple[Any, Any, Ids]:
        """What was asked for, once it is there."""
        loader, number = self._asked.pop(key)
        return loader.take(number)

    def forget_before(self, step: int) -> None:
        """Drop pieces of earlier steps that were not taken: another rank has them now."""
        for key in [key for key in self._asked if key.step < step]:
            loader, number = self._asked.pop(key)
            loader.forget(number)

    def close(self) -> None:
        for loader in self._loaders:
            loader.close()


class _Loader:
    """One process, its pipes, and the shared memory that it writes pieces into."""

    def __init__(self, load: Load):
        self._load = load
        self.waiting: dict[int, _PendingPiece] = {}  # by number, in the order of the requests
        self._done: dict[int, _LoadReply] = {}
        self._forgotten: set[int] = set()
        self._deaths: dict[int, int] = {}
        self._slots: list[_PieceSlot] = []
        self._free = list(range(_SLOTS))
        self._slot_of: dict[int, int] = {}
        self._pid = 0  # until the first request: without one there is nothing to close

    @property
    def has_room(self) -> bool:
        return bool(self._free) and len(self.waiting) + len(self._done) < _AHEAD

    def ask(self, asked: _PendingPiece) -> None:
        if not self._pid:
            self._slots = [_PieceSlot() for _ in range(_SLOTS)]
            self._start()
        self._slot_of[asked.number] = self._free.pop()
        self.waiting[asked.number] = asked
        self._send(asked)

    def take(self, number: int) -> tuple[Any, Any, Ids]:
        self._await(number)
        reply, slot = self._done.pop(number), self._slot_of.pop(number)
        if reply.kinds:
            self._free.append(slot)
            raise raised(reply.kinds, reply.error, reply.trace)
        content = self._slots[slot].content(reply.num_bytes)
        weakref.finalize(content, self._free.append, slot)  # once no tensor looks into it
        inputs, target, ids = unpack(content.data)
        return inputs, target, ids

    def forget(self, number: int) -> None:
        if number in self.waiting:
            self._forgotten.add(number)
        else:
            del self._done[number]
            self._free.append(self._slot_of.pop(number))

    def close(self) -> None:
        if not self._pid:
            return
        os.close(self._requests)
        if not _gone_within(self._pid, _CLOSING_S):
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        os.close(self._replies)
        self._pid = 0
        for slot in self._slots:
            slot.close()

    def _start(self) -> None:
        theirs, self._requests = os.pipe()
        self._replies, answers = os.pipe()
        self._buffer = b""
        rank = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            _serve(self._load, rank, (theirs, answers), self._slots)
        os.close(theirs)
        os.close(answers)

    def _send(self, asked: _PendingPiece) -> None:
        slot = self._slot_of[asked.number]
        # Not through the pipe: a full one would block where no timeout applies.
        os.pwrite(self._slots[slot].file, asked.ids.tobytes(), 0)
        request = _LoadRequest(asked.number, asked.epoch, len(asked.ids), slot)
        with suppress(BrokenPipeError):  # noticed where the answer is awaited
            _write(self._requests, msgspec.msgpack.encode(request))

    def _await(self, number: int) -> None:
        since = time.monotonic()
        while number not in self._done:
            if readable([self._replies], _PATIENCE_S):
                self._hear()
                continue
            late = judge_wait(self.waiting[number].ids, time.monotonic() - since)
            if late.is_lost:
                raise SourceLost(str(late))
            log.warning("%s: being loaded since %.0f s", late.samples, late.seconds)

    def _hear(self) -> None:
        chunk = os.read(self._replies, 1 << 16)
        if not chunk:
            self._repair()
            return
        self._buffer += chunk
        while (end := _end_of_message(self._buffer)) is not None:
            reply = msgspec.msgpack.decode(self._buffer[4:end], type=_LoadReply)
            self._buffer = self._buffer[end:]
            for_the_screen.extend(reply.warnings)
            del self.waiting[reply.number]
            self._deaths.pop(reply.number, None)
            self._done[reply.number] = reply
            if reply.number in self._forgotten:
                self._forgotten.remove(reply.number)
                self.forget(reply.number)

    def _repair(self) -> None:
        """The process died: start another, which does its work again."""
        _, status = os.waitpid(self._pid, 0)
        os.close(self._requests)
        os.close(self._replies)
        self._start()
        number, asked = next(iter(self.waiting.items()))  # what it was at
        self._drop_forgotten()
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "an early exit"
        if number in self.waiting:
            self._deaths[number] = self._deaths.get(number, 0) + 1
        if self._deaths.get(number) == _MOST_DEATHS:
            raise RecipeError(
                f"The process that loads {format_ids(asked.ids)} died {_MOST_DEATHS} times over "
                f"them, the last time by {how}. Load them by themselves (loaders=0) to see why."
            )
        log.warning("a loader died by %s; another one does its work", how)
        for again in self.waiting.values():
            self._send(again)

    def _drop_forgotten(self) -> None:
        """Do not load forgotten pieces again, and do not count their deaths."""
        for number in self._forgotten:
            del self.waiting[number]
            self._deaths.pop(number, None)
            self._free.append(self._slot_of.pop(number))
        self._forgotten.clear()


class _PieceSlot:
    """Shared memory for the ids of a piece, then for the piece, as large as the largest so far."""

    def __init__(self) -> None:
        self.file = os.memfd_create("shoal-piece")
        self._map: mmap.mmap | None = None

    def write(self, packed: bytearray) -> None:
        """In the loader."""
        if os.fstat(self.file).st_size < len(packed):
            os.ftruncate(self.file, len(packed))
        with mmap.mmap(self.file, len(packed)) as area:
            area[:] = packed

    def content(self, num_bytes: int) -> NDArray[np.uint8]:
        """In the rank: an array of its own, which lives as long as something looks into it."""
        if self._map is None or len(self._map) < num_bytes:
            self._map = mmap.mmap(self.file, os.fstat(self.file).st_size)
        return np.frombuffer(self._map, dtype=np.uint8, count=num_bytes)

    def close(self) -> None:
        os.close(self.file)  # the map stays until no tensor uses it


def _serve(load: Load, rank: int, pipes: tuple[int, int], slots: Sequence[_PieceSlot]) -> None:
    """In the process that loads: never returns."""
    code, (requests, answers) = 1, pipes
    try:
        die_with_parent(rank)
        leave_parent_alone(pipes)
        with os.fdopen(requests, "rb") as stream:
            while head := stream.read(4):
                body = stream.read(int.from_bytes(head, "little"))
                request = msgspec.msgpack.decode(body, type=_LoadRequest)
                for_the_screen.clear()
                reply = _answer(load, request, slots)
                reply.warnings = list(for_the_screen)
                _write(answers, msgspec.msgpack.encode(reply))
        code = 0
    except BrokenPipeError:
        code = 0  # the rank is gone
    finally:
        os._exit(code)


def _answer(load: Load, request: _LoadRequest, slots: Sequence[_PieceSlot]) -> _LoadReply:
    content = os.pread(slots[request.slot].file, 8 * request.num_ids, 0)
    ids = np.frombuffer(bytearray(content), dtype=np.int64)  # torch warns of what is only read
    try:
        packed = pack(load(request.epoch, ids))
        slots[request.slot].write(packed)
    except ShoalError as error:
        told = sendable(str(error))
        return _LoadReply(request.number, 0, told, kinds_of(error), trace_of(error))
    except BaseException as error:  # noqa: BLE001 (the source's own, told by the rank)
        said = sendable(load_failure(ids, error))
        return _LoadReply(request.number, 0, said, [RecipeError.__name__], trace_of(error))
    return _LoadReply(request.number, len(packed))


def trace_of(error: BaseException) -> str:
    """Its traceback, or of what caused one of ours; the end, if it is long: there is the line that
    raised."""
    if isinstance(error, ShoalError):
        trace = trace_of_cause(error)
    else:
        trace = user_traceback(error)
    return sendable(trace[-_MOST_TRACE:])


def kinds_of(error: BaseException) -> list[str]:
    """Its class and those above it, by name."""
    return [kind.__name__ for kind in type(error).mro()]


def raised(kinds: Sequence[str], message: str, trace: str) -> BaseException:
    """An error of another process, of the kind that this one would raise itself.

    By name, and a class that only the other has imported by the nearest above it.
    """
    known = {kind.__name__: kind for kind in (*_builtin_errors(), *_kinds(ShoalError))}
    kind = next(known[name] for name in kinds if name in known)
    error = kind.__new__(kind, message)  # whatever a class asks for when it is made
    if trace:
        error.__cause__ = LoaderTraceback(f"\n{trace}")
    return error


def _builtin_errors() -> Iterator[type[BaseException]]:
    return (
        kind
        for kind in vars(builtins).values()
        if isinstance(kind, type) and issubclass(kind, BaseException)
    )


def _kinds(kind: type[ShoalError]) -> Iterator[type[ShoalError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from _kinds(below)


def leave_parent_alone(kept: Sequence[int]) -> None:
    """Hold none of the parent's connections: its peers must notice when it dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in kept:
            with suppress(OSError):
                mode = os.fstat(number).st_mode
                if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
                    # Objects of the parent still hold the number: closed, another file would get
                    # it, and be closed with such an object.
                    os.dup2(nothing, number, inheritable=False)


def _write(file: int, message: bytes) -> None:
    write_all(file, len(message).to_bytes(4, "little") + message)


def _end_of_message(buffer: bytes) -> int | None:
    """Where the first message in a buffer ends; None while it is not all there."""
    end = 4 + int.from_bytes(buffer[:4], "little")
    return end if len(buffer) >= max(4, end) else None


def _gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG)[0]:
            return True
        time.sleep(0.002)
    return False
