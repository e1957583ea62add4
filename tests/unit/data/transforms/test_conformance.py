"""Sources made of sources keep the promises of a source, and ask for many records at once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data.batches import Batches
from shoal.data.readers.records import BulkSource
from shoal.data.sources import BatchSource, Ids, tensors
from shoal.data.transforms.cleaning import clean
from shoal.data.transforms.mapping import mapped
from shoal.data.transforms.normalizing import normalized
from shoal.data.transforms.quarantine import quarantine
from shoal.data.transforms.randomness import Random, on
from shoal.data.transforms.statistics import statistics
from shoal.errors import RecipeError
from shoal.testing.sources import Case, SourceConformance


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


class Rows:
    """Records that are counted by the question, as those of a server."""

    def __init__(self, count: int = 9, bad: int | None = None):
        self.count, self.bad = count, bad
        self.questions: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.many(np.array([range(self.count)[index]]))[0]

    def many(self, ids: Ids) -> list[Any]:
        self.questions.append(len(ids))
        if self.bad in ids:
            raise RecipeError(f"record {self.bad} is bad")
        if any(not 0 <= index < self.count for index in ids):
            raise IndexError(ids)
        return [{"x": float(index), "y": int(index) % 3} for index in ids]

    def identity(self) -> str:
        return f"rows {self.count}"


def pair(row: Any) -> Any:
    return torch.tensor(row["x"]), row["y"]


def not_last(row: Any) -> bool:
    return bool(row["x"] < 8)


def shaken(value: Any, random: Random) -> Any:
    return value + float(random.random())


PAIRS = [(torch.tensor(float(index)), index % 3) for index in range(9)]


class TestMapped(SourceConformance):
    @pytest.fixture
    def case(self) -> Case:
        return Case(lambda: mapped(Rows(), pair), PAIRS)


class TestDrawn(SourceConformance):
    @pytest.fixture
    def case(self) -> Case:
        def make() -> Any:
            return mapped(mapped(Rows(), pair), on("inputs", shaken))

        return Case(make, [make()[index] for index in range(9)])


class TestCleaned(SourceConformance):
    @pytest.fixture
    def case(self) -> Case:
        return Case(lambda: mapped(clean(Rows(), keep=not_last), pair), PAIRS[:8])


class TestCleanedTensors(SourceConformance):
    @pytest.fixture
    def case(self) -> Case:
        values = torch.arange(9.0)
        expected = [(value, value) for value in values[:8]]
        return Case(lambda: clean(tensors(values, values), keep=lambda s: s[0] < 8), expected)


class TestNormalized(SourceConformance):
    @pytest.fixture
    def case(self) -> Case:
        expected = [(torch.tensor(index / 8), index % 3) for index in range(9)]
        return Case(lambda: normalized(mapped(Rows(), pair), ["inputs"], to="range"), expected)


class TestQuarantined(SourceConformance):
    @pytest.fixture
    def case(self, tmp_path: Path) -> Case:
        return Case(lambda: quarantine(mapped(Rows(), pair), tmp_path / "bad.jsonl"), PAIRS)


def test_a_batch_of_records_is_one_question() -> None:
    rows = Rows(64)
    source: Any = clean(rows, schema={"x": (0, 100)})
    assert rows.questions == [64]
    source = normalized(mapped(source, pair), ["inputs"])
    assert rows.questions == [64, 64] and isinstance(source, BatchSource | BulkSource)
    batch = Batches(source, batch_size=16).at(0).piece(0)
    assert rows.questions[2:] == [16] and batch.num_samples == 16


def test_of_many_the_one_that_fails_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="record 5 is bad"):
        clean(Rows(bad=5), keep=not_last)
    found = clean(Rows(bad=5), quarantine=tmp_path / "bad.jsonl")
    assert found.kept.tolist() == [0, 1, 2, 3, 4, 6, 7, 8]
    with pytest.raises(RecipeError, match="sample 5 cannot be measured: record 5"):
        statistics(Rows(bad=5), ["x"], identity="another")
