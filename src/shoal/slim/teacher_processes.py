"""A teacher in processes of its own, which answer for all ranks of a host.

The teacher is loaded in a fork of the process that makes the Run (the one that ranks are forked
from), so no rank holds its memory. That fork keeps `num` workers, which share its pages. Whoever
collates a piece, a loader beside a rank, sends the inputs through a Unix socket and gets the
answers: a connection a piece, which any free worker takes. Batches follow from the step alone, so
loaders ask some steps ahead, and nothing of it is state. A worker that dies is replaced, and what
it was asked is asked again, three times at most; without the process that keeps them, a run ends in
one sentence. All of them end with the process that made the Run.

Cost: inputs and answers through a socket once. Ranks that share a piece (tensor, pipeline) each ask
about it. Read next: `lessons.py`, `data/loader_processes.py`.
"""

import gc
import os
import secrets
import signal
import socket
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

from torch import Tensor

from shoal.comm.unix import is_own
from shoal.data.loader_processes import kinds_of, leave_parent_alone, raised, trace_of
from shoal.data.packing import pack, unpack
from shoal.errors import RecipeError, sendable
from shoal.slim.lessons import Teacher
from shoal.storage.files import write_all
from shoal.system.processes import describe_exit, die_with_parent

_MOST_DEATHS = 3
_LENGTH = 8  # bytes before a message
_PATIENCE_S = 30.0  # of a worker, with a question that does not come
_PERHAPS = "(for want of memory, perhaps: the system's log says so then)"
MakeTeacher = Callable[[], Teacher]


class TeacherProcesses:
    """Asked as the teacher itself is. Pickled, it starts processes where it is read."""

    def __init__(self, make: MakeTeacher, num: int):
        self._make, self._num = make, num
        owner = os.getpid()
        ours, theirs = os.pipe()
        pid = os.fork()
        if not pid:
            _keep_workers(make, num, owner, theirs)
        os.close(theirs)
        weakref.finalize(self, _end, pid, owner)
        with os.fdopen(ours, "rb") as pipe:
            content = pipe.read()
        if not content:
            _, status = os.waitpid(pid, 0)
            how = describe_exit(os.waitstatus_to_exitcode(status))
            raise RecipeError(f"The process that loads the teacher {how} {_PERHAPS}.")
        facts = _opened(content)
        self.kind: str = facts["kind"]
        self.fingerprint: str = facts["fingerprint"]
        self._address: str = facts["address"]

    def __reduce__(self) -> Any:
        return TeacherProcesses, (self._make, self._num)

    def __call__(self, inputs: Any) -> dict[str, Tensor]:
        """The answers to a batch, with the bits that the teacher would give here."""
        question = pack(inputs)
        for _ in range(_MOST_DEATHS):
            if (content := self._asked(question)) is not None:
                answers: dict[str, Tensor] = _opened(content)
                return answers
        raise RecipeError(
            f"Processes of the teacher died {_MOST_DEATHS} times over these samples {_PERHAPS}. "
            "Ask it where batches are made (without teachers=) to see why."
        )

    def _asked(self, question: bytearray) -> bytearray | None:
        """What comes back; None if the worker died."""
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(self._address)
            except ConnectionRefusedError:
                raise _gone() from None
            if not is_own(connection):  # the name became free, and another user took it
                raise _gone()
            with suppress(ConnectionError):
                _send(connection, question)
                return _received(connection)
        return None


def _gone() -> RecipeError:
    return RecipeError(
        f"The processes of the teacher are gone: the one that keeps them was killed {_PERHAPS}. "
        "Go on with --resume."
    )


def _end(pid: int, owner: int) -> None:
    if os.getpid() == owner:  # not where a fork of it drops its copy
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(pid, signal.SIGKILL)  # its workers end with it
            os.waitpid(pid, 0)


def _keep_workers(make: MakeTeacher, num: int, parent: int, pipe: int) -> NoReturn:
    """In the process that holds the teacher: load it, say so, and replace workers that die."""
    try:
        die_with_parent(parent)
        leave_parent_alone((pipe,))
        with socket.socket(socket.AF_UNIX) as listener:
            teacher, told = _prepared(make, listener)
            with suppress(BrokenPipeError):
                write_all(pipe, told)
            os.close(pipe)
            workers: set[int] = set()
            while teacher is not None:
                while len(workers) < num:
                    workers.add(_fork_worker(teacher, listener))
                workers.discard(os.wait()[0])
    finally:
        os._exit(1)


def _prepared(make: MakeTeacher, listener: socket.socket) -> tuple[Teacher | None, bytearray]:
    """The teacher and what to tell of it; without one, why there is none."""
    # An abstract name leaves no file behind. Both ends look whose process the other one is.
    address = f"\0shoal-teacher-{secrets.token_hex(16)}"
    try:
        teacher = make()
        listener.bind(address)
        listener.listen(1024)
    except BaseException as error:  # noqa: BLE001 (raised again by the parent)
        return None, _failure(error)
    gc.collect()
    gc.freeze()  # or a collection in a worker would copy the pages that all share
    facts = {"kind": teacher.kind, "fingerprint": teacher.fingerprint, "address": address}
    return teacher, pack(facts)


def _fork_worker(teacher: Teacher, listener: socket.socket) -> int:
    keeper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        die_with_parent(keeper)
        while True:
            connection, _ = listener.accept()
            with connection, suppress(ConnectionError, TimeoutError):
                _serve(teacher, connection)
    finally:
        os._exit(1)


def _serve(teacher: Teacher, connection: socket.socket) -> None:
    connection.settimeout(_PATIENCE_S)
    if not is_own(connection) or (question := _received(connection)) is None:
        return
    try:
        answer = pack(teacher(unpack(question)))
    except BaseException as error:  # noqa: BLE001 (raised again where it was asked)
        answer = _failure(error)
    _send(connection, answer)


def _failure(error: BaseException) -> bytearray:
    told = {"kinds": kinds_of(error), "message": sendable(str(error)), "trace": trace_of(error)}
    return pack(told)


def _opened(content: bytes | bytearray) -> Any:
    """What a message holds; raises what was raised there."""
    found = unpack(bytearray(content))
    if "kinds" in found:
        raise raised(found["kinds"], found["message"], found["trace"])
    return found


def _send(connection: socket.socket, content: bytearray) -> None:
    connection.sendall(len(content).to_bytes(_LENGTH, "little"))
    connection.sendall(content)


def _received(connection: socket.socket) -> bytearray | None:
    """A whole message; None if the other end was closed before it was whole."""
    if (head := _exactly(connection, _LENGTH)) is None:
        return None
    return _exactly(connection, int.from_bytes(head, "little"))


def _exactly(connection: socket.socket, num_bytes: int) -> bytearray | None:
    content = bytearray(num_bytes)
    unread = memoryview(content)
    while unread:
        count = connection.recv_into(unread)
        if not count:
            return None
        unread = unread[count:]
    return content
