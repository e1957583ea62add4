"""Streams: positions, passes, bookmarks, and what is said when they cannot be trusted."""

import gc
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import shoal
from shoal.data.batches import Batches
from shoal.data.identity import content_name
from shoal.data.ledger import audit, mark_samples
from shoal.data.orders import WindowShuffled
from shoal.data.sample_digest import NUM_OF_STREAM
from shoal.data.streams import LENGTH, StreamSource, stream
from shoal.errors import BadCheckpoint, RecipeError, ShoalError, UsageError
from shoal.logs import for_the_screen


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.logs._said", set())
    for_the_screen.clear()


def numbers(count: int = 10, start: int = 0) -> Iterator[tuple[torch.Tensor, int]]:
    for number in range(start, start + count):
        yield torch.tensor([float(number)]), number


class Counting(IterableDataset[Any]):
    """Says where it is; `slip` is by how many samples it comes back wrong."""

    def __init__(self, count: int = 10, slip: int = 0):
        self.count, self.slip, self.at, self.num_read, self.epoch = count, slip, 0, [0], 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.at, self.count):
            self.at = number + 1
            self.num_read[0] += 1  # shared by all copies
            yield torch.tensor([float(number)]), 100 * self.epoch + number

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"] + self.slip


def targets(source: Any, step: int, batch_size: int = 4, num_pieces: int = 2) -> list[int]:
    batch = Batches(source, batch_size=batch_size, num_pieces=num_pieces).at(step)
    return [int(t) for piece in range(num_pieces) for t in batch.piece(piece).target]


def run_of(data: Any, **changes: Any) -> shoal.Run:
    settings: dict[str, Any] = {"batch_size": 4, "steps": 3} | changes
    return shoal.Run(
        model=lambda: nn.Linear(1, 1),
        loss=lambda output, target: (output[:, 0] - target).square().mean(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=data,
        **settings,
    )


def test_a_stream_goes_on_with_its_next_pass() -> None:
    source = stream(numbers)
    assert [targets(source, step) for step in range(4)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 0, 1],
        [2, 3, 4, 5],
    ]


@pytest.mark.parametrize(
    "data", [numbers, Counting(), stream(numbers)], ids=["function", "set", "made"]
)
def test_what_can_be_iterated_again_is_trained_on_as_it_is(data: Any) -> None:
    assert isinstance(run_of(data).data, StreamSource)


def test_pieces_are_the_same_however_many_there_are_and_whoever_asks() -> None:
    whole = Batches(stream(numbers), batch_size=6, num_pieces=1)
    thirds = Batches(stream(numbers), batch_size=6, num_pieces=3)
    for step in range(5):
        second = thirds.at(step).piece(1)  # as a rank that has this piece alone
        assert second.target.tolist() == whole.at(step).piece(0).target.tolist()[2:4]


@given(st.integers(2, 50), st.integers(0, 500), st.integers(0, 9))
def test_a_shuffle_moves_samples_within_their_window_only(
    window: int, number: int, seed: int
) -> None:
    order = WindowShuffled(LENGTH, window)
    positions = np.arange(number * window, (number + 1) * window, dtype=np.int64)
    assert sorted(order.ids(positions, seed, 0)) == positions.tolist()
    some = np.array([number * window + window // 2])
    assert order.ids(some, seed, 0) == order.ids(positions, seed, 0)[window // 2]


@given(st.integers(1, 7), st.integers(0, 12), st.sampled_from([0, 30, 80]))
@settings(max_examples=20)
def test_any_step_can_be_entered_and_gives_what_reading_on_would(
    batch_size: int, step: int, shuffle: int
) -> None:
    def data() -> StreamSource:
        return stream(numbers, shuffle=shuffle)

    read_on = Batches(data(), batch_size=batch_size, seed=3)
    for before in range(step):
        read_on.at(before).piece(0)
    entered = Batches(data(), batch_size=batch_size, seed=3).at(step).piece(0)
    assert entered.target.tolist() == read_on.at(step).piece(0).target.tolist()
    ids = read_on.at(step).ids
    assert mark_samples(read_on.source, ids) == mark_samples(data(), ids)


@given(st.integers(1, 5), st.integers(1, 20), st.sampled_from([0, 40]))
@settings(max_examples=20)
def test_a_bookmark_leads_to_the_next_step_and_nothing_is_read_twice(
    batch_size: int, steps: int, shuffle: int
) -> None:
    first = stream(Counting(7), shuffle=shuffle)
    batches = Batches(first, batch_size=batch_size)
    for step in range(steps):
        batches.at(step).piece(0)
    text = first.bookmark(batches.at(steps).ids)
    again = Counting(7)
    resumed = stream(again, shuffle=shuffle)
    if text:
        resumed.go_to(text)
    piece = Batches(resumed, batch_size=batch_size).at(steps).piece(0)
    assert piece.target.tolist() == batches.at(steps).piece(0).target.tolist()
    if text:
        span = max(batch_size, shuffle)  # what is compared, what is needed, to the end of windows
        assert again.num_read[0] <= 2 * span + 2 * shuffle


def test_a_stream_that_comes_back_wrong_is_read_from_its_beginning() -> None:
    first = stream(Counting(50))
    batches = Batches(first, batch_size=4)
    for step in range(5):
        batches.at(step).piece(0)
    text = first.bookmark(batches.at(5).ids)
    resumed = stream(Counting(50, slip=1))
    resumed.go_to(text)
    assert targets(resumed, 5) == [20, 21, 22, 23]
    assert any("20 samples are skipped, to come to sample 20" in said for said in for_the_screen)


def test_reading_and_skipping_is_said_with_its_count() -> None:
    assert targets(stream(lambda: numbers(1000)), 137) == [548, 549, 550, 551]
    assert any("548 samples are skipped" in said for said in for_the_screen)


def test_a_stream_that_says_nothing_has_no_bookmark() -> None:
    source = stream(numbers)
    batches = Batches(source, batch_size=4)
    batches.at(0).piece(0)
    batches.at(1).piece(0)
    assert not source.bookmark(batches.at(2).ids)


def test_a_bookmark_that_was_damaged_is_refused() -> None:
    with pytest.raises(BadCheckpoint, match="position cannot be read"):
        stream(numbers).go_to("rubbish")


def test_a_step_that_is_done_again_finds_its_samples() -> None:
    data = Counting(100)
    batches = Batches(stream(data), batch_size=4, num_pieces=2)
    for step in (0, 1, 2, 2, 1, 2, 3):
        assert int(batches.at(step).piece(0).target[0]) == 4 * step
    assert data.num_read[0] == 16


def test_a_fork_reads_for_itself() -> None:
    """A generator holds its file, and its place in it, in both processes."""
    path = os.memfd_create("numbers")
    os.write(path, b"".join(b"%02d" % number for number in range(90)))

    def read() -> Iterator[Any]:
        with os.fdopen(os.dup(path), "rb", buffering=0) as file:
            file.seek(0)
            while text := file.read(2):
                yield torch.zeros(1), int(text)

    batches = Batches(stream(read), batch_size=4)
    batches.at(0).piece(0)
    pid = os.fork()
    if not pid:
        good = [batches.at(step).piece(0).target.tolist()[0] for step in (1, 2)] == [4, 8]
        os._exit(0 if good else 1)
    assert os.waitpid(pid, 0)[1] == 0
    os.close(path)


def test_only_the_samples_that_are_asked_for_are_worked_on() -> None:
    worked: list[int] = []

    def slow(sample: Any) -> Any:
        worked.append(sample[1])
        return sample

    source = shoal.data.mapped(numbers, slow)
    Batches(source, batch_size=4, num_pieces=2).at(1).piece(1)
    assert worked == [6, 7]


def test_draws_differ_from_pass_to_pass() -> None:
    source = shoal.data.mapped(
        lambda: numbers(4), lambda sample, random: (sample[0] + random.random(), sample[1])
    )
    batches = Batches(source, batch_size=4)
    assert not torch.equal(batches.at(0).piece(0).inputs, batches.at(1).piece(0).inputs)


def test_a_pass_is_told_its_number() -> None:
    assert targets(Counting(6), 1) == [4, 5, 100, 101]


def test_the_length_of_a_pass_makes_epochs() -> None:
    run = run_of(stream(numbers, length=10), steps=None, epochs=2)
    assert run.num_steps() == 5


@pytest.mark.parametrize(
    ("length", "said"), [(9, "goes on after sample 9"), (11, "ended after 10 samples of pass 1")]
)
def test_a_length_that_is_wrong_is_an_error(length: int, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        targets(stream(numbers, length=length), 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": None, "epochs": 2}, "epochs=2 does not go with a stream"),
        ({"loaders": 2}, "loaders=2 does not go with a stream"),
    ],
)
def test_what_a_run_on_a_stream_cannot_have_is_refused(changes: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        run_of(numbers, **changes)


def test_a_short_last_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="end='pad' does not go with a stream"):
        Batches(stream(numbers), batch_size=4, end="pad")


@pytest.mark.parametrize(
    "use",
    [
        shoal.data.in_order,
        shoal.data.cached,
        lambda data: shoal.data.join([data]),
        lambda data: shoal.data.fold(data, 2, 0),
        lambda data: run_of(list(numbers()), evaluate=data),
        lambda data: shoal.data.subset(shoal.data.mapped(data, tuple), [0]),
    ],
    ids=["in_order", "cached", "join", "fold", "evaluate", "subset"],
)
def test_what_needs_a_length_is_refused(use: Any) -> None:
    with pytest.raises(UsageError, match="is a stream"):
        use(stream(numbers))


@pytest.mark.parametrize(
    "data", [numbers(), DataLoader([1, 2]), {1, 2}, 5], ids=lambda one: type(one).__name__
)
def test_what_gives_its_samples_once_is_refused(data: Any) -> None:
    with pytest.raises(UsageError):
        run_of(data)
    with pytest.raises(UsageError):
        stream(numbers())


def test_a_stream_without_samples_is_an_error() -> None:
    with pytest.raises(RecipeError, match="gave no sample in pass 1"):
        targets(stream(lambda: iter(())), 0)


def test_an_error_of_the_stream_names_the_sample() -> None:
    def fails() -> Iterator[Any]:
        yield from numbers(5)
        raise KeyError("label")

    with pytest.raises(RecipeError, match="failed at sample 5: KeyError: 'label'"):
        targets(stream(fails), 1)

    def breaks() -> Iterator[Any]:
        yield from numbers(5)
        raise ConnectionError("gone")

    with pytest.raises(ShoalError, match="sample 5 was not reached"):
        targets(stream(breaks), 1)


def test_another_sample_has_another_mark() -> None:
    ids = np.arange(4)
    first, other = stream(numbers), stream(lambda: numbers(start=1))
    assert mark_samples(first, ids) == mark_samples(stream(numbers), ids)
    assert mark_samples(first, ids) != mark_samples(other, ids)


def test_an_audit_reads_the_stream_again() -> None:
    def steps(data: Any) -> list[dict[str, Any]]:
        batches = Batches(stream(data), batch_size=4)
        found = [mark_samples(batches.source, batches.at(step).ids) for step in range(4)]
        return [{"step": step, "mark": mark} for step, mark in enumerate(found, start=1)]

    right = audit(steps(numbers), Batches(stream(numbers), batch_size=4))
    assert (right.num_marked, right.num_wrong, right.is_stream) == (4, 0, True)
    wrong = audit(steps(lambda: numbers(11)), Batches(stream(numbers), batch_size=4))
    assert (wrong.num_marked, wrong.num_wrong) == (2, 2)


def test_a_stream_is_known_by_its_first_samples() -> None:
    name = content_name(stream(lambda: numbers(100)))
    assert name == content_name(stream(lambda: numbers(100)))
    assert name != content_name(stream(lambda: numbers(100, start=1)))
    assert len(name.split()) == NUM_OF_STREAM + 1


@pytest.mark.parametrize("buffer", [0, 5], ids=["as it stands", "with a shuffle buffer"])
def test_a_stream_of_hugging_face_comes_back_or_is_read_again(buffer: int) -> None:
    datasets = pytest.importorskip("datasets")

    def open_stream() -> StreamSource:
        rows = datasets.Dataset.from_dict({"x": [[float(i)] for i in range(30)]})
        rows = rows.to_iterable_dataset(num_shards=3)
        return stream(rows.shuffle(seed=1, buffer_size=buffer) if buffer else rows)

    first = open_stream()
    ids = np.arange(72, 76)  # in its third pass
    for start in range(0, 72, 4):
        first.hold(np.arange(start, start + 4))
    text = first.bookmark(ids)
    resumed = open_stream()
    resumed.go_to(text)
    assert [resumed[i] for i in ids] == [first[i] for i in ids]
    assert bool(for_the_screen) == bool(buffer), "its buffer is not in its state_dict"
    first.close()
    resumed.close()
    gc.collect()  # threads of its own
