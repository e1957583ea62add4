"""A mapped sample is pure in (sample, seed, epoch, index): who asks, and when, does not show."""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.batches import Batches
from shoal.data.orders import Sequential
from shoal.data.sources import BatchSource, EpochSource, Pass, SkipsBad, tensors
from shoal.data.transforms.mapping import Mapped, mapped
from shoal.data.transforms.quarantine import quarantine
from shoal.data.transforms.randomness import Random, on
from shoal.data.views import in_order, join
from shoal.errors import RecipeError

NUM = 40


def shaken(value: torch.Tensor, random: Random) -> torch.Tensor:
    return value + torch.from_numpy(random.standard_normal(value.shape).astype(np.float32))


def pairs() -> Any:
    return tensors(torch.arange(NUM * 3, dtype=torch.float32).view(NUM, 3), torch.arange(NUM))


def varied() -> Mapped:
    return mapped(pairs(), on("inputs", shaken))


def bits(source: Any, index: int, of: Pass) -> bytes:
    inputs, target = source.vary(index, of)
    return inputs.numpy().tobytes() + bytes([int(target)])


@given(st.lists(st.integers(0, NUM - 1), min_size=1, max_size=20), st.integers(0, 9))
def test_the_order_of_asking_does_not_matter(asked: list[int], epoch: int) -> None:
    of = Pass(7, epoch)
    alone = {index: bits(varied(), index, of) for index in asked}
    source = varied()
    assert [bits(source, index, of) for index in asked] == [alone[index] for index in asked]


@given(st.integers(0, NUM - 1), st.integers(0, 50), st.integers(0, 50))
def test_passes_and_seeds_differ(index: int, one: int, other: int) -> None:
    source = varied()
    is_same = one == other
    assert (bits(source, index, Pass(0, one)) == bits(source, index, Pass(0, other))) is is_same
    assert (bits(source, index, Pass(one, 0)) == bits(source, index, Pass(other, 0))) is is_same


def test_threads_and_processes_give_the_same_bits() -> None:
    source, of = varied(), Pass(3, 4)
    expected = [bits(source, index, of) for index in range(NUM)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda index: bits(source, index, of), reversed(range(NUM))))
    assert found[::-1] == expected
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, b"".join(bits(varied(), index, of) for index in range(NUM)))
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        assert pipe.read() == b"".join(expected)
    os.waitpid(pid, 0)


@pytest.mark.parametrize("num_pieces", [1, 2, 4, 8])
def test_batches_are_the_same_however_they_are_cut(num_pieces: int) -> None:
    whole = Batches(varied(), batch_size=8, num_pieces=1, seed=5)
    cut = Batches(varied(), batch_size=8, num_pieces=num_pieces, seed=5)
    for step in (0, 3, 7, 12):  # 5 steps are a pass
        pieces = [cut.at(step).piece(piece) for piece in range(num_pieces)]
        expected = whole.at(step).piece(0)
        assert torch.equal(torch.cat([piece.inputs for piece in pieces]), expected.inputs)
    first, second = (whole.at(step).piece(0) for step in (0, 5))
    common = set(first.ids.tolist()) & set(second.ids.tolist())
    for index in common:
        rows = [piece.inputs[list(piece.ids).index(index)] for piece in (first, second)]
        assert not torch.equal(*rows)


def test_indexing_is_the_same_each_time() -> None:
    source = varied()
    assert torch.equal(source[5][0], source[5][0])
    assert torch.equal(source[-1][0], source[NUM - 1][0])
    assert torch.equal(source[5][0], source.vary(5, Pass(0, 0))[0])
    assert len(list(iter(source))) == NUM
    with pytest.raises(IndexError):
        source[NUM]


def test_layers_on_one_another_do_not_repeat_draws() -> None:
    def note(sample: Any, random: Random) -> Any:
        return (*sample, random.random())

    for between in (lambda source: source, in_order, lambda source: join([source]), plainly):
        source = mapped(between(mapped([(1,), (2,)], note)), note)
        _, first, second = source.vary(0, Pass(0, 0))
        assert first != second


def plainly(source: Any) -> Any:
    return mapped(source, lambda sample: sample)


def test_only_what_varies_has_vary() -> None:
    plain = plainly(pairs())
    assert not isinstance(plain, EpochSource) and not isinstance(plain, BatchSource)
    assert isinstance(varied(), EpochSource) and isinstance(plainly(varied()), EpochSource)
    again = plainly(varied())
    assert torch.equal(again.vary(3, Pass(1, 1))[0], varied().vary(3, Pass(1, 1))[0])


def test_order_and_policy_of_what_lies_below_are_kept(tmp_path: Any) -> None:
    source = plainly(in_order(quarantine(pairs(), tmp_path / "bad.jsonl")))
    assert isinstance(source.order, Sequential) and isinstance(source, SkipsBad)
    assert not isinstance(plainly(pairs()), SkipsBad)


def test_errors_name_the_sample() -> None:
    def divide(sample: int) -> float:
        return 1 / sample

    source = mapped([1, 2, 0], divide)
    assert source[1] == 0.5
    with pytest.raises(RecipeError, match=r"sample 2: .*divide failed: ZeroDivisionError"):
        source[2]
    with pytest.raises(RecipeError, match="sample 2"):
        source[-1]
    with pytest.raises(RecipeError, match=r"sample 0: .*no field 'x'"):
        mapped([{"y": 1}], on("x", abs))[0]
