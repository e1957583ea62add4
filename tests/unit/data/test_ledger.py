"""The ledger tells a sample lost, repeated or swapped."""

import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.data import ledger
from shoal.data.batches import Batches
from shoal.data.ledger import add_marks, audit, mark
from shoal.data.marks import marks_of_rows
from shoal.data.sources import tensors
from shoal.data.views import weighted

IDS = st.lists(st.integers(0, 2**40), min_size=1, max_size=50)


def records(batches: Batches, num_steps: int, first: int = 1) -> list[dict[str, int]]:
    steps = range(first, first + num_steps)
    return [{"step": s, "mark": mark(batches.at(s - 1).ids)} for s in steps]


def some_batches(end: str = "drop") -> Batches:
    return Batches([(i, i) for i in range(103)], batch_size=10, num_pieces=2, seed=4, end=end)


@given(IDS, st.randoms())
def test_marks_of_parts_add_up_in_any_order(ids: list[int], random) -> None:
    whole = mark(np.array(ids))
    random.shuffle(ids)
    cut = random.randint(0, len(ids))
    parts = mark(np.array(ids[:cut], dtype=np.int64)), mark(np.array(ids[cut:], dtype=np.int64))
    assert add_marks(parts) == whole


@given(IDS, st.data())
def test_a_lost_repeated_or_swapped_sample_changes_the_mark(ids: list[int], data) -> None:
    at = data.draw(st.integers(0, len(ids) - 1))
    other = data.draw(st.integers(0, 2**40).filter(lambda i: i != ids[at]))
    for wrong in (ids[:at] + ids[at + 1 :], [*ids, ids[at]], [*ids[:at], other, *ids[at + 1 :]]):
        assert mark(np.array(wrong, dtype=np.int64)) != mark(np.array(ids))


@given(st.integers(1, 5), IDS)
def test_rows_are_marked_as_each_alone(num_rows: int, ids: list[int]) -> None:
    rows = np.resize(np.array(ids), (num_rows, len(ids)))
    assert marks_of_rows(rows) == [mark(row) for row in rows]


def test_pieces_that_are_gathered_at_once_know_their_marks() -> None:
    batches = Batches(tensors(torch.arange(96.0), torch.arange(96)), batch_size=8, num_pieces=2)
    pieces = [batches.at(step).piece(index) for step in range(12) for index in range(2)]
    assert sum(piece.mark is not None for piece in pieces) >= 20  # all but what shows their size
    assert all(piece.mark in (None, mark(piece.ids)) for piece in pieces)


def test_a_good_record() -> None:
    for end, num_steps in (("drop", 20), ("pad", 22), ("wrap", 22)):
        found = audit(records(some_batches(end), num_steps), some_batches(end))
        assert (found.problems, found.num_marked, found.last_step) == ([], num_steps, num_steps)
    assert audit(records(some_batches("pad"), 22), some_batches("pad")).most_often == 2


def test_a_step_costs_its_own_samples_not_all() -> None:
    many = 1_000_000
    batches = Batches(range(many), batch_size=10)
    lines = records(batches, 20)
    tracemalloc.start()
    try:
        found = audit(lines, batches)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found.num_marked, found.most_often, found.least_often) == (20, 1, 0)
    assert most_bytes < 1.5 * 8 * many  # one count a sample, and nothing as large beside it
    again = Batches(weighted(range(3), [0, 1, 0], num_draws=8), batch_size=4)
    assert audit(records(again, 4), again).most_often == 16


def test_more_samples_than_could_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches(range(2**40), batch_size=4)
    found = audit(records(batches, 3), batches)
    assert (found.problems, found.num_samples) == ([], 12)
    assert (found.most_often, found.least_often) == (1, 0)
    few = some_batches()
    wanted = audit(records(few, 25), few)
    monkeypatch.setattr(ledger, "_MOST_COUNTED", 3)
    assert audit(records(few, 25), few) == wanted


def test_what_is_wrong_is_named() -> None:
    batches = some_batches()
    other = Batches(batches.source, batch_size=10, seed=5)
    wrong = records(batches, 3) + records(other, 1, first=4) + records(batches, 1, first=5)
    found = audit(wrong, batches)
    assert found.problems == ["step 4: other samples were trained on than the order gives"]
    assert found.num_marked == 4
    gap = records(batches, 2) + records(batches, 1, first=4)
    assert audit(gap, batches).problems == ["between step 2 and step 4 nothing is on record"]
    twice = records(batches, 2) + records(batches, 1, first=2)
    assert audit(twice, batches).problems == ["step 2 is on record after step 2"]


def test_a_mark_may_stand_for_several_steps() -> None:
    batches = some_batches()
    kept = records(batches, 5)
    summed = [{"step": r["step"]} for r in kept]
    summed[3]["mark"] = add_marks(r["mark"] for r in kept[:4])
    found = audit(summed, batches)
    assert (found.problems, found.num_marked, found.num_unmarked) == ([], 4, 1)
    summed[3]["mark"] += 1
    assert audit(summed, batches).problems[0].startswith("steps 1 to 4:")


def test_steps_of_which_nobody_told_a_mark_are_no_false_alarm() -> None:
    """The run went on under another plan after them, and that one marks its own steps alone."""
    batches = some_batches()
    kept = records(batches, 9)
    told = [{"step": r["step"]} for r in kept]
    told[1]["mark"] = add_marks(r["mark"] for r in kept[:2])
    told[6]["mark"] = add_marks(r["mark"] for r in kept[5:7])
    found = audit([*told[:7], *kept[7:]], batches)
    assert (found.problems, found.num_marked, found.num_unmarked) == ([], 6, 3)
    told[6]["mark"] += 1
    assert audit(told[:7], batches).problems[0].startswith("steps 3 to 7:")


def test_samples_in_quarantine_are_missing_by_right() -> None:
    batches = some_batches()
    out = batches.at(2).ids[:2]
    kept = records(batches, 5)
    kept[2]["mark"] = mark(batches.at(2).ids[2:])
    assert audit(kept, batches).problems
    found = audit(kept, batches, set(out.tolist()))
    assert (found.problems, found.num_left_out) == ([], 2)


def test_samples_that_no_file_names_are_no_false_alarm() -> None:
    """The quarantine file could not be written: of such steps nothing can be said."""
    batches = some_batches()
    kept = records(batches, 5)
    kept[2] |= {"mark": mark(batches.at(2).ids[2:]), "left_out": 2}
    found = audit(kept, batches)
    assert (found.problems, found.num_marked, found.num_unmarked) == ([], 4, 1)
    kept[3]["mark"] += 1
    assert audit(kept, batches).problems == [
        "step 4: other samples were trained on than the order gives"
    ]


def test_a_sample_may_fail_in_one_pass_and_not_in_another() -> None:
    batches = some_batches()
    bad = batches.at(2).ids[:3]
    kept = records(batches, 20)
    kept[2] |= {"mark": mark(batches.at(2).ids[2:]), "left_out": 2}  # the third of them was good
    found = audit(kept, batches, set(bad.tolist()))
    assert (found.problems, found.num_left_out, found.num_marked) == ([], 2, 20)
