"""The order of samples: a bijection, entered anywhere, the same bits everywhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import permutation
from shoal.data.permutation import Ids, permute
from shoal.errors import UsageError

sizes = st.integers(1, 3000)
seeds = st.integers(-(2**70), 2**70)
epochs = st.integers(0, 2**40)
batch_sizes = st.integers(1, 40)


@given(sizes, seeds, epochs)
def test_an_epoch_visits_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    ids = permute(np.arange(num_samples), num_samples, seed, epoch)
    assert np.array_equal(np.sort(ids), np.arange(num_samples))


@given(st.integers(1, 2**50), seeds, epochs, st.data())
def test_any_position_can_be_asked_alone(
    num_samples: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    positions = data.draw(st.lists(st.integers(0, num_samples - 1), min_size=1, max_size=20))
    together = permute(np.array(positions), num_samples, seed, epoch)
    alone = [permute(np.array([p]), num_samples, seed, epoch)[0] for p in positions]
    assert together.tolist() == alone
    assert len(set(alone)) == len(set(positions))
    assert all(0 <= index < num_samples for index in alone)


@given(st.integers(30, 3000), seeds, epochs)
def test_epochs_and_seeds_differ(num_samples: int, seed: int, epoch: int) -> None:
    positions = np.arange(num_samples)
    first = permute(positions, num_samples, seed, epoch)
    assert not np.array_equal(first, permute(positions, num_samples, seed, epoch + 1))
    assert not np.array_equal(first, permute(positions, num_samples, seed + 1, epoch))


def test_the_bits_are_fixed() -> None:
    """A resumed run must meet the order it was started with: these values may never change."""
    assert permute(np.arange(10), 10, 0, 0).tolist() == [8, 6, 4, 0, 5, 2, 9, 3, 1, 7]
    far = permute(np.arange(3), 2**40, seed=7, epoch=3)
    assert far.tolist() == [675247547458, 727922375639, 877162970488]


def test_all_orders_of_few_samples_come_up_alike() -> None:
    orders = [tuple(permute(np.arange(3), 3, 5, epoch).tolist()) for epoch in range(1200)]
    counts = [orders.count(which) for which in set(orders)]
    assert len(counts) == 6
    assert min(counts) > 140 and max(counts) < 260  # 200 expected, 13 the standard deviation


def test_each_position_meets_all_samples_alike() -> None:
    num_samples, num_epochs = 50, 1000
    counts = np.zeros((num_samples, num_samples))
    for epoch in range(num_epochs):
        counts[np.arange(num_samples), permute(np.arange(num_samples), 50, 3, epoch)] += 1
    expected = num_epochs / num_samples
    chi_square = ((counts - expected) ** 2 / expected).sum() / (num_samples - 1) ** 2
    assert 0.9 < chi_square < 1.1


@given(sizes, batch_sizes, seeds, st.integers(0, 5))
def test_pad_meets_every_sample_once_an_epoch(
    num_samples: int, batch_size: int, seed: int, epoch: int
) -> None:
    batches = _epoch(epoch, num_samples, batch_size, seed, "pad")
    assert sorted(np.concatenate(batches).tolist()) == list(range(num_samples))
    assert all(len(batch) == batch_size for batch in batches[:-1])


@given(sizes, batch_sizes, seeds, st.integers(0, 5))
def test_drop_leaves_out_only_the_tail(
    num_samples: int, batch_size: int, seed: int, epoch: int
) -> None:
    batches = _epoch(epoch, num_samples, batch_size, seed, "drop")
    assert all(len(batch) == batch_size for batch in batches)
    met = np.concatenate([np.array([], dtype=np.int64), *batches])
    assert len(set(met.tolist())) == len(met) == num_samples - num_samples % batch_size


@given(sizes, batch_sizes, seeds, st.integers(0, 5))
def test_wrap_fills_the_last_batch_from_the_start(
    num_samples: int, batch_size: int, seed: int, epoch: int
) -> None:
    batches = _epoch(epoch, num_samples, batch_size, seed, "wrap")
    assert all(len(batch) == batch_size for batch in batches)
    met = np.concatenate(batches).tolist()
    assert sorted(met[:num_samples]) == list(range(num_samples))
    extra = met[num_samples:]
    assert extra == (met[:num_samples] * batch_size)[: len(extra)]


def test_an_unknown_end_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean 'drop'"):
        permutation.check_end("drpo")


def _epoch(epoch: int, num_samples: int, batch_size: int, seed: int, end: str) -> list[Ids]:
    per_epoch = permutation.batches_per_epoch(num_samples, batch_size, end)
    # Some of the batches by themselves are slow to ask for: look at a few dozen at most.
    if per_epoch <= 12:
        alone = [
            permutation.batch_positions(batch, 1, num_samples, batch_size, end)
            for batch in range(per_epoch)
        ]
        return [permute(positions, num_samples, seed, epoch) for positions in alone]
    positions = permutation.batch_positions(0, per_epoch, num_samples, batch_size, end)
    ids = permute(positions, num_samples, seed, epoch)
    return [ids[at : at + batch_size] for at in range(0, len(ids), batch_size)]
