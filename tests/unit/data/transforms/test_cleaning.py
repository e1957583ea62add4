"""Cleaning: what stays is a pure function of source and rules, found once, and said why."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.batches import Batches
from shoal.data.orders import BlockShuffled, Bucketed, Sequential
from shoal.data.sources import BatchSource, EpochSource, Pass, tensors
from shoal.data.transforms import jobs
from shoal.data.transforms.cleaning import CleanCounts, clean
from shoal.data.transforms.mapping import mapped
from shoal.data.transforms.randomness import Random
from shoal.data.views import View, by_length, in_order, weighted
from shoal.errors import RecipeError, ShoalError, UsageError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(jobs, "_LEAST_SHARE", 7)
    return tmp_path / "cache" / "transforms"


ROWS: list[Any] = [
    {"age": 30, "name": "ann"},
    {"age": -1, "name": "bob"},
    {"age": 30, "name": "ann"},
    {"age": "41", "name": "eve"},
    {"name": "kim"},
    {"age": 12, "name": "ann"},
    {"age": "old", "name": "joe"},
    {"age": 50, "name": "zed"},
] * 3


def repair(row: Any) -> Any:
    return {**row, "age": int(row["age"])}


def adult(row: Any) -> bool:
    return bool(row["age"] >= 18)


def name(row: Any) -> str:
    return str(row["name"])


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("workers", [1, 3])
def test_all_rules_at_once(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "bad.jsonl"
    rules: Any = {"repair": repair, "schema": {"age": (0, 130)}, "keep": adult, "unique_by": name}
    found = clean(ROWS, **rules, quarantine=path, workers=workers)
    assert found.kept.tolist() == [0, 3, 7]
    assert [found[index] for index in range(3)] == [
        {"age": 30, "name": "ann"},
        {"age": 41, "name": "eve"},
        {"age": 50, "name": "zed"},
    ]
    assert found.counts == CleanCounts(kept=3, failed=6, invalid=3, dropped=3, duplicates=9)
    notes = {line["index"]: (line["error"], line["reason"]) for line in lines(path)}
    assert len(notes) == 18 and list(notes) == sorted(notes)
    assert notes[1] == ("schema", "sample 1: age is -1, which is not from 0 to 130")
    assert notes[2] == ("duplicate", "sample 2 is the same as sample 0")
    assert notes[4][0] == "KeyError" and "sample 4: repair failed" in notes[4][1]
    assert notes[6][0] == "ValueError"
    before = path.read_bytes()
    assert clean(ROWS, **rules, quarantine=path).kept.tolist() == [0, 3, 7]
    assert path.read_bytes() == before  # nothing is written twice


@settings(max_examples=40)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.booleans())
def test_the_first_of_those_alike_stays(values: list[int], whole: bool) -> None:
    found = clean([(value, 0) for value in values], unique_by="all" if whole else first)
    assert [sample[0] for sample in iter(found)] == list(dict.fromkeys(values))


def first(sample: Any) -> int:
    return int(sample[0])


def test_it_is_found_again_and_only_if_nothing_changed(cache: Path) -> None:
    looked: list[int] = []

    class Named:
        name = "first"

        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> Any:
            looked.append(index)
            return range(20)[index]

        def identity(self) -> str:
            return self.name

    def odd(value: int) -> bool:
        return value % 2 == 1

    source = Named()
    assert clean(source, keep=odd).kept.tolist() == list(range(1, 20, 2))
    assert len(looked) == 20 and len(list(cache.iterdir())) == 1
    assert clean(source, keep=odd).kept.tolist() == list(range(1, 20, 2)) and len(looked) == 20
    clean(source, keep=lambda value: value % 2 == 0)
    assert len(looked) == 40
    source.name = "second"
    clean(source, keep=odd)
    assert len(looked) == 60
    clean(source, keep=odd, identity="mine")
    clean(source, keep=lambda value: value == 5, identity="mine")  # as was promised
    assert len(looked) == 80


def test_a_source_that_has_no_name_is_looked_at_anew(cache: Path) -> None:
    class Nameless(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            return range(3)[index]

    for workers in (1, 2):
        assert list(iter(clean(Nameless(), keep=bool, workers=workers))) == [1, 2]
    assert not cache.exists()


def test_take_vary_and_order(tmp_path: Path) -> None:
    plain = tensors(torch.arange(20.0), torch.arange(20))

    def large(sample: Any) -> bool:
        return bool(sample[1] >= 12)

    found = clean(plain, keep=large)
    assert isinstance(found, BatchSource) and not isinstance(found, EpochSource)
    assert found.take(np.array([0, 7]))[1].tolist() == [12, 19]
    assert not isinstance(clean(plain, keep=large, repair=tuple), BatchSource)

    def shaken(sample: Any, random: Random) -> Any:
        return sample[0] + random.random(), sample[1]

    source = mapped(plain, shaken)
    varied = clean(source, keep=large)
    assert isinstance(varied, EpochSource)
    assert varied.vary(1, Pass(3, 4)) == source.vary(13, Pass(3, 4))
    assert not hasattr(found, "order")
    assert isinstance(clean(in_order(plain), keep=large).order, Sequential)
    with pytest.raises(UsageError, match="Choose and clean first"):
        clean(weighted(plain, [1.0] * 20), keep=large)


def test_blocks_and_lengths_follow_what_is_left() -> None:
    plain = [(index, 0) for index in range(30)]

    def kept(sample: Any) -> bool:
        return bool(sample[0] % 3 == 0 and not 10 <= sample[0] < 20)

    found = clean(View(plain, BlockShuffled([10, 10, 5, 5], window=1)), keep=kept)
    ids = found.order.ids(np.arange(len(found)), 1, 0)
    assert sorted(ids.tolist()) == list(range(len(found)))
    groups = [found[int(index)][0] // 10 + (found[int(index)][0] >= 25) for index in ids]
    assert sum(a != b for a, b in pairwise(groups)) == len(set(groups)) - 1
    bucketed = clean(by_length(plain, [s[0] for s in plain], 2), keep=kept)
    assert isinstance(bucketed.order, Bucketed) and len(bucketed.order) == len(bucketed)
    batches = Batches(bucketed, batch_size=2)
    for step in range(batches.steps_per_epoch):
        values = batches.at(step).piece(0).inputs
        assert abs(int(values[0]) - int(values[1])) <= 15


def test_without_a_quarantine_the_first_bad_sample_is_an_error() -> None:
    with pytest.raises(RecipeError, match=r"sample 4: repair failed.*Name a quarantine file"):
        clean(ROWS, repair=repair)
    with pytest.raises(RecipeError, match="sample 1: age is -1"):
        clean(ROWS, schema={"age": (0, 130)})
    with pytest.raises(RecipeError, match="sample 0: keep or unique_by failed: KeyError"):
        clean(ROWS[4:5] * 5, keep=adult)


def test_a_rule_that_fails_is_not_the_samples_fault(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="keep or unique_by failed"):
        clean(ROWS, keep=adult, quarantine=tmp_path / "bad.jsonl")
    with pytest.raises(RecipeError, match=r"unique_by failed.*cannot be kept as bytes"):
        clean(ROWS, unique_by=lambda row: object())


def test_a_server_that_is_gone_is_not_the_samples_fault(tmp_path: Path) -> None:
    class Gone(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            raise ConnectionError("gone")

    with pytest.raises(ShoalError, match="sample 0 was not reached: ConnectionError"):
        clean(Gone([1, 2]), quarantine=tmp_path / "bad.jsonl")


@pytest.mark.parametrize("error", [ConnectionError("gone"), TimeoutError(), MemoryError()])
def test_an_outage_in_repair_is_not_kept_as_a_verdict(
    tmp_path: Path, cache: Path, error: Exception
) -> None:
    is_down = [True]

    def asked(row: Any) -> Any:
        if is_down[0] and row["name"] == "zed":
            raise error
        return row

    bad = tmp_path / "bad.jsonl"
    with pytest.raises(ShoalError, match="sample 7 was not reached") as caught:
        clean(ROWS, repair=asked, quarantine=bad, identity="asked")
    assert not isinstance(caught.value, RecipeError) and not bad.exists()
    is_down[0] = False
    assert len(clean(ROWS, repair=asked, quarantine=bad, identity="asked")) == len(ROWS)


def test_a_change_in_a_repaired_sample_is_met_when_it_is_loaded() -> None:
    rows = [{"age": 1}, {"age": 2}]
    found = clean(rows, repair=repair)
    rows[1]["age"] = "x"  # type: ignore[assignment]
    with pytest.raises(RecipeError, match="sample 1: repair failed: ValueError"):
        found[1]
    with pytest.raises(IndexError):
        found[2]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "no rule"),
        ({"unique_by": "name"}, "function from a sample"),
        ({"schema": 5}, "is no schema"),
        ({"keep": lambda row: False}, "left none of 24 samples: 0 kept, .* 24 dropped"),
    ],
)
def test_what_cannot_be_cleaned_is_said(arguments: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        clean(ROWS, **arguments)
    with pytest.raises(UsageError, match="empty source"):
        clean([], keep=bool)
