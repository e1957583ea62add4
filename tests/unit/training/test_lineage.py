"""What a run has seen follows from its record, whatever became of other runs since."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.cli.main import run_here
from shoal.data.batches import Batches
from shoal.data.ledger import mark
from shoal.data.orders import order_name
from shoal.data.replay_order import ReplayOrder
from shoal.data.shard_files.reading import shards
from shoal.data.shard_files.writing import build
from shoal.data.transforms.cleaning import clean
from shoal.data.transforms.quarantine import quarantine
from shoal.data.views import by_length, in_order, join, subset, weighted
from shoal.errors import UsageError
from shoal.training import lineage
from shoal.training.lineage import (
    audit_run,
    batches_of,
    left_out_ids,
    missed_samples,
    read_record,
    refuse_other_marks,
    seen_in,
    select_new,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


def write(path: Path, num_steps: int, num_samples: int, **described: Any) -> Path:
    """The record of a run with batches of 4."""
    path.mkdir(exist_ok=True)
    values = {"batch_size": described.pop("batch_size", 4), "seed": 0, "end": "drop"}
    run = {name: {"value": value} for name, value in values.items()}
    described = {"run": run, "num_samples": num_samples, **described}
    (path / "run.json").write_text(json.dumps(described))
    lines = [json.dumps({"step": step + 1}) + "\n" for step in range(num_steps)]
    (path / "metrics.jsonl").write_text("".join(lines))
    return path


def ids_of(path: Path, data: Any) -> list[int]:
    record = read_record(path)
    batches = batches_of(record, data)
    return [int(i) for line in record.steps for i in batches.at(line["step"] - 1).ids]


def test_a_run_before_that_went_on_changes_nothing(tmp_path: Path) -> None:
    data = range(80)
    first = write(tmp_path / "first", 3, 40)
    new = {"new_data": str(first), "new_data_steps": 3, "replay": 0.25}
    second = write(tmp_path / "second", 5, 80, **new)
    before = ids_of(second, data)
    order = select_new(data, read_record(first), 0.25).order.ids(np.arange(20), 0, 0)
    assert before == order.tolist()
    write(first, 8, 40)
    assert ids_of(second, data) == before
    again = select_new(data, read_record(first).until(3), 0.25).order.ids(np.arange(20), 0, 0)
    assert np.array_equal(again, order)
    seen = seen_in(read_record(second), data)
    assert set(np.flatnonzero(seen)) == set(before) | set(ids_of(first, data)[:12])


def test_runs_may_be_moved_together(tmp_path: Path) -> None:
    first = write(tmp_path / "first", 3, 40)
    second = write(tmp_path / "second", 5, 80, new_data=str(first), new_data_steps=3)
    before = ids_of(second, range(80))
    (tmp_path / "archive").mkdir()
    moved = second.rename(tmp_path / "archive" / "second")
    assert ids_of(moved, range(80)) == before, "the other is where it was"
    first.rename(tmp_path / "archive" / "first")
    assert ids_of(moved, range(80)) == before
    moved = moved.rename(tmp_path / "elsewhere-second")
    (tmp_path / "archive" / "first").rename(tmp_path / "elsewhere")
    moved = moved.rename(tmp_path / "archive" / "first")  # which is not the one before itself
    with pytest.raises(UsageError, match=r"was trained on what .*first had not seen, .* is gone"):
        ids_of(moved, range(80))


def test_each_run_of_a_chain_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    last = write(tmp_path / "0", 1, 8)
    for number in range(1, 12):
        new = {"new_data": str(last), "new_data_steps": 1}
        last = write(tmp_path / str(number), 1, 8 + 4 * number, **new)
    looked: list[Path] = []

    def counted(path: Path) -> lineage.RunRecord:
        looked.append(path)
        return read_record(path)

    monkeypatch.setattr(lineage, "read_record", counted)
    seen = seen_in(read_record(last), range(60))
    assert len(looked) == 11 and seen.sum() == 48


def test_new_data_needs_no_order_of_its_own_from_before(tmp_path: Path) -> None:
    first = write(tmp_path / "first", 2, 16)
    second = write(tmp_path / "second", 1, 24, new_data=str(first), new_data_steps=0)
    assert set(ids_of(second, range(30))) <= set(range(24))
    with pytest.raises(UsageError, match="trained on 24 samples and there are 20 now"):
        batches_of(read_record(second), range(20))
    with pytest.raises(UsageError, match="cannot tell how they stood"):
        batches_of(read_record(first), weighted(range(20), [1.0] * 20))


KNOWN_BY = ("marks", "the order's name")
LENGTHS = [index * 7 % 11 for index in range(40)]


@pytest.mark.parametrize(
    ("other", "known_by"),
    [
        *((in_order, by) for by in KNOWN_BY),
        *((lambda data: weighted(data, [1.0] * 40), by) for by in KNOWN_BY),
        *((lambda data: by_length(data, LENGTHS, 4), by) for by in KNOWN_BY),
        (lambda data: subset(data, range(39, -1, -1)), "the order's name"),  # as many numbers
    ],
)
def test_what_was_seen_in_another_order_is_not_guessed(
    tmp_path: Path, other: Any, known_by: str
) -> None:
    first = write(tmp_path / "first", 3, 40)
    batches = batches_of(read_record(first), range(40))
    if known_by == "marks":
        lines = [{"step": step, "mark": mark(batches.at(step - 1).ids)} for step in (1, 2, 3)]
        (first / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        described = json.loads((first / "run.json").read_text())
        described["run"]["data_order"] = {"value": order_name(batches.order, 0)}
        (first / "run.json").write_text(json.dumps(described))
    assert seen_in(read_record(first), range(40)).sum() == 12
    with pytest.raises(UsageError, match="in another order than its recipe gives today"):
        select_new(other(range(40)), read_record(first))


@pytest.mark.parametrize("known_by", KNOWN_BY)
def test_what_was_replayed_in_another_order_is_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known_by: str
) -> None:
    first = write(tmp_path / "first", 3, 40)
    new = {"new_data": str(first), "new_data_steps": 3, "replay": 0.25}
    second = write(tmp_path / "second", 3, 80, **new)
    batches = batches_of(read_record(second), range(80))
    if known_by == "marks":
        lines = [{"step": step, "mark": mark(batches.at(step - 1).ids)} for step in (1, 2, 3)]
        (second / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        described = json.loads((second / "run.json").read_text())
        described["run"]["new_data_order"] = {"value": order_name(batches.order, 0)}
        (second / "run.json").write_text(json.dumps(described))
    assert seen_in(read_record(second), range(80)).sum() > 12
    refuse_other_marks(read_record(second), range(80))

    def reversed_ids(self: ReplayOrder, positions: Any, seed: int, epoch: int) -> Any:
        return ids(self, len(self) - 1 - positions, seed, epoch)

    ids = ReplayOrder.ids
    monkeypatch.setattr(ReplayOrder, "ids", reversed_ids)
    with pytest.raises(UsageError, match="in another order"):
        seen_in(read_record(second), range(80))
    if known_by == "marks":
        with pytest.raises(UsageError, match="other samples than --new-data gives today: step 1"):
            refuse_other_marks(read_record(second), range(80))


def test_data_may_grow_by_sets_of_shards(tmp_path: Path) -> None:
    def pairs(first: int, stop: int) -> list[tuple[float, int]]:
        return [(float(index), index) for index in range(first, stop)]

    for name, first, stop in (("a", 0, 40), ("b", 40, 70)):
        build(pairs(first, stop), tmp_path / name, shard_bytes=100)
    before = shards(tmp_path / "a")
    first = write(tmp_path / "first", 3, 40)
    described = json.loads((first / "run.json").read_text())
    described["run"]["data_order"] = {"value": order_name(before.order, 0)}
    (first / "run.json").write_text(json.dumps(described))
    seen = set(np.flatnonzero(seen_in(read_record(first), before)).tolist())
    grown = select_new(shards([tmp_path / "a", tmp_path / "b"]), read_record(first))
    assert len(seen) == 12 and sorted(ids_in(grown)) == sorted(set(range(70)) - seen)
    assert {grown[index][1] for index in ids_in(grown)} == set(range(70)) - seen
    joined = join([before, shards(tmp_path / "b")])
    with pytest.raises(UsageError, match="in another order"):
        select_new(joined, read_record(first))
    build(pairs(0, 45), tmp_path / "rebuilt", shard_bytes=150)
    with pytest.raises(UsageError, match=r"shards\(\[OLD, NEW\]\)"):
        select_new(shards(tmp_path / "rebuilt"), read_record(first))


def ids_in(view: Any) -> list[int]:
    found: list[int] = view.order.ids(np.arange(len(view.order)), 0, 0).tolist()
    return found


def test_new_samples_keep_the_order_of_the_recipe(tmp_path: Path) -> None:
    first = write(tmp_path / "first", 3, 40)
    grown = ids_in(select_new(in_order(range(50)), read_record(first)))
    assert grown == list(range(12, 50))
    lengths = [*LENGTHS, *range(10)]
    alike = select_new(by_length(range(50), lengths, 4, window=9), read_record(first))
    new = ids_in(alike)
    seen = seen_in(read_record(first), by_length(range(40), LENGTHS, 4, window=9))
    assert sorted(new) == np.flatnonzero(~np.append(seen, np.zeros(10, bool))).tolist()
    batches = [[lengths[index] for index in new[at : at + 4]] for at in range(0, 36, 4)]
    assert max(max(batch) - min(batch) for batch in batches) <= 2
    with pytest.raises(UsageError, match="batches of 4, and batch_size is 5"):
        Batches(alike, batch_size=5)
    with pytest.raises(UsageError, match="--replay mixes old samples in"):
        select_new(by_length(range(50), lengths, 4), read_record(first), 0.5)
    with pytest.raises(UsageError, match="neither weighted nor mixed"):
        select_new(weighted(range(40), [1.0] * 40), read_record(first))


def test_a_choice_grows_by_ids_at_its_end(tmp_path: Path) -> None:
    evens, grown = (subset(range(90), range(0, stop, 2)) for stop in (60, 90))
    first = write(tmp_path / "first", 3, 30)
    described = json.loads((first / "run.json").read_text())
    described["run"]["data_order"] = {"value": order_name(evens.order, 0)}
    (first / "run.json").write_text(json.dumps(described))
    new = select_new(grown, read_record(first))
    seen = Batches(evens, batch_size=4)
    was_seen = {int(index) for step in range(3) for index in seen.at(step).ids}
    assert sorted(ids_in(new)) == sorted(set(range(45)) - was_seen)
    odds = subset(range(90), range(1, 90, 2))
    with pytest.raises(UsageError, match="in another order than its recipe gives today"):
        select_new(odds, read_record(first))


PAIRS = [(float(index), 0) for index in range(12)]


def test_what_was_left_out_is_found_through_what_lies_over_it(tmp_path: Path) -> None:
    inner = quarantine(PAIRS, tmp_path / "bad.jsonl")
    for index in (2, 3, 9):
        inner.record(index, ValueError("odd"))
    assert left_out_ids(in_order(inner)).tolist() == [2, 3, 9]
    cleaned = clean(inner, keep=lambda sample: sample[0] >= 3)
    assert cleaned[6][0] == 9.0
    assert left_out_ids(cleaned).tolist() == [0, 6]
    assert left_out_ids(join([PAIRS, cleaned, inner])).tolist() == [12, 18, 23, 24, 30]
    assert left_out_ids(PAIRS).tolist() == []
    chosen = subset(inner, [9, 1, 2])
    assert left_out_ids(chosen).tolist() == [0, 2]
    chosen.record(1, ValueError("odd"))
    assert left_out_ids(inner).tolist() == [1, 2, 3, 9]


def test_an_audit_knows_what_cleaned_data_left_out(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    inner = quarantine(PAIRS, bad)
    held_out = quarantine(tuple(PAIRS), bad)  # shares the file
    data = clean(inner, keep=lambda sample: sample[0] >= 4)
    record = read_record(write(tmp_path / "run", 2, 8))
    batches = batches_of(record, data)
    for line in record.steps:
        ids = batches.at(line["step"] - 1).ids
        line["mark"] = mark(ids[ids != 5])
    data.record(5, ValueError("odd"))
    held_out.record(4, ValueError("odd"))
    found = audit_run(record, data)
    assert not found.problems and (found.num_marked, found.num_left_out) == (2, 1)


def numbers() -> Any:
    import torch
    from torch import nn

    import shoal

    return shoal.Run(
        model=lambda: nn.Linear(1, 1),
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=shoal.data.tensors(torch.zeros(8, 1), torch.zeros(8, 1)),
        batch_size=4,
        steps=2,
    )


@pytest.mark.parametrize("num_steps", [0, 2])
def test_an_audit_of_nothing_assures_of_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_steps: int
) -> None:
    recipe = {"recipe": f"{__file__}:numbers", "settings": {}}
    run = write(tmp_path / "run", num_steps, 8, **recipe)
    for words in ([], ["--json"]):
        assert run_here(["data", "audit", str(run), *words]) == 2
        told = capsys.readouterr()
        assert "nothing to compare" in told.err
        assert ("exit_code" in told.out) == bool(words)


def bad_numbers(bad: str = "") -> Any:
    import dataclasses

    run = numbers()
    return dataclasses.replace(run, data=quarantine(run.data, bad))


@pytest.fixture
def bad_run(tmp_path: Path) -> tuple[Path, Path]:
    """A run of two steps that left out sample 5, and its quarantine file."""
    bad = tmp_path / "bad.jsonl"
    described = {"recipe": f"{__file__}:bad_numbers", "settings": {"bad": str(bad)}}
    run = write(tmp_path / "run", 2, 8, **described)
    data = bad_numbers(str(bad)).data
    data.record(5, ValueError("odd"))
    batches, lines = batches_of(read_record(run), data), []
    for step in (1, 2):
        ids = batches.at(step - 1).ids
        line = {"step": step, "mark": mark(ids[ids != 5]), "left_out": int((ids == 5).sum())}
        lines.append(json.dumps(line) + "\n")
    (run / "metrics.jsonl").write_text("".join(lines))
    return run, bad


def test_what_was_left_out_and_mended_is_new(bad_run: tuple[Path, Path], tmp_path: Path) -> None:
    run, bad = bad_run
    data = bad_numbers(str(bad)).data
    before = read_record(run)
    assert missed_samples(before, data) == [5]
    assert ids_in(select_new(data, before, missed=[5])) == [5]
    with pytest.raises(UsageError, match="All 8 samples were seen"):
        select_new(data, before)
    noted = {"new_data": str(run), "new_data_steps": 2, "new_data_missed": [5]}
    record = read_record(write(tmp_path / "next", 1, 8, batch_size=1, **noted))
    assert batches_of(record, data).at(0).ids.tolist() == [5]
    data.record(3, ValueError("bad by now"))  # which it was not when the run began
    assert missed_samples(before, data) == [5]
    assert batches_of(record, data).at(0).ids.tolist() == [5]
    assert seen_in(record, data).all() and missed_samples(record, data) == []


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "bad.jsonl is not there, so it is not known which samples were left out (1 were"),
        (b"", "1 samples were left out by the record, and the quarantine files name only 0"),
        (b"garbage\n", "holds something other than a quarantine's lines"),
        (b"after", "line 2 of the quarantine file"),
    ],
)
def test_an_audit_tells_of_a_quarantine_file_that_is_gone_or_damaged(
    bad_run: tuple[Path, Path],
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    told: str,
) -> None:
    run, bad = bad_run
    audit = ["data", "audit", str(run), "--recipe", f"{__file__}:bad_numbers"]
    assert run_here(audit) == 0
    assert "7 samples" in (said := capsys.readouterr().out) and "trained on 0 to 1 times" in said
    if content is None:
        bad.unlink()
    else:
        bad.write_bytes(bad.read_bytes() + b"garbage\n" if content == b"after" else content)
    capsys.readouterr()
    for words in ([], ["--json"]):
        assert run_here([*audit, *words]) == 1
        said = capsys.readouterr()
        first = json.loads(said.out)["problems"][0] if words else said.out
        if not words and not content:
            assert "7 samples" in said.out and "trained on 0 to 1 times" in said.out
        assert told in first and "Traceback" not in said.err
