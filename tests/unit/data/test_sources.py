"""Sources: fetching many samples equals fetching each; what does not fit is named."""

import asyncio
import signal
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from shoal.data.catalog import Text
from shoal.data.collating import collate_samples, load_collated
from shoal.data.sources import Source, as_source, tensors, windows
from shoal.data.transforms.mapping import mapped
from shoal.errors import Ended, RecipeError, UsageError


@given(st.integers(2, 200), st.integers(1, 20), st.data())
def test_windows_lie_side_by_side(num_tokens: int, length: int, data: st.DataObject) -> None:
    length = min(length, num_tokens - 1)
    tokens = torch.arange(num_tokens, dtype=torch.uint8)
    source = windows(tokens, length)
    assert len(source) == (num_tokens - 1) // length
    index = data.draw(st.integers(0, len(source) - 1))
    inputs, target = source[index]
    assert inputs.tolist() == list(range(index * length, index * length + length))
    assert target.tolist() == [token + 1 for token in inputs.tolist()]
    assert inputs.dtype == torch.int64


def test_windows_take_equals_indexing_and_is_contiguous() -> None:
    source = windows(torch.randint(0, 80, (500,), dtype=torch.uint8), 16)
    ids = np.array([3, 0, 29, 3])
    inputs, target = source.take(ids)
    for row, index in enumerate(ids):
        assert torch.equal(inputs[row], source[index][0])
        assert torch.equal(target[row], source[index][1])
    assert inputs.is_contiguous() and target.is_contiguous()


def test_windows_accept_a_text_of_the_catalog() -> None:
    text = Text(torch.zeros(33, dtype=torch.uint8), "a")
    assert len(windows(text, 8)) == 4


@pytest.mark.parametrize("length", [0, -1, 10, 11])
def test_windows_without_a_window_are_refused(length: int) -> None:
    with pytest.raises(UsageError, match="from 1 to 9"):
        windows(torch.arange(10), length)


@pytest.mark.parametrize("text", ["abc", torch.rand(9), torch.zeros(3, 3, dtype=torch.int64)])
def test_windows_need_a_row_of_integers(text: Any) -> None:
    with pytest.raises(UsageError, match="1-D tensor of integer"):
        windows(text, 2)


@pytest.mark.parametrize("kind", ["tensor", "tuple", "dict"])
def test_tensors_take_equals_default_collate_of_samples(kind: str) -> None:
    a, b, y = torch.randn(10, 3), torch.randn(10, 2, 2), torch.arange(10)
    inputs = {"tensor": a, "tuple": (a, b), "dict": {"a": a, "b": b}}[kind]
    source = tensors(inputs, y)
    ids = np.array([9, 1, 1, 4])
    taken, target = load_collated(source, ids, None)
    collated, _ = collate_samples([source[int(index)] for index in ids])
    assert type(taken) is type(collated) is type(inputs)
    for left, right in zip(_parts(taken), _parts(collated), strict=True):
        assert torch.equal(left, right)
    assert torch.equal(target, y[ids])
    assert len(list(iter(source))) == 10


def test_tensors_of_any_array_that_holds_numbers() -> None:
    rows = np.arange(12.0).reshape(4, 3)
    for array in (rows[::-1], rows[:, ::-1], rows.astype(">f8"), rows.astype(">i4")[::-1]):
        source = tensors(array, array[:, 0])
        expected = torch.tensor(array.tolist(), dtype=source.inputs.dtype)
        assert torch.equal(source.inputs, expected)
        assert torch.equal(source.take(np.array([2, 1]))[1], expected[[2, 1], 0])
    assert tensors(rows, rows).inputs.data_ptr() == rows.ctypes.data  # no copy


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (np.array(["a", "b"]), "an array of <U1 stands where a tensor should"),
        (np.array([{}, {}]), "an array of object stands where a tensor should"),
        (np.array(["2026-01-02"], "M8[D]"), "no tensor can hold that. Make numbers of it first"),
        (torch.eye(3).to_sparse(), "of torch.sparse_coo, whose rows do not lie in memory"),
        (torch.empty(3, 2, device="meta"), "on the meta device, whose rows"),
    ],
)
def test_tensors_of_what_has_no_rows_of_numbers_are_refused(given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        tensors(given, given)


def test_a_batch_of_no_samples_is_refused() -> None:
    with pytest.raises(RecipeError, match="no samples were given"):
        collate_samples([])


def test_tensors_of_unlike_length_are_refused() -> None:
    with pytest.raises(UsageError, match="10, 9 rows"):
        tensors(torch.zeros(10, 2), torch.zeros(9))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ((torch.zeros(4), torch.zeros(4)), "shoal.data.tensors"),
        (torch.zeros(4), "shoal.data.tensors"),
        (Stream(), "stream"),
        ({"a": 1}, "is a dict"),
        (DataLoader([1, 2, 3]), "Pass its dataset"),  # type: ignore[arg-type]
        (None, "len\\(\\) and indexing"),
        (
            iter([1]),
            r"len\(\) and indexing.* Pass the function that makes it, as a stream, or list",
        ),
        (((torch.zeros(2), i) for i in range(9)), r"is a generator.* or list\(...\) of it"),
    ],
)
def test_what_is_no_source_is_refused_with_a_way_out(data: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        as_source(data)


def test_a_list_is_a_source() -> None:
    data = [(torch.zeros(2), 0), (torch.ones(2), 1)]
    assert as_source(data) is cast(Source, data)
    inputs, target = load_collated(as_source(data), np.array([1, 0]), None)
    assert inputs.tolist() == [[1, 1], [0, 0]] and target.tolist() == [1, 0]


def test_a_name_that_only_some_samples_have_is_not_dropped() -> None:
    data = [({"a": 1.0}, 0), ({"a": 1.0, "b": 2.0}, 0)]
    for ids in ([0, 1], [1, 0]):
        with pytest.raises(RecipeError, match="a dict of a, b"):
            load_collated(as_source(data), np.array(ids), None)


def test_samples_of_unlike_shape_are_named() -> None:
    data = [(torch.zeros(3), 0), (torch.zeros(3), 0), (torch.zeros(4), 0)]
    with pytest.raises(
        RecipeError, match=r"samples 1 and 2 .* inputs is a tensor \[3\].*\[4\].*collate.*by_length"
    ):
        load_collated(as_source(data), np.array([1, 2]), None)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (({"a": torch.zeros(3), "b": (1, torch.zeros(2))}, 0), r"inputs\.b\.1 is .*\[5\].*\[2\]"),
        (({"a": torch.zeros(3)}, 0), r"inputs is a dict of a, b .* a dict of a in the other"),
        (({"a": np.zeros(3), "b": (1, torch.zeros(5))}, 0), r"inputs\.a is a tensor .* an array"),
        (({"a": torch.zeros(3), "b": (1, torch.zeros(5))}, "x"), "target is an int .* str"),
    ],
)
def test_the_field_in_which_samples_differ_is_named(other: Any, says: str) -> None:
    one = ({"a": torch.zeros(3), "b": (1, torch.zeros(5))}, 0)
    with pytest.raises(RecipeError, match=rf"samples 4 and 2 do not fit.*: {says}"):
        load_collated(as_source([one, one, other, one, one]), np.array([4, 3, 2]), None)


@pytest.mark.parametrize(
    ("inputs", "target", "says"),
    [
        (1.0, None, "target is None"),
        ({"a": (1, {2})}, 0, r"inputs\.a\.1 is a set"),
        (1.0, 2**70, "target is the number 1180591620717411303424"),
        (1.0, [1, -(10**5000)], r"target\.1 is a huge number"),
        (1j, 0, "inputs is a complex"),
        (torch.ones(2).to_sparse(), 0, "inputs is a tensor of sparse_coo"),
    ],
)
def test_what_no_batch_can_hold_is_named(inputs: Any, target: Any, says: str) -> None:
    """With a way out, and without torch's words about its own function."""
    with pytest.raises(RecipeError, match=rf"sample 3 cannot .*: {says}\. .*`collate`") as caught:
        load_collated(as_source([(inputs, target)] * 5), np.array([3, 2]), None)
    assert caught.value.__cause__ is None


class Stacks:
    """Gathers by itself, and in torch's words says what does not fit."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(7 if index == 6 else 3), index

    def take(self, ids: Any) -> Any:
        rows = [self[int(index)] for index in ids]
        return torch.stack([x for x, _ in rows]), torch.tensor([y for _, y in rows])


def test_samples_that_a_source_cannot_gather_are_named() -> None:
    with pytest.raises(RecipeError, match=r"samples 5 and 6 do not fit .*\[3\].*\[7\]"):
        load_collated(Stacks(), np.array([5, 2, 6]), None)


@pytest.mark.parametrize(
    ("one", "other", "wrong"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64), "inputs is .* of float32 .* of int64"),
        (np.zeros(2, np.uint8), np.zeros(2, np.int64), "inputs is .* of uint8 .* of int64"),
        (
            {"a": (torch.zeros(1), 3)},
            {"a": (torch.zeros(1), 3.5)},
            "inputs.a.1 is an int .*float",
        ),
        (True, 1, "inputs is a bool .* an int"),
    ],
)
def test_samples_of_unlike_types_are_named_and_not_converted(
    one: Any, other: Any, wrong: str
) -> None:
    for pair in ((one, other), (other, one)):
        with pytest.raises(RecipeError, match=r"samples 4 and 9 do not fit .* one type"):
            collate_samples([(value, 0) for value in pair], ids=np.array([4, 9]))
    with pytest.raises(RecipeError, match=wrong):
        collate_samples([(one, 0), (one, 0), (other, 0)])
    collate_samples([(one, 0), (one, 0)])
    collate_samples([(np.int64(1), np.zeros(2)), (1, torch.zeros(2).double())])


class Long:
    def __init__(self, length: Any):
        self.length = length

    def __len__(self) -> Any:
        if isinstance(self.length, Exception):
            raise self.length
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(2), 0


@pytest.mark.parametrize("length", [-3, 2.5, "many", None, OSError("no index"), 2**70])
def test_a_length_that_is_none_is_refused(length: Any) -> None:
    with pytest.raises(UsageError, match=r"len\(data\) failed: .*__len__ of Long must return"):
        as_source(Long(length))


class Leaves:
    """A sample whose code ends the process, or is ended."""

    def __init__(self, error: BaseException):
        self.error = error

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        if index == 1:
            raise self.error
        return torch.zeros(2), 0


class TakesAndLeaves(Leaves):
    def take(self, ids: Any) -> Any:
        raise self.error


@pytest.mark.parametrize("kind", [Leaves, TakesAndLeaves])
def test_leaving_in_a_sample_is_its_failure(kind: Any) -> None:
    """Or a rank would end there as if all were done."""
    errors = (SystemExit(0), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError())
    for error in errors:
        with pytest.raises(RecipeError, match=rf"sample.* 1 .*{type(error).__name__}"):
            load_collated(kind(error), np.array([1]), None)

    def leave(samples: Any) -> Any:
        raise SystemExit(0)

    with pytest.raises(RecipeError, match=r"collate failed on samples 0, 2 .*SystemExit"):
        load_collated(kind(SystemExit(0)), np.array([0, 2]), leave)


def test_who_is_asked_to_leave_may() -> None:
    for source in (Leaves(Ended(143)), TakesAndLeaves(Ended(143))):
        with pytest.raises(Ended):
            load_collated(source, np.array([1]), None)


class Interrupted(Leaves):
    """Someone presses Ctrl-C while a sample is loaded, here or deep in its code."""

    def __init__(self) -> None:
        super().__init__(AssertionError("the signal came first"))

    def __getitem__(self, index: int) -> Any:
        signal.raise_signal(signal.SIGINT)
        raise self.error


class CleansUp(Interrupted):
    def __getitem__(self, index: int) -> Any:
        try:
            return super().__getitem__(index)
        except KeyboardInterrupt:
            raise  # as code does that has something to close


@pytest.mark.parametrize("source", [Interrupted(), CleansUp()])
def test_ctrl_c_is_no_failure_of_a_sample(source: Source) -> None:
    with pytest.raises(KeyboardInterrupt):
        load_collated(source, np.array([1]), None)
    with pytest.raises(KeyboardInterrupt):
        load_collated(mapped([(torch.zeros(2), 0)], lambda sample: source[0]), np.array([0]), None)


def test_a_sample_that_is_no_pair_is_named() -> None:
    with pytest.raises(RecipeError, match="sample 1 gave a dict of 2"):
        load_collated(as_source([0, {"a": 1, "b": 2}]), np.array([1]), None)


def test_a_collate_is_asked_and_its_failure_names_the_samples() -> None:
    data = [(torch.zeros(n + 1), n) for n in range(3)]

    def pad(samples: list[Any]) -> tuple[Tensor, Tensor]:
        inputs = torch.nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
        return inputs, torch.tensor([y for _, y in samples])

    inputs, target = load_collated(as_source(data), np.array([0, 2]), pad)
    assert inputs.shape == (2, 3) and target.tolist() == [0, 2]
    with pytest.raises(RecipeError, match=r"collate failed on samples 0, 2 .*ZeroDivisionError"):
        load_collated(as_source(data), np.array([0, 2]), lambda samples: 1 // 0)


def _parts(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, tuple) else [value]
