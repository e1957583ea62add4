"""Arms in processes of their own, of which none runs but the one whose turn it is.

Some peers take processor time while nobody asks anything of them: two idle processes of torch RPC
look for messages without a pause, and fill two cores. Measured in one process, or beside one
another, every other arm would pay for that. So each set of arms has a process, which is stopped
with all that it started (SIGSTOP) until one of its arms is to be measured. What a process finds
cold when it wakes, it has warmed up before it is timed: that is its measure's own business.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import TypeVar

import msgspec
import psutil

from bench import harness
from shoal.system.processes import die_with_parent

Arms = dict[str, Callable[[], float]]
T = TypeVar("T")
PATIENCE_S = 10.0


@contextmanager
def started(module: str, sets: Sequence[Sequence[str]]) -> Iterator[Arms]:
    """The arms of several sets, each by the words with which `python -m module` serves them."""
    with ExitStack() as stack:
        arms: Arms = {}
        for words in sets:
            arms |= stack.enter_context(_set(module, words))
        yield arms


@contextmanager
def _set(module: str, words: Sequence[str]) -> Iterator[Arms]:
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        env=harness.child_environment(),
        cwd=harness.ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        names = _answer(process, list[str])
        _signal(process, signal.SIGSTOP)
        yield {name: partial(_measured, process, name) for name in names}
    finally:
        _end(process)


def _measured(process: subprocess.Popen[str], name: str) -> float:
    _signal(process, signal.SIGCONT)
    assert process.stdin is not None
    print(name, file=process.stdin, flush=True)
    seconds = _answer(process, float)
    _signal(process, signal.SIGSTOP)
    return seconds


def _answer(process: subprocess.Popen[str], kind: type[T]) -> T:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise harness.ArmFailed(f"{process.args} ended before it answered; see above.")
    return msgspec.json.decode(line, type=kind)


def _signal(process: subprocess.Popen[str], number: int) -> None:
    """To it, and to all that it and they started."""
    with suppress(psutil.NoSuchProcess):
        one = psutil.Process(process.pid)
        one.send_signal(number)  # first: one that stands still starts nobody
        for other in one.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                other.send_signal(number)


def _end(process: subprocess.Popen[str]) -> None:
    """Let it put away what it has, for a while."""
    assert process.stdin is not None
    _signal(process, signal.SIGCONT)
    process.stdin.close()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGKILL)
        process.wait()


def serve(arms: Mapping[str, Callable[[], float]]) -> None:
    """Be such a process, until nobody asks any more: measure whichever arm is named."""
    die_with_parent(os.getppid())  # also while it stands still
    print(msgspec.json.encode(list(arms)).decode(), flush=True)
    for line in sys.stdin:
        print(arms[line.strip()](), flush=True)
