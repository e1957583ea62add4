"""Tests that every source must pass.

    class TestMine(SourceConformance):
        @pytest.fixture
        def case(self):
            return Case(open=lambda: my_source(...), expected=[first, second, ...])

A new source gives that one fixture and inherits the tests. They are about what a source promises:
a length, the same sample for an index each time, an IndexError behind the end, and all of that in a
fork, in threads and when it is opened again. `take` must equal collating, and `many` asking for
each. At least three samples are wanted. Linux only (it forks). Cost: some milliseconds a test.
"""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.data.collating import collate_samples
from shoal.data.readers.records import BulkSource
from shoal.data.sources import BatchSource, Source, as_source
from shoal.system.processes import readable

LIMIT_S = 40.0  # for a fork or a thread; below the limit of a test
NUM_THREADS = 4


class Case(NamedTuple):
    """The source under test and the samples it must give."""

    open: Callable[[], Source]  # again, as another process would
    expected: Sequence[Any]


def same(left: Any, right: Any) -> bool:
    """Whether two samples are equal to the bit: types of containers, kinds of numbers, values."""
    if isinstance(right, Tensor):
        return isinstance(left, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(right, np.ndarray):
        if not isinstance(left, np.ndarray) or left.dtype != right.dtype:
            return False
        return left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(right, Mapping):
        is_alike = isinstance(left, Mapping) and list(left) == list(right)
        return is_alike and all(same(left[name], part) for name, part in right.items())
    if isinstance(right, tuple | list):
        is_alike = type(left) is type(right) and len(left) == len(right)
        return is_alike and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


def check_all(source: Source, expected: Sequence[Any], indexes: Sequence[int]) -> None:
    for index in indexes:
        found = source[index]
        assert same(found, expected[index]), f"sample {index}: {found!r} is not {expected[index]!r}"


def in_fork(check: Callable[[], object]) -> None:
    """Call `check` in a fork of this process; what it raises there is shown here."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        code = 1
        try:
            check()
            code = 0
        except BaseException:  # noqa: BLE001 (it is shown by the parent)
            os.write(writing, traceback.format_exc()[-8000:].encode())
        finally:
            sys.stdout.flush()
            os._exit(code)
    os.close(writing)
    ended = bool(readable([reading], LIMIT_S))  # it ends, or says what went wrong and ends
    if not ended:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    assert ended, f"the fork did not end within {LIMIT_S:g} s"
    assert status == 0, f"in the fork:\n{said}"


def in_threads(check: Callable[[int], object], count: int = NUM_THREADS) -> None:
    """Call `check` with 0 to `count` - 1 in as many threads at once."""
    failed: list[BaseException] = []
    gate = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            gate.wait(LIMIT_S)
            check(number)
        except BaseException as error:  # noqa: BLE001 (raised below)
            failed.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not any(thread.is_alive() for thread in threads), "a thread did not end"
    if failed:
        raise failed[0]


class SourceConformance:
    """Inherit, and give `case`."""

    @pytest.fixture
    def case(self) -> Case:
        raise NotImplementedError("say how the source is opened and what it holds")

    def test_length_and_indexes(self, case: Case) -> None:
        source = case.open()
        count = len(case.expected)
        assert count >= 3, "give at least three samples"
        assert as_source(source) is source
        assert len(source) == count
        check_all(source, case.expected, range(count))
        check_all(source, case.expected, [count - 1, 0, count // 2, 0])
        check_all(source, case.expected, range(-count, 0))
        index: Any = np.int64(1)
        assert same(source[index], case.expected[1])

    def test_nothing_lies_outside(self, case: Case) -> None:
        """Iteration, which goes by len() and indexing, ends by the error as well."""
        source = case.open()
        count = len(case.expected)
        for index in (count, count + 1, -count - 1, 2**40):
            with pytest.raises(IndexError):
                source[index]
        found = [sample for sample, _ in zip(iter(source), range(count + 1))]
        assert same(found, list(case.expected))

    def test_samples_stay_the_same(self, case: Case) -> None:
        """Also when somebody writes into one that was handed out."""
        source = case.open()
        for _ in range(2):
            for index, right in enumerate(case.expected):
                found = source[index]
                assert same(found, right)
                _scribble(found)

    def test_opened_again(self, case: Case) -> None:
        source = case.open()
        check_all(source, case.expected, [0])
        again = case.open()
        check_all(again, case.expected, range(len(case.expected)))
        del source
        check_all(again, case.expected, range(len(case.expected)))

    def test_in_forks(self, case: Case) -> None:
        """Before and after it was read from, and in a fork of a fork, while the parent reads on."""
        source = case.open()
        everything = range(len(case.expected))

        def inner() -> None:
            check_all(source, case.expected, everything)
            in_fork(lambda: check_all(source, case.expected, [1, 0]))
            check_all(source, case.expected, [2])

        in_fork(inner)
        check_all(source, case.expected, everything)
        in_fork(inner)
        check_all(source, case.expected, everything)

    def test_in_threads(self, case: Case) -> None:
        source = case.open()
        count = len(case.expected)

        def read(number: int) -> None:
            order = [(number + step) % count for step in range(count)]
            for _ in range(5):
                check_all(source, case.expected, order)

        in_threads(read)
        in_fork(lambda: in_threads(read))

    def test_many_at_once(self, case: Case) -> None:
        """`take` gives what collating the samples does, `many` what asking for each does."""
        source = case.open()
        count = len(case.expected)
        ids = np.array([count - 1, 0, count // 2, 0], dtype=np.int64)
        samples = [case.expected[index] for index in ids]
        if isinstance(source, BatchSource):
            assert same(tuple(source.take(ids)), collate_samples(samples))
        if isinstance(source, BulkSource):
            assert same(source.many(ids), samples)
            assert source.many(ids[:0]) == []
            with pytest.raises(IndexError):
                source.many(np.array([0, count]))


def _scribble(value: Any) -> None:
    """Write into what can be written to."""
    if isinstance(value, dict):
        for part in value.values():
            _scribble(part)
        value.clear()
    elif isinstance(value, tuple):
        for part in value:
            _scribble(part)
    elif isinstance(value, np.ndarray) and value.flags.writeable:
        with suppress(TypeError):
            value.fill(0)
