"""Datasets of Hugging Face: their rows and columns, with the types of their features."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data.readers.csv import csv
from shoal.data.readers.huggingface import huggingface
from shoal.data.readers.linewise import jsonl, lines
from shoal.data.readers.records import BadRecord
from shoal.errors import UsageError
from shoal.testing.sources import Case, SourceConformance

datasets = pytest.importorskip("datasets", reason="needs the package datasets")
pytest.importorskip("PIL", reason="needs the extra images")


@pytest.fixture(scope="module")
def dataset() -> Any:
    features = datasets.Features(
        {
            "label": datasets.ClassLabel(names=["a", "b"]),
            "text": datasets.Value("string"),
            "vector": datasets.List(datasets.Value("float64")),
            "grid": datasets.Array2D((2, 3), "float32"),
            "image": datasets.Image(),
            "gaps": datasets.Value("int32"),
        }
    )
    rows = [
        {
            "label": row % 2,
            "text": f"row {row}",
            "vector": [row, row / 2],
            "grid": [[row, 1, 2], [3, 4, 5]],
            "image": np.full((4, 5, 3), row, np.uint8),
            "gaps": row or None,
        }
        for row in range(5)
    ]
    return datasets.Dataset.from_list(rows, features=features)


def pair(row: int) -> tuple[Any, Any]:
    inputs = {
        "pixels": torch.full((4, 5, 3), row, dtype=torch.uint8),
        "grid": torch.tensor([[row, 1, 2], [3, 4, 5]], dtype=torch.float32),
        "vector": torch.tensor([row, row / 2], dtype=torch.float64),
    }
    return inputs, torch.tensor(row % 2)


class TestRows(SourceConformance):
    @pytest.fixture
    def case(self, dataset: Any) -> Case:
        order = [3, 0, 4, 1]  # as a shuffled or filtered dataset has
        expected = [
            {
                "label": row % 2,
                "text": f"row {row}",
                "vector": np.array([row, row / 2]),
                "grid": np.array([[row, 1, 2], [3, 4, 5]], np.float32),
                "image": np.full((4, 5, 3), row, np.uint8),
                "gaps": row or None,
            }
            for row in order
        ]
        return Case(lambda: huggingface(dataset.select(order)), expected)


class TestPairs(SourceConformance):
    @pytest.fixture
    def case(self, dataset: Any) -> Case:
        inputs = {"pixels": "image", "grid": "grid", "vector": "vector"}
        return Case(
            lambda: huggingface(dataset.with_format("torch")).pairs(inputs, "label"),
            [pair(row) for row in range(5)],
        )


def test_what_is_no_dataset_is_refused(dataset: Any) -> None:
    both = datasets.DatasetDict({"train": dataset, "test": dataset})
    with pytest.raises(UsageError, match=r"the splits train, test. Give one .* dataset\['train'\]"):
        huggingface(both)
    with pytest.raises(UsageError, match="given a IterableDataset"):
        huggingface(dataset.to_iterable_dataset())
    with pytest.raises(UsageError, match="given a list"):
        huggingface([1, 2])
    with pytest.raises(UsageError, match="set_transform"):
        huggingface(dataset.with_transform(lambda batch: batch))
    with pytest.raises(UsageError, match=r"no column 'txt'. Did you mean 'text'"):
        huggingface(dataset, columns=["txt"])
    with pytest.raises(UsageError, match=r"'text' of the dataset .* holds string"):
        huggingface(dataset).pairs("text", "label")


def test_irregular_values_are_named(dataset: Any) -> None:
    with pytest.raises(BadRecord, match=r"sample 0\): a value is null"):
        huggingface(dataset).pairs("gaps", "label").take(np.array([1, 0]))
    rows = [{"image": {"bytes": b"no image", "path": None}, "y": 1}]
    features = datasets.Features({"image": datasets.Image(), "y": datasets.Value("int64")})
    bad = huggingface(datasets.Dataset.from_list(rows, features=features))
    with pytest.raises(BadRecord, match=r"sample 0\): column 'image' cannot be decoded"):
        bad[0]


def test_empty_columns_and_identity(dataset: Any) -> None:
    assert len(huggingface(dataset.select([]))) == 0
    some = huggingface(dataset, columns=["text", "label"])
    assert some[1] == {"text": "row 1", "label": 1}
    assert some.identity() != huggingface(dataset).identity()
    assert huggingface(dataset.select([1])).identity() != huggingface(dataset).identity()


def test_want_of_memory_is_no_fault_of_a_row(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(datasets.Image, "decode_example", fail)
    with pytest.raises(MemoryError):
        huggingface(dataset)[0]


@pytest.mark.full
def test_why_datasets_is_not_used_for_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives other samples than the file holds; ours give those, or name the row."""
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # or a thread of it stays

    def found(kind: str, content: str) -> list[dict[str, Any]]:
        path = tmp_path / f"a.{kind}"
        path.write_bytes(content.encode())
        where = {"data_files": str(path), "cache_dir": str(tmp_path / "cache")}
        rows: list[dict[str, Any]] = datasets.load_dataset(kind, split="train", **where).to_list()
        return rows

    assert found("csv", "a,b\n007,1\n3\n") == [{"a": 7, "b": 1}, {"a": 3, "b": None}]
    rows = csv(tmp_path / "a.csv")
    assert rows[0] == {"a": "007", "b": "1"}
    with pytest.raises(BadRecord, match=r"a\.csv, line 3 \(sample 1\): 1 fields"):
        rows[1]
    assert found("json", '{"a": 1}\n{"b": "x"}\n')[1] == {"a": None, "b": "x"}
    assert jsonl(tmp_path / "a.json")[1] == {"b": "x"}
    assert [row["text"] for row in found("text", "10 %\r20 %\n")] == ["10 %", "20 %"]
    assert list(lines(tmp_path / "a.text")) == ["10 %\r20 %"]
