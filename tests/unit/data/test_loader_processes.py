"""Processes that load ahead: the same pieces, whatever becomes of the processes."""

import errno
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from shoal.data.batches import Batches, LoadOptions
from shoal.data.loader_processes import Loaders, PieceKey, PieceSchedule
from shoal.data.readers.records import BadRecord, SourceLost
from shoal.data.sources import Ids, Pass
from shoal.errors import RecipeError, ShoalError, UsageError
from shoal.storage.object_client import StoreError
from tests.support.leaks import descendants, wait_until


class Slow:
    """Samples of many kinds; one of them may kill the process that loads it."""

    def __init__(self, deadly: int = -1, broken: int = -1):
        self.deadly, self.broken, self.rank = deadly, broken, os.getpid()

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int):
        if index == self.deadly and os.getpid() != self.rank:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.broken:
            raise ValueError(f"no good: {index}")
        return {"x": torch.full((5,), float(index)), "n": np.int64(index)}, index

    def vary(self, index: int, of: Pass):
        inputs, target = self[index]
        return inputs, target + 1000 * of.epoch


@pytest.fixture
def make() -> Iterator:
    made, others = [], descendants(os.getpid())

    def make(source, loaders: int = 2, **kwargs) -> Batches:
        loading = LoadOptions(loaders=loaders)
        made.append(Batches(source, batch_size=16, num_pieces=4, seed=3, loading=loading, **kwargs))
        return made[-1]

    yield make
    for batches in made:
        batches.close()
    assert wait_until(lambda: not descendants(os.getpid()) - others, 5)


def walk(batches: Batches, steps, pieces=(1, 2)):
    for step in steps:
        for piece in pieces:
            yield batches.at(step).piece(piece)


def same(one, two) -> bool:
    alike = torch.equal(one.inputs["x"], two.inputs["x"]) and torch.equal(one.target, two.target)
    return alike and one.ids.tolist() == two.ids.tolist() and one.num_samples == two.num_samples


def test_pieces_are_those_that_a_rank_would_load(make) -> None:
    for steps, pieces in ((range(14), (1, 2)), (range(5, 9), (0,)), ([3, 4, 4, 5, 0], (2, 3))):
        ahead, here = walk(make(Slow()), steps, pieces), walk(make(Slow(), 0), steps, pieces)
        assert all(same(a, b) for a, b in zip(ahead, here, strict=True))


def test_other_pieces_after_work_has_moved(make) -> None:
    ahead, here = make(Slow()), make(Slow(), 0)
    for pieces in ((0, 1), (0,), (0, 1, 2), (3,)):
        for a, b in zip(walk(ahead, range(3), pieces), walk(here, range(3), pieces), strict=True):
            assert same(a, b)


def test_pieces_that_are_kept_are_not_written_over(make) -> None:
    batches = make(Slow())
    kept = list(islice(walk(batches, range(40)), 60))
    here = list(islice(walk(make(Slow(), 0), range(40)), 60))
    assert all(same(a, b) for a, b in zip(kept, here, strict=True))


def test_a_loader_that_is_killed_is_replaced(make) -> None:
    others = descendants(os.getpid())
    batches, here = make(Slow()), make(Slow(), 0)
    for step in range(12):
        for pid in descendants(os.getpid()) - others:
            os.kill(pid, signal.SIGKILL)
        assert same(batches.at(step).piece(1), here.at(step).piece(1))


def test_a_sample_that_kills_is_named(make) -> None:
    source = Slow()
    source.deadly = int(make(source, 0).at(2).ids_of(0)[1])
    batches = make(source, 1)
    list(walk(batches, range(2), (0,)))
    with pytest.raises(RecipeError, match=rf"{source.deadly}.*died 3 times.*signal 9"):
        list(walk(batches, [2], (0,)))


def test_a_sample_that_raises_is_named(make) -> None:
    batches = make(Slow(broken=7))
    with pytest.raises(RecipeError, match=r"sample 7 of 96 failed: ValueError: no good: 7"):
        list(walk(batches, range(6), (0, 1, 2, 3)))


@pytest.mark.parametrize("loaders", [0, 1])
def test_the_line_that_raised_is_shown(make, loaders: int) -> None:
    batches = make(Slow(broken=7), loaders)
    places = ((step, piece) for step in range(6) for piece in range(4))
    step, piece = next(at for at in places if 7 in batches.at(at[0]).ids_of(at[1]))
    with pytest.raises(RecipeError) as caught:
        batches.at(step).piece(piece)
    shown = "".join(traceback.format_exception(caught.value))
    line = next(
        at
        for at, text in enumerate(Path(__file__).read_text().splitlines(), 1)
        if "raise ValueError(" in text
    )
    assert f'File "{__file__}", line {line}, in __getitem__' in shown
    assert "ValueError: no good: 7" in shown
    assert shown.rstrip().endswith("try data[7] by itself.")


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt()], ids=repr)
def test_leaving_in_a_loader_is_the_samples_failure(make, error: BaseException) -> None:
    others = descendants(os.getpid())
    batches = make(Failing(error), 1)
    with pytest.raises(RecipeError, match=rf"sample.*{type(error).__name__}"):
        batches.at(0).piece(0)
    assert len(descendants(os.getpid()) - others) == 1  # and the loader lives


def test_an_error_may_hold_any_text(make) -> None:
    with pytest.raises(RecipeError, match=r"no file: a\\udcff"):
        make(Failing(ValueError("no file: a\udcff")), 1).at(0).piece(0)


class Failing(Slow):
    def __init__(self, error: BaseException):
        super().__init__()
        self.error = error

    def __getitem__(self, index: int):
        raise self.error

    def vary(self, index: int, of: Pass):
        raise self.error


class Peculiar(UsageError):
    """One that is not made of a message alone."""

    def __init__(self, place: str, number: int):
        super().__init__(f"{place} has {number}")


@pytest.mark.parametrize(
    "error",
    [
        SourceLost("it changed"),
        BadRecord("line 3"),
        StoreError(errno.EIO, "cannot read it"),
        UsageError("no such thing"),
        ShoalError("not reached"),
        Peculiar("here", 3),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_of_the_kind_that_a_rank_would_raise(make, error: ShoalError) -> None:
    """So that the exit code does not depend on who loads."""
    for loaders in (0, 1):
        with pytest.raises(type(error)) as raised:
            make(Failing(error), loaders).at(0).piece(0)
        assert type(raised.value) is type(error) and str(raised.value) == str(error)
        assert raised.value.exit_code == error.exit_code


def test_an_error_that_only_the_loader_knows_is_the_nearest_that_the_rank_does(make) -> None:
    class Late(Slow):
        def vary(self, index: int, of: Pass):
            class Unheard(SourceLost):
                pass

            raise Unheard("it changed")

    with pytest.raises(SourceLost, match="it changed"):
        make(Late(), 1).at(0).piece(0)


def test_who_asks_for_nothing_has_nothing_to_close() -> None:
    others, files = descendants(os.getpid()), len(os.listdir("/proc/self/fd"))
    batches = Batches(Slow(), batch_size=16, num_pieces=4, loading=LoadOptions(loaders=2))
    assert descendants(os.getpid()) == others
    assert len(os.listdir("/proc/self/fd")) == files
    batches.close()


def test_a_piece_that_nobody_needs_does_not_end_the_run() -> None:
    def load(epoch: int, ids):
        if 7 in ids:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.from_numpy(ids), 0, ids

    loaders = Loaders(load, 1)
    try:
        for step in range(1, 9):
            loaders.ask(PieceKey(step - 1, 0), 0, np.array([7]))
            loaders.ask(PieceKey(step, 1), 0, np.array([step + 10]))
            loaders.forget_before(step)
            assert loaders.take(PieceKey(step, 1))[2].tolist() == [step + 10]
    finally:
        loaders.close()


def test_asking_a_loader_that_hangs_does_not_wait() -> None:
    """However many samples a piece has: the wait is counted where the piece is taken."""

    def hang(epoch: int, ids):
        time.sleep(60)

    loaders = Loaders(hang, 1)
    many = np.arange(20_000)
    loaders.ask(PieceKey(0, 0), 0, many)
    asking = threading.Thread(target=loaders.ask, args=(PieceKey(1, 0), 0, many), daemon=True)
    asking.start()
    asking.join(20)
    assert not asking.is_alive()
    loaders.close()


def test_a_loader_is_told_of_many_samples_and_of_none() -> None:
    loaders = Loaders(lambda epoch, ids: (torch.from_numpy(ids * 2), epoch, ids), 1)
    for step, ids in enumerate((np.arange(20_000), np.arange(0), np.arange(3), np.arange(9_000))):
        loaders.ask(PieceKey(step, 0), step, ids)
        inputs, epoch, told = loaders.take(PieceKey(step, 0))
        assert np.array_equal(told, ids) and np.array_equal(inputs, ids * 2) and epoch == step
        del inputs, told
    loaders.close()


def test_what_a_loader_opens_is_not_closed_by_what_the_rank_had_open() -> None:
    held = list(socket.socketpair())

    def load(epoch: int, ids):
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(32)]
        for connection in held:
            connection.close()  # as the collector would
        return [os.fstat(file).st_size for file in files], 0, ids

    loaders = Loaders(load, 1)
    try:
        loaders.ask(PieceKey(0, 0), 0, np.array([1]))
        assert loaders.take(PieceKey(0, 0))[0] == [0] * 32
        assert held[0].send(b"still open") == 10
    finally:
        loaders.close()
        for connection in held:
            connection.close()


def test_the_schedule_of_pieces() -> None:
    turns = PieceSchedule()
    assert list(islice(turns.after(PieceKey(4, 2)), 2)) == [PieceKey(4, 2), PieceKey(5, 2)]
    assert next(iter(turns.after(PieceKey(4, 3)))) == PieceKey(4, 3)
    told = [PieceKey(5, 2), PieceKey(5, 3), PieceKey(6, 2), PieceKey(6, 3)]
    assert list(islice(turns.after(PieceKey(5, 2)), 4)) == told
    assert list(islice(turns.after(PieceKey(5, 3)), 3)) == told[1:]


def test_the_ids_may_be_written_to() -> None:
    """As the rank's own may; of others, torch warns in every loader's log."""
    asked = Batches(_Writable(range(8)), batch_size=4, loading=LoadOptions(loaders=1))
    try:
        assert asked.at(0).piece(0).target.tolist() == [1] * 4
    finally:
        asked.close()


class _Writable(list[int]):
    def take(self, ids: Ids) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(len(ids)), torch.full((len(ids),), int(ids.flags.writeable))
