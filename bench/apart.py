"""Arms in processes of their own, of which none runs but the one whose turn it is.

Some peers take processor time while nobody asks anything of them: two idle processes of torch RPC
look for messages without a pause, and fill two cores. Measured in one process, or beside one
another, every other arm would pay for that. So each set of arms has a process, which is stopped
with all that it started (SIGSTOP) until one of its arms is to be measured. What a process finds
cold when it wakes, it has warmed up before it is timed: that is its measure's own business.
"""

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

Arms = dict[str, Callable[[], float]]
T = TypeVar("T")


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
        _signal(process, signal.SIGKILL)
        process.wait()


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
        raise RuntimeError(f"{process.args} ended before it answered; see above.")
    return msgspec.json.decode(line, type=kind)


def _signal(process: subprocess.Popen[str], number: int) -> None:
    """To it and all that it started, and they did."""
    with suppress(psutil.NoSuchProcess):
        for one in [*psutil.Process(process.pid).children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                one.send_signal(number)


def serve(arms: Mapping[str, Callable[[], float]]) -> None:
    """Be such a process, until nobody asks any more: measure whichever arm is named."""
    print(msgspec.json.encode(list(arms)).decode(), flush=True)
    for line in sys.stdin:
        print(arms[line.strip()](), flush=True)
