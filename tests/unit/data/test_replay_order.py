"""New samples with old ones in between: each new one once a pass, the old ones in turn."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.orders import Sequential, Shuffled, SubsetOrder
from shoal.data.replay_order import ReplayOrder


@given(st.integers(1, 300), st.integers(1, 300), st.floats(0.001, 0.95), st.integers(0, 2**32))
def test_a_pass_has_each_new_sample_once(
    num_new: int, num_old: int, share: float, seed: int
) -> None:
    order = ReplayOrder(Shuffled(num_new), SubsetOrder(num_new + np.arange(num_old)), share)
    met: Counter[int] = Counter()
    for epoch in range(3):
        ids = order.ids(np.arange(len(order)), seed, epoch)
        assert sorted(ids[ids < num_new]) == list(range(num_new))
        met.update(ids[ids >= num_new].tolist())
    num_met = 3 * (len(order) - num_new)
    assert num_met == met.total() and set(met) <= set(range(num_new, num_new + num_old))
    assert max(met.values()) == -(-num_met // num_old), "old ones come again when all were met"
    assert abs((len(order) - num_new) - share * len(order)) <= 1


def test_old_samples_stand_evenly_and_the_new_keep_their_order() -> None:
    order = ReplayOrder(Sequential(80), SubsetOrder(80 + np.arange(5)), 0.2)
    ids = order.ids(np.arange(len(order)), 0, 0)
    assert ids[ids < 80].tolist() == list(range(80))
    assert (ids.reshape(-1, 5) >= 80).sum(axis=1).tolist() == [1] * 20
    at = [order.ids(np.array([position]), 0, 0).item() for position in reversed(range(100))]
    assert at[::-1] == ids.tolist()


def test_many_samples_are_counted_without_overflow() -> None:
    num_new = 2**40
    order = ReplayOrder(Sequential(num_new), SubsetOrder(num_new + np.arange(5)), 0.2)
    ids = order.ids(np.arange(len(order) - 10, len(order)), 0, 0)
    assert ids[ids < num_new].tolist() == list(range(num_new - 8, num_new))
