"""Batches: pure in the step, the same for any number of pieces, equal to indexing by hand."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from shoal.data import permutation
from shoal.data.batches import _WINDOW_BYTES, Batches, LoadOptions, check
from shoal.data.pieces import pieces_in_order
from shoal.data.sources import TensorSource, tensors
from shoal.data.transforms.quarantine import quarantine
from shoal.data.views import in_order, join
from shoal.errors import RecipeError, UsageError

ends = st.sampled_from(permutation.ENDS)


def numbered(num_samples: int) -> TensorSource:
    """Sample i has the inputs [i, i] and the target i."""
    ids = torch.arange(num_samples)
    return tensors(torch.stack([ids, ids], dim=1).float(), ids)


@settings(max_examples=60)
@given(
    st.integers(1, 100),
    st.sampled_from([1, 2, 3, 4]),
    st.integers(1, 4),
    ends,
    st.booleans(),
    st.lists(st.integers(0, 60), min_size=1, max_size=12),
)
def test_pieces_equal_direct_indexing_in_any_order_of_steps(
    num_samples: int, num_pieces: int, piece_size: int, end: str, takes: bool, steps: list[int]
) -> None:
    batch_size = num_pieces * piece_size
    if num_samples < batch_size and end == "drop":
        return
    source = numbered(num_samples)
    data: Any = source if takes else list(source)  # type: ignore[call-overload]
    batches = Batches(data, batch_size=batch_size, num_pieces=num_pieces, seed=7, end=end)
    for step in steps:
        batch = batches.at(step)
        epoch, position = divmod(step, permutation.batches_per_epoch(num_samples, batch_size, end))
        positions = permutation.batch_positions(position, 1, num_samples, batch_size, end)
        ids = permutation.permute(positions, num_samples, 7, epoch)
        pieces = [batch.piece(index) for index in range(num_pieces)]
        met = np.concatenate([piece.ids for piece in pieces])
        assert met.tolist() == ids.tolist()
        assert batch.num_samples == len(ids) == sum(piece.num_samples for piece in pieces)
        assert batch.epoch == epoch
        for index, piece in enumerate(pieces):
            assert batch.ids_of(index).tolist() == piece.ids.tolist()
            if piece.num_samples:
                assert piece.target.tolist() == piece.ids.tolist()
                assert piece.inputs.tolist() == [[i, i] for i in piece.ids]
            else:
                assert piece.inputs is None and piece.target is None


@given(st.integers(24, 200), ends, st.integers(0, 300), st.integers(0, 9))
def test_the_samples_of_a_step_do_not_depend_on_the_pieces(
    num_samples: int, end: str, step: int, seed: int
) -> None:
    met = set()
    for num_pieces in (1, 2, 3, 4, 6, 8, 12, 24):
        batches = Batches(
            numbered(num_samples), batch_size=24, num_pieces=num_pieces, seed=seed, end=end
        )
        batch = batches.at(step)
        met.add(tuple(np.concatenate([batch.ids_of(p) for p in range(num_pieces)]).tolist()))
    assert len(met) == 1


def test_nested_inputs_keep_their_form_within_a_window() -> None:
    ids = torch.arange(40)
    source = tensors({"a": ids, "b": (ids + 1, ids + 2)}, ids)
    batches = Batches(source, batch_size=4, num_pieces=2)
    for step in range(10):
        inputs, target, *_ = batches.at(step).piece(1)
        assert torch.equal(inputs["a"], target)
        assert isinstance(inputs["b"], tuple) and torch.equal(inputs["b"][1], target + 2)


def test_only_the_pieces_asked_for_are_loaded() -> None:
    class Counting(list[Any]):
        loaded: set[int] = set()

        def __getitem__(self, index: Any) -> Any:
            self.loaded.add(index)
            return super().__getitem__(index)

    source = Counting((torch.zeros(1), i) for i in range(16))
    batch = Batches(source, batch_size=16, num_pieces=4).at(0)
    batch.piece(2)
    # The first of all is looked at, to compare types with.
    assert source.loaded == {int(batch.ids[0]), *batch.ids_of(2).tolist()}


def test_a_piece_that_was_written_into_is_loaded_anew() -> None:
    batches = Batches(numbered(64), batch_size=4)
    weight = torch.ones(2, requires_grad=True)
    for step in range(6):
        before = batches.at(step).piece(0)
        assert not before.inputs.requires_grad
        before.inputs.mul_(weight * 3)  # inside a graph, as a careless model would
        before.target[0] = -1
        again = batches.at(step).piece(0)
        assert again.inputs.tolist() == [[i, i] for i in again.ids]
        assert again.target.tolist() == again.ids.tolist()


def test_inference_leaves_nothing_behind_that_cannot_be_trained_on() -> None:
    batches = Batches(numbered(64), batch_size=4)
    with torch.inference_mode():
        for step in range(3):
            batches.at(step).piece(0)
    assert not batches.at(2).piece(0).inputs.is_inference()


def test_the_window_is_bounded() -> None:
    most = 0

    class Watching:
        rows = torch.zeros(400, 1000)

        def __len__(self) -> int:
            return 400

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return self.rows[index], 0

        def take(self, ids: permutation.Ids) -> tuple[Tensor, Tensor]:
            nonlocal most
            most = max(most, len(ids) * 4000)
            return self.rows[torch.from_numpy(ids)], torch.zeros(len(ids))

    batches = Batches(Watching(), batch_size=4)
    for step in range(100):
        batches.at(step).piece(0)
    assert 16_000 < most <= _WINDOW_BYTES


class Broken:
    """Sample 13 cannot be read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 13:
            raise OSError("disk on fire")
        return torch.zeros(2), index


class BrokenTakes(Broken):
    def take(self, ids: permutation.Ids) -> tuple[Tensor, Tensor]:
        if 13 in ids:
            raise OSError("disk on fire")
        return torch.zeros(len(ids), 2), torch.from_numpy(ids)


@pytest.mark.parametrize("source", [Broken(), BrokenTakes()])
def test_a_sample_that_fails_is_named_at_its_own_step(source: Broken) -> None:
    batches = Batches(source, batch_size=4)
    for step in range(10):
        batch = batches.at(step)
        if 13 in batch.ids_of(0):
            with pytest.raises(RecipeError, match=r"sample 13 .*OSError: disk on fire"):
                batch.piece(0)
        else:
            assert batch.piece(0).target.tolist() == batch.ids_of(0).tolist()


def test_steps_before_a_sample_that_fails_are_not_made_slow_by_it() -> None:
    taken: list[int] = []

    class Counting(BrokenTakes):
        def take(self, ids: permutation.Ids) -> tuple[Tensor, Tensor]:
            taken.append(len(ids))
            return super().take(ids + (13 - 39))  # the last one fails

    batches = Batches(in_order(Counting()), batch_size=4)
    for step in range(9):
        batches.at(step).piece(0)
    assert sum(size > 4 for size in taken) == 1
    assert taken[-7:] == [4] * 7


@pytest.mark.parametrize(
    ("num_samples", "settings_", "says"),
    [
        (0, {}, "data is empty"),
        (7, {}, "Use batch_size=7 or less, or end='pad'"),
        (99, {"batch_size": 0}, "batch_size=0"),
        (99, {"num_pieces": 0}, "num_pieces=0"),
        (99, {"num_pieces": 3}, "Use 2 or 4 pieces, or batch_size=9"),
        (99, {"num_pieces": 16}, "Use 8 pieces, or batch_size=16"),
        (99, {"end": "stop"}, "end='stop' is not known"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(
    num_samples: int, settings_: dict[str, Any], says: str
) -> None:
    arguments = {"batch_size": 8, "num_pieces": 1, "end": "drop", **settings_}
    with pytest.raises(UsageError, match=says):
        check([(0, 0)] * num_samples, **arguments)


@pytest.mark.parametrize("end", ["pad", "wrap"])
def test_data_shorter_than_a_batch_will_do_unless_dropped(end: str) -> None:
    batch = Batches(numbered(3), batch_size=8, num_pieces=4, end=end).at(5)
    assert batch.num_samples == (3 if end == "pad" else 8)
    assert set(np.concatenate([batch.ids_of(p) for p in range(4)]).tolist()) == {0, 1, 2}


def test_pieces_in_order_cover_the_source_once() -> None:
    pieces = pieces_in_order(numbered(23), 5)
    assert len(pieces) == 5
    assert [piece.num_samples for piece in pieces] == [5, 5, 5, 5, 3]
    assert [i for piece in pieces for i in piece.target.tolist()] == list(range(23))
    assert pieces[-1].target.tolist() == [20, 21, 22]
    with pytest.raises(IndexError):
        pieces[5]
    with pytest.raises(UsageError, match="at least 1"):
        pieces_in_order(numbered(3), 0)


def one_odd(odd: Any, usual: Any) -> list[Any]:
    return [(odd if index == 5 else usual, index) for index in range(16)]


@pytest.mark.parametrize(
    ("usual", "odd", "words"),
    [
        (1.0, np.float32(1), "float64 in the first and float32 in the other"),
        (np.int32(1), np.uint8(1), "int32 in the first and uint8 in the other"),
        (1, 1.0, "int64 in the first and float64"),
        (torch.ones(2), torch.ones(2).double(), "float32 in the first and float64"),
        ({"a": 1}, {"b": 1}, "a dict of a in the first and a dict of b in the other"),
        ((1, 2.0), (1, np.float32(2)), r"inputs\.1 is float64 in the first"),
    ],
)
@pytest.mark.parametrize("batch_size", [16, 2])
def test_a_sample_of_another_type_is_refused_at_its_step_under_every_plan(
    usual: Any, odd: Any, words: str, batch_size: int
) -> None:
    """Alone in its piece too, where torch would have nothing to convert."""
    for num_pieces in (batch_size, 1):
        batches = Batches(
            in_order(one_odd(odd, usual)), batch_size=batch_size, num_pieces=num_pieces
        )
        refused = set()
        for step in range(batches.steps_per_epoch):
            try:
                for piece in reversed(range(num_pieces)):
                    batches.at(step).piece(piece)
            except RecipeError as error:
                refused.add(step)
                together = "do not fit into one batch" in str(error)
                assert together or re.search(words, str(error)), error
        assert refused == {5 // batch_size}


def test_numbers_that_torch_makes_the_same_of_and_sizes_may_differ() -> None:
    for usual, odd in [(1.0, np.float64(1)), (1, np.int64(1)), (True, np.bool_(True))]:
        for num_pieces in (1, 16):
            batch = Batches(one_odd(odd, usual), batch_size=16, num_pieces=num_pieces).at(0)
            kinds = {batch.piece(index).inputs.dtype for index in range(num_pieces)}
            assert len(kinds) == 1
    for usual, odd in [(np.ones(2), torch.ones(2).double()), (np.ones(2), np.ones(4)[::-2])]:
        whole = Batches(one_odd(odd, usual), batch_size=16).at(0).piece(0)
        other = Batches(one_odd(usual, odd), batch_size=16).at(0).piece(0)
        assert torch.equal(whole.inputs, torch.ones(16, 2).double())
        assert torch.equal(whole.inputs, other.inputs)
    sizes = Batches(one_odd(torch.ones(3), torch.ones(2)), batch_size=16, num_pieces=16).at(0)
    assert sorted(sizes.piece(index).inputs.numel() for index in range(16)) == [2] * 15 + [3]


def test_sources_that_are_joined_must_be_of_one_type_under_every_plan() -> None:
    rows = torch.ones(4, 1)
    joined = join([tensors(rows, rows), tensors(rows.double(), rows)])
    for num_pieces in (1, 4):
        batches = Batches(in_order(joined), batch_size=4, num_pieces=num_pieces)
        assert batches.at(0).piece(num_pieces - 1).inputs.dtype == torch.float32
        with pytest.raises(RecipeError, match=r"samples 0 and \d are not alike: inputs is float32"):
            batches.at(1).piece(num_pieces - 1)


def test_a_first_sample_that_fails_is_not_what_others_are_compared_with(tmp_path: Path) -> None:
    class Odd(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            if index < 2:
                raise ValueError("bad")
            return super().__getitem__(index)

    source = quarantine(Odd((float(index), 0) for index in range(8)), tmp_path / "bad.jsonl")
    batches = Batches(in_order(source), batch_size=4, num_pieces=2)
    assert batches.at(1).piece(1).num_samples == 2
    assert not (tmp_path / "bad.jsonl").exists()  # nothing is left out before its step
    assert batches.at(0).piece(0).num_samples == 0


@pytest.mark.parametrize("step", [0, 1])
def test_take_that_leaves_rows_out_is_refused(step: int) -> None:
    """Else the rest would count as the whole, and who is in it would be unknown."""

    class Choosy(list[Any]):
        def take(self, ids: permutation.Ids) -> tuple[Tensor, Tensor]:
            good = torch.from_numpy(ids[ids != 5])
            return good[:, None].float(), good

    batches = Batches(Choosy(range(16)), batch_size=8, end="wrap")
    bad = next(at for at in (0, 1) if 5 in batches.at(at).ids)
    if step == bad:
        with pytest.raises(RecipeError, match=r"take\(\) gave 7 rows for 8 samples"):
            batches.at(step).piece(0)
    else:
        assert batches.at(step).piece(0).num_samples == 8


def test_packed_sequences_stay_what_they_are() -> None:
    texts = [(torch.arange(1.0, 2 + index)[:, None], index) for index in range(4)]

    def packed(samples: list[Any]) -> tuple[Any, Tensor]:
        inputs = pack_sequence([text for text, _ in samples], enforce_sorted=False)
        return {"text": inputs}, torch.tensor([label for _, label in samples])

    piece = Batches(texts, batch_size=4, loading=LoadOptions(packed)).at(0).piece(0)
    assert isinstance(piece.inputs["text"], PackedSequence)
    output, _ = torch.nn.GRU(1, 2)(piece.inputs["text"])
    assert isinstance(output, PackedSequence)
    batches = Batches(texts, batch_size=4, loading=LoadOptions(packed, loaders=1))
    try:
        with pytest.raises(RecipeError, match=r"holds a PackedSequence.* let the model pack them"):
            batches.at(0).piece(0)
    finally:
        batches.close()
