"""Statistics have the same bits however the work is divided, and are right."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.sources import tensors
from shoal.data.transforms import jobs
from shoal.data.transforms.mapping import mapped
from shoal.data.transforms.statistics import (
    PartialStatistics,
    Statistics,
    axes_of,
    load_statistics,
    measure,
    merge_statistics,
    statistics,
)
from shoal.errors import RecipeError, UsageError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "transforms"


def pairs(num: int = 700, dtype: torch.dtype = torch.float32) -> Any:
    random = np.random.default_rng(0)
    inputs = torch.from_numpy(random.lognormal(1, 2, (num, 3, 5))).to(dtype)
    return tensors(inputs, torch.arange(num))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8, torch.bfloat16])
def test_they_are_right(dtype: torch.dtype) -> None:
    source = pairs(dtype=dtype)
    values = source.inputs.double().numpy()
    found = statistics(source, {"inputs": 0, "target": None})
    of = found.fields["inputs"]
    np.testing.assert_allclose(of.mean, values.mean(axis=(0, 2)), rtol=1e-12)
    np.testing.assert_allclose(of.std, values.std(axis=(0, 2)), rtol=1e-10)
    assert of.low == values.min(axis=(0, 2)).tolist()
    assert of.high == values.max(axis=(0, 2)).tolist()
    assert of.count == 700 * 5 and found.num_samples == 700
    assert found.fields["target"].mean == [349.5]


def test_a_small_spread_far_from_zero_is_not_lost() -> None:
    values = torch.tensor([1e9, 1e9 + 1, 1e9 + 2, 1e9 + 3], dtype=torch.float64)
    of = statistics(tensors(values, values), ["inputs"]).fields["inputs"]
    assert of.std == [np.sqrt(1.25)]


@settings(max_examples=25)
@given(st.lists(st.integers(0, 60), max_size=5), st.randoms())
def test_any_division_in_any_order_gives_the_same_bits(cuts: list[int], random: Any) -> None:
    source = pairs(60, torch.float64)
    axes = axes_of({"inputs": -1})
    whole = merge_statistics(iter([measure(source, axes, range(60), True)]), [0.5])
    edges = [0, *sorted(cuts), 60]
    parts = [measure(source, axes, range(a, b), True).packed() for a, b in pairwise(edges)]
    random.shuffle(parts)
    assert merge_statistics(map(PartialStatistics.of, parts), [0.5]) == whole


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_any_number_of_workers_gives_the_same_bits(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "_LEAST_SHARE", 50)
    expected = merge_statistics(iter([measure(pairs(), {"inputs": 0}, range(700))]))
    assert statistics(pairs(), {"inputs": 0}, workers=workers) == expected


@pytest.mark.parametrize("share", [0.0, 0.01, 0.25, 0.5, 0.9, 1.0])
def test_quantiles_are_near(share: float) -> None:
    source = pairs()
    signs = torch.where(torch.arange(700) % 3 == 0, -1.0, 1.0).view(-1, 1, 1)
    source = tensors(source.inputs * signs, source.target)
    found = statistics(source, {"inputs": 0}, quantiles=[share]).fields["inputs"].quantiles
    values = source.inputs.double().transpose(0, 1).reshape(3, -1).sort().values
    exact = values[:, int(share * (values.shape[1] - 1))]
    np.testing.assert_allclose(found[repr(share)], exact, rtol=0.002)


def test_they_are_measured_once_and_kept(cache: Path) -> None:
    looked: list[int] = []

    class Counting(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            looked.append(index)
            return super().__getitem__(index)

    source = Counting([(float(number), 0) for number in range(10)])
    first = statistics(source, ["inputs"])
    assert len(looked) == 10 and len(list(cache.iterdir())) == 1
    assert statistics(source, ["inputs"]) == first and len(looked) == 10
    source[3] = (100.0, 0)
    assert statistics(source, ["inputs"]).fields["inputs"].high == [100.0]


def test_a_source_without_a_name_is_measured_anew_unless_one_is_given(cache: Path) -> None:
    class Nameless:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return float(range(3)[index]), 0

    expected = statistics(Nameless(), ["inputs"])
    assert not cache.exists()
    assert statistics(Nameless(), ["inputs"], identity="three") == expected
    assert len(list(cache.iterdir())) == 1


def test_they_are_saved_and_loaded(tmp_path: Path) -> None:
    found = statistics(pairs(), {"inputs": 0}, quantiles=(0.1, 0.9))
    path = tmp_path / "deep" / "statistics.json"
    found.save(path)
    assert load_statistics(path) == found
    for content in (b"", b"{}", b"[1", b'{"num_samples": 1, "fields": {"a": {}}}', b"\xff"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="holds no statistics"):
            load_statistics(path)
    odd = found.fields["inputs"]
    Statistics(1, {"a": type(odd)(0, 1, [1.0], [1.0, 2.0], [0.0], [1.0])}).save(path)
    with pytest.raises(UsageError, match="'a' has entries that do not fit"):
        load_statistics(path)
    with pytest.raises(UsageError, match="cannot be read"):
        load_statistics(tmp_path / "none.json")
    with pytest.raises(UsageError, match="cannot be written"):
        found.save(path / "below-a-file")


@pytest.mark.parametrize(
    ("samples", "fields", "words"),
    [
        ([({"a": 1.0}, 0), ({"a": float("nan")}, 0)], ["inputs.a"], "sample 1 .*not finite"),
        ([(1.0, 0), ("x", 0)], ["inputs"], "sample 1 .*no number"),
        ([(1.0, 0)], ["input"], "sample 0 .*no field 'input'"),
        ([(1.0, 0)], {"inputs": 0}, "sample 0 .*0 dims"),
        ([(np.zeros(2), 0), (np.zeros(3), 0)], {"inputs": 0}, "sample 1 .*3 along dim 0, others 2"),
        ([(np.zeros(0), 0)], ["inputs"], "no numbers in any sample"),
        ([(1e300, 0)], ["inputs"], "larger than"),
    ],
)
def test_what_cannot_be_measured_is_named(samples: Any, fields: Any, words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        statistics(samples, fields)


@pytest.mark.parametrize(
    ("fields", "quantiles", "words"),
    [("inputs", (), r"\['inputs'\]"), ([], (), "empty"), (["inputs"], (2.0,), "from 0 to 1")],
)
def test_what_was_asked_wrongly_is_refused(fields: Any, quantiles: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        statistics([(1.0, 0)], fields, quantiles=quantiles)
    with pytest.raises(UsageError, match="empty source"):
        statistics([], ["inputs"])


def test_what_a_function_made_is_measured() -> None:
    source = mapped([{"a": 1, "b": 0}, {"a": 3, "b": 0}], lambda row: (row["a"], row["b"]))
    assert statistics(source, ["inputs"]).fields["inputs"].mean == [2.0]
