"""Sources made of sources."""

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shoal
from shoal.data.batches import Batches, LoadOptions
from shoal.data.orders import BlockShuffled
from shoal.data.pieces import pieces_in_order
from shoal.data.sources import Pass, tensors
from shoal.data.transforms.mapping import mapped
from shoal.data.transforms.normalizing import normalized
from shoal.data.views import View, by_length, in_order, join, mix, subset, weighted
from shoal.errors import RecipeError, UsageError


def numbered(start: int, stop: int):
    rows = torch.arange(start, stop)
    return tensors({"x": rows, "y": (rows * 2, rows * 3)}, rows)


def as_list(start: int, stop: int):
    return [(torch.tensor(i), torch.tensor(-i)) for i in range(start, stop)]


def as_pairs(source, num: int):
    return tensors(*source.take(np.arange(num)))


def trained_on(source, num_steps: int, batch_size: int = 4, **kwargs) -> list[int]:
    batches = Batches(source, batch_size=batch_size, **kwargs)
    return [i for step in range(num_steps) for i in batches.at(step).piece(0).target.tolist()]


def test_in_order() -> None:
    assert trained_on(in_order(numbered(0, 12)), 6) == [*range(12), *range(12)]


def test_some_are_a_source_of_their_own() -> None:
    whole = numbered(0, 100)
    source = subset(whole, [90, 7, 50, 3])
    assert len(source) == 4 and [int(source[at][1]) for at in range(4)] == [90, 7, 50, 3]
    assert sorted(trained_on(source, 2, batch_size=2)) == [3, 7, 50, 90]
    in_turn = pieces_in_order(source, 3)
    assert [piece.target.tolist() for piece in in_turn] == [[90, 7, 50], [3]]
    assert trained_on(in_order(join([source, as_pairs(whole, 2)])), 3, batch_size=2) == [
        *(90, 7, 50, 3, 0, 1)
    ]
    assert [int(subset(source, [3, 0])[at][1]) for at in range(2)] == [3, 90]


def test_statistics_of_some_are_theirs() -> None:
    rows = torch.arange(8.0).reshape(8, 1)
    held_out = normalized(subset(tensors(rows, rows), [0, 1, 2]), ["inputs"])
    assert held_out.statistics.fields["inputs"].mean == [1.0]


def test_some_keep_an_order_that_knows_parts() -> None:
    source = subset(in_order(numbered(0, 20)), [4, 9, 2])
    assert trained_on(source, 1, batch_size=3) == [4, 9, 2]
    lengths = [index % 2 for index in range(8)]
    alike = subset(by_length(numbered(0, 8), lengths, 2), [5, 2, 0, 3])
    pairs = trained_on(alike, 2, batch_size=2)
    assert sorted(sorted(pairs[at : at + 2]) for at in (0, 2)) == [[0, 2], [3, 5]]
    with pytest.raises(UsageError, match="Choose and clean first, and weigh"):
        subset(weighted(numbered(0, 3), [1, 1, 1]), [0])


def test_some_of_blocks_are_read_block_by_block() -> None:
    shards = View(numbered(0, 40), BlockShuffled([10, 10, 10, 10], window=1))
    ids = [(index * 7) % 40 for index in range(30)]
    drawn = trained_on(subset(shards, ids), 15, batch_size=2)
    assert sorted(drawn) == sorted(ids)
    blocks = [index // 10 for index in drawn]
    assert sum(a != b for a, b in pairwise(blocks)) == 3
    again = trained_on(subset(subset(shards, ids), range(29, -1, -1)), 15, batch_size=2)
    assert sorted(again) == sorted(ids)
    assert sum(a // 10 != b // 10 for a, b in pairwise(again)) == 3


@pytest.mark.parametrize(
    "ordered",
    [
        in_order,
        lambda source: weighted(source, [1] * 8),
        lambda source: by_length(source, range(8), 2),
        lambda source: mix([source, source]),
        lambda source: subset(in_order(source), [1, 2]),
        lambda source: mapped(in_order(source), lambda sample: sample),
    ],
)
def test_join_refuses_an_order_that_it_would_lose(ordered: Any) -> None:
    with pytest.raises(UsageError, match=r"source 1 of join\(\) .* has an order of its own"):
        join([numbered(0, 8), ordered(numbered(0, 8))])
    join([subset(numbered(0, 8), [1, 2]), View(numbered(0, 8), BlockShuffled([4, 4]))])


def test_mix_refuses_batches_by_length() -> None:
    alike = by_length(numbered(0, 8), range(8), 2)
    for part in (alike, subset(alike, [1, 2])):
        with pytest.raises(UsageError, match=r"source 0 of mix\(\) .* by length into batches"):
            mix([part, numbered(0, 8)])


def test_weighted_draws() -> None:
    drawn = trained_on(weighted(numbered(0, 3), [0, 1, 0], num_draws=8), 2)
    assert drawn == [1] * 8


def test_mix_says_when_a_source_comes_far_too_often(caplog: pytest.LogCaptureFixture) -> None:
    mix([range(700), range(1)])
    assert not caplog.text
    mix([range(100_000), range(10)])
    assert "source 1 (counted from 0) is 0.0001 of all, and it comes 1 in 1024 times" in caplog.text


def test_mix_takes_rows_of_both_in_place() -> None:
    source = mix([numbered(0, 10), numbered(100, 140)], weights=[1, 3], num_samples=64)
    batch = Batches(source, batch_size=64).at(0).piece(0)
    assert torch.equal(batch.inputs["x"], batch.target)
    assert torch.equal(batch.inputs["y"][1], batch.target * 3)
    own = source.source
    assert [int(own[int(i)][1]) for i in batch.ids] == batch.target.tolist()
    assert 8 <= (batch.target < 100).sum() <= 24


def test_join_without_take() -> None:
    source = join([as_list(0, 3), as_list(3, 7)])
    assert len(source) == 7
    assert [int(source[i][0]) for i in range(7)] == list(range(7))
    assert int(source[-1][0]) == 6
    assert not hasattr(source, "take")
    with pytest.raises(IndexError):
        source[7]


def test_unlike_sources_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"samples 0 and 4 .* inputs is a dict of x, y .* tensor"):
        mix([numbered(0, 4), tensors(torch.zeros(4), torch.zeros(4))]).take(np.arange(8))
    whole = tensors(torch.zeros(4), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(RecipeError, match=r"samples 1 and 7 .* target is .* int64 .* float32"):
        mix([whole, tensors(torch.zeros(4), torch.zeros(4))]).take(np.array([1, 7]))


class Ragged:
    """Asked for many at once; the last is longer."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int):
        return torch.zeros(9 if index == 3 else 2), 0

    def many(self, ids):
        return [self[int(index)] for index in ids]


@pytest.mark.parametrize("loaders", [0, 1])
def test_unlike_samples_have_the_numbers_of_the_whole(loaders: int) -> None:
    parts = [mapped(Ragged(), lambda sample: sample) for _ in range(2)]
    assert all(hasattr(part, "take") for part in parts)
    batches = Batches(mix(parts), batch_size=8, loading=LoadOptions(loaders=loaders))
    wrong = r"samples (\d) and (\d) do not fit into one batch: inputs is a tensor \[\d\]"
    try:
        with pytest.raises(RecipeError, match=wrong) as caught:
            batches.at(0).piece(0)
    finally:
        batches.close()
    found = re.search(wrong, str(caught.value))
    assert found is not None
    first, other = int(found[1]), int(found[2])
    ids = batches.at(0).ids.tolist()
    assert first == ids[0] and len({first % 4 == 3, other % 4 == 3}) == 2
    long = [index for index in ids if (index % 4 == 3) != (first % 4 == 3)]
    assert other == long[0]  # of the second part too, and not one of the first


def test_by_length_wants_the_batch_size_of_the_run() -> None:
    source = by_length(numbered(0, 8), range(8), batch_size=2)
    with pytest.raises(UsageError, match="batches of 2, and batch_size is 4"):
        Batches(source, batch_size=4)
    drawn = trained_on(source, 4, batch_size=2)
    assert all(abs(a - b) == 1 for a, b in zip(drawn[::2], drawn[1::2], strict=True))


class Drawn:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int):
        return torch.tensor(index), torch.tensor(0)

    def vary(self, index: int, of: Pass):
        return torch.tensor(index), torch.tensor(of.seed * 100 + of.epoch)


def test_a_pass_reaches_the_source_through_views() -> None:
    source = mix([in_order(Drawn()), as_list(0, 8)])
    batches = Batches(source, batch_size=16, seed=7)
    assert set(batches.at(2).piece(0).target.tolist()) >= {702}


class LeavesOut(Drawn):
    def __init__(self) -> None:
        self.told: list[int] = []

    def vary(self, index: int, of: Pass):
        if index % 3 == 0:
            raise ValueError("broken")
        return super().vary(index, of)

    def record(self, index: int, error: Exception) -> None:
        assert "broken" in str(error)
        self.told.append(index)


def test_bad_samples_are_left_out_and_told() -> None:
    source = LeavesOut()
    batch = Batches(in_order(source), batch_size=8, num_pieces=2).at(0)
    pieces = [batch.piece(0), batch.piece(1)]
    assert [p.inputs.tolist() for p in pieces] == [[1, 2], [4, 5, 7]]
    assert [p.num_samples for p in pieces] == [2, 3]
    assert [p.ids.tolist() for p in pieces] == [[1, 2], [4, 5, 7]]
    assert source.told == [0, 3, 6]


def test_what_is_joined_is_left_out_by_the_part_it_belongs_to() -> None:
    first, second = LeavesOut(), LeavesOut()
    source = in_order(join([first, as_list(0, 8), second]))
    pieces = [Batches(source, batch_size=24, num_pieces=3).at(0).piece(at) for at in range(3)]
    assert [p.inputs.tolist() for p in pieces] == [[1, 2, 4, 5, 7], [*range(8)], [1, 2, 4, 5, 7]]
    assert first.told == second.told == [0, 3, 6]
    mixed = Batches(mix([first, as_list(0, 8)]), batch_size=16).at(0).piece(0)
    assert mixed.num_samples < 16 and not {0, 3, 6} & set(mixed.ids.tolist())


def test_a_part_without_quarantine_still_stops_the_run() -> None:
    bad = [(torch.tensor(0), torch.tensor(0)), "no pair"]
    with pytest.raises(RecipeError, match="sample 9 gave a str"):
        Batches(in_order(join([LeavesOut(), bad])), batch_size=10).at(0).piece(0)


@pytest.mark.parametrize("num", [0, 3])
def test_weights_for_each(num: int) -> None:
    with pytest.raises(UsageError, match="Each sample needs one"):
        weighted(numbered(0, 8), [1.0] * num)


def test_a_mixture_needs_samples_of_every_part() -> None:
    with pytest.raises(UsageError, match="has no samples"):
        mix([[(1, 2)], []], weights=[1, 1])
    with pytest.raises(UsageError, match="num_samples is 0"):
        mix([[(1, 2)]], num_samples=0)
    with pytest.raises(UsageError, match="num_draws is -1"):
        weighted([(1, 2)], [1.0], num_draws=-1)


labelled = st.lists(st.integers(0, 4), min_size=2, max_size=60)


@given(labelled, st.data(), st.booleans())
def test_folds_are_disjoint_cover_all_and_are_balanced(
    labels: list[int], data: st.DataObject, stratified: bool
) -> None:
    k = data.draw(st.integers(2, len(labels)))
    source = [(index, label) for index, label in enumerate(labels)]
    given_labels = labels if stratified else None
    folds = [shoal.data.fold(source, k, i, given_labels, seed=7) for i in range(k)]
    held_out = [[held[i] for i in range(len(held))] for _, held in folds]
    assert sorted(sample for fold in held_out for sample in fold) == source
    assert max(map(len, held_out)) - min(map(len, held_out)) <= 1
    for (train, _), held in zip(folds, held_out, strict=True):
        assert sorted([*held, *(train[i] for i in range(len(train)))]) == source
    for label in set(labels) if stratified else ():
        counts = [sum(own == label for _, own in fold) for fold in held_out]
        assert max(counts) - min(counts) <= 1


def test_folds_are_the_same_each_time_and_others_by_another_seed() -> None:
    source = list(range(100))
    once, again, other = (shoal.data.fold(source, 5, 2, seed=s)[1].kept for s in (0, 0, 1))
    assert once.tolist() == again.tolist() != other.tolist()


@pytest.mark.parametrize(("k", "i"), [(1, 0), (11, 0), (5, 5), (5, -1)])
def test_a_fold_that_there_is_not_is_refused(k: int, i: int) -> None:
    with pytest.raises(UsageError, match="k is from 2 to the number of samples"):
        shoal.data.fold(list(range(10)), k, i)


def test_labels_that_are_none_are_refused() -> None:
    with pytest.raises(UsageError, match="labels of float64"):
        shoal.data.balanced([1, 2], [0.5, 1.5])
    with pytest.raises(UsageError, match="3 labels were given for 2 samples"):
        shoal.data.fold([1, 2], 2, 0, [1, 2, 3])


@pytest.mark.parametrize("names", [["rare", "often"], [1, 0]])
def test_balanced_classes_come_alike_often(names: list[Any]) -> None:
    labels = [names[0]] * 10 + [names[1]] * 990
    source = shoal.data.balanced([(i, i) for i in range(1000)], labels, num_draws=4000)
    ids = source.order.ids(np.arange(4000), 0, 0)
    assert abs((ids < 10).sum() - 2000) < 200
    assert set(ids[ids < 10]) == set(range(10))
    parts = [source.order.ids(np.arange(at, at + 400), 0, 0) for at in range(0, 4000, 400)]
    assert np.concatenate(parts).tolist() == ids.tolist()
