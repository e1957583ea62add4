"""Orders: every one can be entered anywhere, and visits what it promises."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.orders import (
    BlockShuffled,
    Bucketed,
    Mixed,
    Order,
    Sequential,
    Shuffled,
    SubsetOrder,
    Weighted,
    order_of,
)
from shoal.errors import UsageError

SEEDS = st.integers(0, 2**32)
SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(sum)


def all_ids(order: Order, seed: int = 1, epoch: int = 0) -> list[int]:
    return order.ids(np.arange(len(order)), seed, epoch).tolist()


def enters_anywhere(order: Order, seed: int, epoch: int) -> bool:
    whole = all_ids(order, seed, epoch)
    backwards = [order.ids(np.array([p]), seed, epoch).item() for p in reversed(range(len(order)))]
    return backwards[::-1] == whole


@given(st.integers(1, 200), SEEDS, st.integers(0, 3))
def test_plain_orders_visit_each_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    for order in (Shuffled(num_samples), Sequential(num_samples)):
        assert sorted(all_ids(order, seed, epoch)) == list(range(num_samples))
        assert enters_anywhere(order, seed, epoch)
    assert all_ids(Sequential(num_samples), seed, epoch) == list(range(num_samples))


@given(SIZES, st.integers(1, 5), SEEDS, st.integers(0, 3))
def test_blocks_visit_each_sample_once(
    sizes: list[int], window: int, seed: int, epoch: int
) -> None:
    order = BlockShuffled(sizes, window)
    assert sorted(all_ids(order, seed, epoch)) == list(range(sum(sizes)))
    assert enters_anywhere(order, seed, epoch)


@given(SIZES, st.integers(1, 4), SEEDS)
def test_few_blocks_are_in_use_at_a_time(sizes: list[int], window: int, seed: int) -> None:
    block_of = np.repeat(np.arange(len(sizes)), sizes)
    last_use = {
        int(b): at for at, b in enumerate(block_of[all_ids(BlockShuffled(sizes, window), seed)])
    }
    in_use: set[int] = set()
    for at, sample in enumerate(all_ids(BlockShuffled(sizes, window), seed)):
        in_use.add(int(block_of[sample]))
        assert len(in_use) <= window
        in_use = {block for block in in_use if last_use[block] > at}


@given(
    st.lists(st.integers(1, 99), min_size=1, max_size=150),
    st.integers(1, 9),
    st.integers(1, 6),
    SEEDS,
)
def test_buckets_visit_each_sample_once(
    lengths: list[int], batch_size: int, window: int, seed: int
) -> None:
    order = Bucketed(lengths, batch_size, window)
    assert sorted(all_ids(order, seed)) == list(range(len(lengths)))
    assert enters_anywhere(order, seed, 1)


def test_buckets_pad_less() -> None:
    lengths = np.random.default_rng(0).integers(1, 500, 4096)

    def padding(ids: list[int]) -> int:
        rows = lengths[ids].reshape(-1, 16)
        return int((rows.max(1, keepdims=True) - rows).sum())

    sorted_in_windows = all_ids(Bucketed(lengths.tolist(), 16, 64))
    assert padding(sorted_in_windows) < 0.1 * padding(all_ids(Shuffled(4096)))
    means = lengths[sorted_in_windows].reshape(-1, 16).mean(1)[:64]
    assert list(means) != sorted(means)  # batches do not come from short to long


def test_weights_are_kept() -> None:
    order = Weighted([1, 0, 3], 20_000)
    counts = Counter(all_ids(order))
    assert counts[1] == 0
    assert abs(counts[2] / counts[0] - 3) < 0.15
    assert all_ids(order) != all_ids(order, epoch=1)
    assert enters_anywhere(Weighted([0.1, 0.7, 0.2], 50), 3, 2)


@settings(max_examples=8)
@given(st.integers(1, 60), st.integers(1, 60), SEEDS)
def test_a_mixture_keeps_weights_and_takes_each_part_without_replacement(
    few: int, many: int, seed: int
) -> None:
    order = Mixed([Shuffled(few), Shuffled(many)], [few, many], [1, 3], 2048)
    ids = np.array(all_ids(order, seed))
    assert (ids < few).sum() == 512
    for part, size in ((ids[ids < few], few), (ids[ids >= few] - few, many)):
        counts = Counter(part.tolist())  # turns are shuffled, so passes may overlap at their seams
        assert max(counts.values()) - min(counts.get(i, 0) for i in range(size)) <= 2


@pytest.mark.parametrize("size", [50, 300, 1000, 5000])
def test_no_sample_of_a_mixture_comes_again_before_all_have_come(size: int) -> None:
    order = Mixed([Shuffled(size), Shuffled(size)], [size, size], [1, 1], 2 * size)
    ids = np.array([i for epoch in range(3) for i in all_ids(order, epoch=epoch)])
    for part in (ids[ids < size], ids[ids >= size]):
        for start in range(0, len(part) - size + 1, size):
            assert len(set(part[start : start + size].tolist())) == size


def test_weights_as_large_as_numbers_get_keep_their_ratio() -> None:
    large = [5e307, 1.5e308]
    assert all_ids(Weighted(large, 100)) == all_ids(Weighted([1, 3], 100))
    assert Mixed([Shuffled(1), Shuffled(1)], [1, 1], large, 8).shares == [256, 768]


def test_passes_of_a_mixture_go_on_where_they_were() -> None:
    order = Mixed([Shuffled(1500), Shuffled(1500)], [1500, 1500], [1, 1], 1024)
    seen = [i for epoch in range(3) for i in all_ids(order, epoch=epoch) if i >= 1500]
    assert len(seen) == 1536
    assert len(set(seen)) == 1500  # all of its own first pass before any sample comes again


def test_a_mixture_can_be_entered_anywhere() -> None:
    parts = [BlockShuffled([10, 20], 1), Sequential(7)]
    assert enters_anywhere(Mixed(parts, [30, 7], [2, 1], 100), 5, 3)


def test_some_visits_the_chosen_alone() -> None:
    assert sorted(all_ids(SubsetOrder(np.array([3, 5, 9])))) == [3, 5, 9]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Weighted([], 5), "at least one above"),
        (lambda: Weighted([1, float("nan")], 5), "finite"),
        (lambda: Weighted([-1, 2], 5), "none below 0"),
        (lambda: BlockShuffled([1], 0), "window=0"),
        (lambda: Bucketed([1], 0), "batch_size=0"),
        (lambda: Mixed([Shuffled(1)], [1], [0], 1), "above 0"),
    ],
)
def test_what_cannot_be_is_refused(make, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=words):
        make()


class Misspelt:
    def __len__(self) -> int:
        return 3

    def idz(self, positions: object, seed: int, epoch: int) -> object:
        return positions


class Numbers(list[int]):
    order: object = None


@pytest.mark.parametrize("order", [Misspelt(), Sequential, [2, 1, 0], "shuffled"])
def test_an_order_that_is_none_is_refused(order: object) -> None:
    source = Numbers([1, 2, 3])
    assert isinstance(order_of(source), Shuffled)
    source.order = Sequential(3)
    assert order_of(source) is source.order
    source.order = order
    with pytest.raises(UsageError, match=r"of the Numbers is a .*ids\(positions, seed, epoch\)"):
        order_of(source)
