"""Train or evaluate in a fresh process, where this one could not fork safely: it has threads.

A notebook, a web server, a script that has computed something: their locks and their OpenMP would
be copied in the middle of what they do. So a new interpreter is started, which gets the recipe by
cloudpickle through a pipe that only it inherits; the one use of pickle, never at rest and never on
a network. Events come back as messages, with the outcome as the last one.

Cost: the import of torch, some two seconds. An interrupt (Ctrl-C, or the notebook's button) stops
the run after its step, a second one at once. If this process dies, the run stops and saves itself.
"""

import dataclasses
import functools
import io
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import cloudpickle
import msgspec

from shoal.cluster.backend import Facts
from shoal.cluster.local import NotLoaded
from shoal.errors import ShoalError, UsageError, sendable
from shoal.events.events import Event, OnEvent, StoppingEvent, TickEvent
from shoal.launch.evaluate import EvaluateOptions, Evaluation, evaluate
from shoal.launch.outcome import Outcome
from shoal.launch.train import Options, train
from shoal.system.fork_server import (
    Ends,
    Prepare,
    Start,
    needs_no_traceback,
    run_and_exit,
    run_fork_server,
)
from shoal.system.processes import describe_exit, readable, stop_signals
from shoal.system.streams import steady
from shoal.training.options import Recipe

_ROOT = str(Path(__file__).resolve().parents[2])  # where this code is, however it was found
_MAIN = (
    f"import sys; sys.path.insert(0, {_ROOT!r}); "
    "from shoal.launch.fresh import main; main(*map(int, sys.argv[1:]))"
)
_FORK_SERVER = _MAIN.replace("import main; main", "import fork_server_main as main; main")
INTERRUPTED = 128 + signal.SIGINT
_LENGTH = 8  # bytes before a message, which are its length
LEAVING_S = 10.0  # that the new process may take to end if what it says is not wanted any more
LOOK_S = 1.0  # between two looks whether it has ended


class _Job(msgspec.Struct):
    """What the new process is given. What is trained, pickled, follows it: a message of msgpack
    holds no more than 4 GiB."""

    path: list[str]  # where modules are found
    name: str
    settings: dict[str, str]
    is_named: bool
    options: Options | None  # of a training; else it is an evaluation
    evaluation: EvaluateOptions | None
    run_dir: str | None
    change: bytes = b""  # what a verb makes of it, pickled; empty if nothing


class _Event(msgspec.Struct, tag=True):
    event: Event


class _Found(msgspec.Struct, tag=True):
    """What the preparation found."""

    facts: dict[str, Any]
    run_dir: str


class _Ended(msgspec.Struct, tag=True):
    outcome: Outcome
    settings: dict[str, str]  # of the recipe, with those that a resumed run remembered


class _Evaluated(msgspec.Struct, tag=True):
    evaluation: Evaluation


class _Failed(msgspec.Struct, tag=True):
    message: str
    trace: str
    exit_code: int


_Result = _Ended | _Evaluated
_Message = _Event | _Found | _Result | _Failed


def can_fork() -> bool:
    """Whether this process may fork and supervise: it has one thread, this is it, and the signals
    that a supervisor takes are free."""
    if threading.current_thread() is not threading.main_thread() or _handles_signals():
        return False
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _handles_signals() -> bool:
    """Whether the caller has a handler or a timer that a run in this process would take."""
    taken = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)
    usual = (signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler)
    return any(signal.getsignal(n) not in usual for n in taken) or any(
        signal.getitimer(signal.ITIMER_REAL)
    )


def train_fresh(
    recipe: Recipe,
    options: Options,
    run_dir: Path | None = None,
    *,
    watch: OnEvent = lambda event: None,
    prepared: Callable[[Facts, Path], None] = lambda facts, run_dir: None,
) -> Outcome:
    """`launch.train` in a fresh process. `watch` and `prepared` are called in this one."""
    last = _done(recipe, _job(recipe, run_dir, options=options), watch, prepared)
    assert isinstance(last, _Ended)
    recipe = dataclasses.replace(recipe, settings=last.settings)
    return msgspec.structs.replace(last.outcome, recipe=recipe)


def evaluate_fresh(
    recipe: Recipe,
    options: EvaluateOptions,
    run_dir: Path | None = None,
    *,
    watch: OnEvent = lambda event: None,
    prepared: Callable[[Facts, Path], None] = lambda facts, run_dir: None,
) -> Evaluation:
    """`launch.evaluate` in a fresh process."""
    last = _done(recipe, _job(recipe, run_dir, evaluation=options), watch, prepared)
    assert isinstance(last, _Evaluated)
    return last.evaluation


def _job(
    recipe: Recipe,
    run_dir: Path | None,
    options: Options | None = None,
    evaluation: EvaluateOptions | None = None,
) -> _Job:
    return _Job(
        path=[entry or os.getcwd() for entry in sys.path],
        name=recipe.name,
        settings=dict(recipe.settings),
        is_named=recipe.is_named,
        options=options,
        evaluation=evaluation,
        run_dir=None if run_dir is None else str(run_dir),
        change=b"" if recipe.change is None else _pickle(recipe.name, recipe.change),
    )


def _done(
    recipe: Recipe, job: _Job, watch: OnEvent, prepared: Callable[[Facts, Path], None]
) -> _Result:
    """What came of a job; raises what was raised where it was done."""
    pickled = _pickle(recipe.name, recipe.find())
    last: _Result | _Failed | None = None
    with _started(job, pickled) as child, _passing_on_signals(child.process):
        for message in child.messages():
            match message:
                case _Event():
                    watch(message.event)
                case _Found():
                    prepared(message.facts, Path(message.run_dir))
                case _Ended() | _Evaluated() | _Failed():
                    last = message
    if isinstance(last, _Ended | _Evaluated):
        return last
    if last is None:
        code = child.process.returncode
        raise NotLoaded(f"The process of the run {describe_exit(code)}.", "", 1)
    if last.exit_code == INTERRUPTED:
        raise KeyboardInterrupt(last.message)
    if last.exit_code == 2 and not last.trace:
        raise UsageError(last.message)
    raise NotLoaded(last.message, last.trace, last.exit_code)


def _pickle(name: str, value: Any) -> bytes:
    try:
        return _dumps(value)
    except Exception as error:
        raise UsageError(
            f"{name} cannot be sent to the process that trains it: {error}. A Run must not "
            "hold open files, connections or locks: open them in a function of the recipe, or give "
            "the recipe as file.py:function."
        ) from error


def _dumps(value: Any) -> bytes:
    content = io.BytesIO()
    _Pickler(content).dump(value)
    return content.getvalue()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Sends functions with `functools.cache` as others: by value, where no import finds them.

    cloudpickle sends them by name, which the new process does not know in a script's main module.
    What they have cached stays here.
    """

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, functools._lru_cache_wrapper):
            names = (value.__module__, value.__qualname__)
            if names[0] == "__main__" or "<locals>" in names[1]:
                return _cache_again, (value.__wrapped__, value.cache_parameters())
        return super().reducer_override(value)


def _cache_again(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


class _Child:
    """The new process, as this one sees it."""

    def __init__(self, process: subprocess.Popen[bytes], answers: int):
        self.process, self._answers = process, answers

    def messages(self) -> Iterator[_Message]:
        """Those it sends, until the last. What it prints is printed here, until it has ended:
        processes that the recipe has forked may keep both pipes open."""
        assert self.process.stderr is not None
        answers, printed = self._answers, self.process.stderr.fileno()
        unread, open_ones = b"", {answers, printed}
        while open_ones:
            ready = readable(open_ones, LOOK_S)
            if not ready and self.process.poll() is not None:
                return
            for descriptor in ready:
                content = os.read(descriptor, 1 << 16)
                if not content:
                    open_ones.discard(descriptor)
                elif descriptor == printed:
                    with steady():
                        sys.stderr.write(content.decode(errors="replace"))
                else:
                    unread += content
            while len(unread) >= _LENGTH:
                end = _LENGTH + int.from_bytes(unread[:_LENGTH], "big")
                if len(unread) < end:
                    break
                message = msgspec.msgpack.decode(unread[_LENGTH:end], type=_Message)
                unread = unread[end:]
                yield message
                if isinstance(message, _Ended | _Evaluated | _Failed):
                    open_ones.discard(answers)

    def end(self) -> None:
        """At once if it has ended by itself; else asked to stop, and killed if it does not."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(0 if sys.exc_info()[0] else None)
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(LEAVING_S)
            except subprocess.TimeoutExpired:
                self.process.kill()  # with which all its children end
                self.process.wait()


@contextmanager
def _started(job: _Job, pickled: bytes) -> Iterator[_Child]:
    """The new process, which has its job. It has ended after the block."""
    reading, giving = os.pipe()
    answers, writing = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _MAIN, str(reading), str(writing)],
            pass_fds=(reading, writing),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # or a terminal's Ctrl-C would reach it twice
        )
    except BaseException:
        os.close(giving)
        os.close(answers)
        raise
    finally:
        os.close(reading)
        os.close(writing)
    child = _Child(process, answers)
    try:
        with suppress(BrokenPipeError), open(giving, "wb") as pipe:
            _give(pipe, job, pickled)
        yield child
    finally:
        child.end()
        os.close(answers)
        assert process.stderr is not None
        process.stderr.close()


def _give(pipe: BinaryIO, job: _Job, pickled: bytes) -> None:
    content = msgspec.msgpack.encode(job)
    pipe.write(len(content).to_bytes(_LENGTH, "big"))
    pipe.write(content)
    pipe.write(pickled)


def _take(pipe: BinaryIO) -> tuple[_Job, bytes]:
    length = int.from_bytes(pipe.read(_LENGTH), "big")
    job = msgspec.msgpack.decode(pipe.read(length), type=_Job)
    return job, pipe.read()


@contextmanager
def _passing_on_signals(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Signals that ask this process to stop ask the run, unless the caller handles them itself.
    They reach the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def forward(number: int, frame: object) -> None:
        process.send_signal(number)

    usual = (signal.SIG_DFL, signal.default_int_handler)
    ours = [number for number in stop_signals() if signal.getsignal(number) in usual]
    before = {number: signal.signal(number, forward) for number in ours}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(reading: int, writing: int) -> None:
    """Of the new process: do the job that comes on one pipe, and answer on the other."""
    os.set_inheritable(writing, False)
    pending: list[int] = []  # signals that came before the supervisor listens to them

    def interrupt(number: int, frame: object) -> None:
        pending.append(number)
        raise KeyboardInterrupt

    for number in stop_signals():
        signal.signal(number, interrupt)
    with open(reading, "rb") as pipe:
        job, pickled = _take(pipe)
    sys.path[:] = job.path
    answers = _Answers(writing)

    def watch(event: Event) -> None:
        if pending:  # it was raised where Python drops exceptions, and comes again
            os.kill(os.getpid(), pending.pop())
        answers.send(_Event(event))
        if isinstance(event, TickEvent) and answers.wants_stop():
            os.kill(os.getpid(), signal.SIGTERM)

    recipe = Recipe(
        job.name,
        partial(cloudpickle.loads, pickled),
        job.settings,
        job.is_named,
        (lambda run: cloudpickle.loads(job.change)(run)) if job.change else None,
    )
    last: _Result | _Failed
    try:
        last = _do(job, recipe, watch, answers)
    except KeyboardInterrupt:  # before there were ranks to stop
        last = _Failed("stopped before the first step", "", INTERRUPTED)
    except Exception as error:  # noqa: BLE001 (it is raised again where the run was asked for)
        exit_code = error.exit_code if isinstance(error, ShoalError) else 1
        own = getattr(error, "trace", None)
        trace = (
            own if own is not None else "" if needs_no_traceback(error) else traceback.format_exc()
        )
        last = _Failed(sendable(str(error)), sendable(trace), exit_code)
    answers.send(last)


def _do(job: _Job, recipe: Recipe, watch: OnEvent, answers: "_Answers") -> _Result:
    run_dir = None if job.run_dir is None else Path(job.run_dir)

    def found(facts: Facts, run_dir: Path) -> None:
        answers.send(_Found(facts, str(run_dir)))

    if job.options is None:
        assert job.evaluation is not None
        options = job.evaluation
        return _Evaluated(evaluate(recipe, options, run_dir, watch=watch, prepared=found))
    outcome = train(recipe, job.options, run_dir, watch=watch, prepared=found)
    settings = dict(outcome.recipe.settings)
    return _Ended(msgspec.structs.replace(outcome, recipe=None), settings)


class _Answers:
    """Messages to the process that asked for the run. If it has died, the run stops and saves."""

    def __init__(self, descriptor: int):
        self._pipe: BinaryIO | None = open(descriptor, "wb", buffering=0)  # noqa: SIM115 (for the process's life)
        self._stops = False

    def send(self, message: _Message) -> None:
        if isinstance(message, _Event) and isinstance(message.event, StoppingEvent):
            self._stops = True
        if self._pipe is None:
            return
        content = msgspec.msgpack.encode(message)
        unsent = memoryview(len(content).to_bytes(_LENGTH, "big") + content)
        try:
            while unsent:  # a signal may cut a write short
                unsent = unsent[self._pipe.write(unsent) or 0 :]
        except BrokenPipeError:
            self._pipe = None

    def wants_stop(self) -> bool:
        """Whether the caller has died, and the run does not stop yet. True once: a run
        that is asked twice ends at once, without a checkpoint. The caller may have passed on a
        signal just before it died, so ask after the supervisor has looked for one."""
        wants = self._pipe is None and not self._stops
        self._stops |= wants
        return wants


class _ForkServerJob(msgspec.Struct):
    """What a fork server in a fresh process is given."""

    path: list[str]
    log: str
    parent: int
    when_lost: int
    pickled: bytes  # its `prepare`


def fork_server_afresh(when_lost: int = signal.SIGKILL) -> Start:
    """Start a fork server in a fresh process, from one that could not fork safely."""

    def start(ends: Ends, prepare: Prepare, log: Path) -> int:
        try:
            pickled = _dumps(prepare)
        except Exception as error:
            raise UsageError(
                f"The recipe cannot be sent to the process that trains it: {error}. A Run must not "
                "hold open files, connections or locks: give the recipe as file.py:function."
            ) from error
        path = [entry or os.getcwd() for entry in sys.path]
        job = _ForkServerJob(path, str(log), os.getpid(), when_lost, pickled)
        reading, giving = os.pipe()
        control = os.dup(ends[1].fileno())
        try:
            for descriptor in (reading, control):
                os.set_inheritable(descriptor, True)
            command = [sys.executable, "-P", "-c", _FORK_SERVER, str(control), str(reading)]
            pid = os.posix_spawn(sys.executable, command, os.environ, setsid=True)
        except BaseException:
            os.close(giving)
            raise
        finally:
            os.close(reading)
            os.close(control)
        with suppress(BrokenPipeError), open(giving, "wb") as pipe:
            pipe.write(msgspec.msgpack.encode(job))
        return pid

    return start


def fork_server_main(control: int, reading: int) -> None:
    """Of the fresh process: become the fork server that is asked for."""
    os.set_inheritable(control, False)
    with open(reading, "rb") as pipe:
        job = msgspec.msgpack.decode(pipe.read(), type=_ForkServerJob)
    sys.path[:] = job.path
    prepare = partial(_unpickled, job.pickled)
    ends = socket.socket(fileno=control)
    run_and_exit(run_fork_server, ends, prepare, Path(job.log), job.parent, job.when_lost)


def _unpickled(pickled: bytes) -> Any:
    """What the pickled `prepare` returns; a failure to load it is told as one of the recipe."""
    return cloudpickle.loads(pickled)()
