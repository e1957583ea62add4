"""Normalised fields have mean 0 and deviation 1; one by one and many at once give the same bits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.data.collating import collate_samples, load_collated
from shoal.data.sources import BatchSource, EpochSource, Pass, tensors
from shoal.data.transforms.mapping import mapped
from shoal.data.transforms.normalizing import normalized, save_run_statistics
from shoal.data.transforms.randomness import on
from shoal.data.transforms.statistics import load_statistics, statistics
from shoal.errors import RecipeError, UsageError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))


def pairs(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    inputs = (torch.randn(50, 3, 4).mul_(20).add_(100)).to(dtype)
    return tensors({"image": inputs, "other": inputs}, torch.arange(50).double())


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.uint8, torch.int64, torch.bfloat16]
)
def test_mean_and_deviation(dtype: torch.dtype) -> None:
    source = normalized(pairs(dtype), {"inputs.image": 0, "target": None})
    assert isinstance(source, BatchSource) and not isinstance(source, EpochSource)
    inputs, target = source.take(np.arange(50))
    image = inputs["image"]
    assert image.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.allclose(image.mean((0, 2)), torch.zeros(3, dtype=image.dtype), atol=1e-5)
    assert torch.allclose(image.std((0, 2), correction=0), torch.ones(3, dtype=image.dtype))
    assert inputs["other"].dtype == dtype
    assert abs(target.mean()) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8, torch.int64])
def test_many_at_once_are_the_same_bits(dtype: torch.dtype) -> None:
    for axis, to in ((None, "standard"), (0, "range"), (-1, "standard"), (0, "standard")):
        check_bits(dtype, axis, to)


def check_bits(dtype: torch.dtype, axis: int | None, to: Any) -> None:
    source = normalized(pairs(dtype), {"inputs.image": axis, "target": None}, to=to)
    ids = np.array([3, 49, 0, 3])
    taken = load_collated(source, ids, None)
    collated = collate_samples([source[int(index)] for index in ids])
    assert torch.equal(taken[0]["image"], collated[0]["image"])
    assert torch.equal(taken[1], collated[1])


def test_numbers_and_arrays() -> None:
    rows = [
        {"a": 1, "b": 2.0, "c": np.array([1, 2], np.uint8)},
        {"a": 3, "b": 4.0, "c": np.ones(2)},
    ]
    rows[0]["c"].flags.writeable = False
    found = normalized(rows, ["a", "b", "c"], to="range")
    assert found[0]["a"].dtype == torch.float32 and found[0]["a"] == 0 and found[1]["a"] == 1
    assert found[1]["b"] == 1.0 and isinstance(found[1]["b"], float)
    assert found[0]["c"].dtype == np.float32 and found[1]["c"].dtype == np.float64
    assert rows[0]["a"] == 1 and rows[0]["c"].tolist() == [1, 2]


def test_whole_numbers_beyond_float32_are_scaled_first() -> None:
    values = torch.tensor([2**40, 2**40 + 1])
    source = normalized(tensors(values, values), ["inputs"])
    assert source.take(np.arange(2))[0].tolist() == [-1.0, 1.0]


def test_a_constant_column_becomes_zero() -> None:
    source = normalized([(5.0, 0), (5.0, 0)], ["inputs"])
    assert source[0] == (0.0, 0)


def test_given_statistics_are_used(tmp_path: Path) -> None:
    of = statistics([(0.0, 1), (2.0, 1)], ["inputs"])
    assert normalized([(5.0, 1)], statistics=of)[0] == (4.0, 1)
    of.save(tmp_path / "of.json")
    source = normalized([(5.0, 1)], ["inputs"], str(tmp_path / "of.json"))
    assert source[0] == (4.0, 1) and source.statistics == of


def test_varied_samples_are_scaled_too() -> None:
    shaken = mapped([(1.0, 0), (3.0, 0)], on("inputs", lambda value, random: value + 1))
    source = normalized(shaken, statistics=statistics([(1.0, 0), (3.0, 0)], ["inputs"]))
    assert isinstance(source, EpochSource) and source.vary(1, Pass(0, 0))[0] == 2.0
    assert len(list(iter(source))) == 2


def test_what_is_wrong_is_said() -> None:
    of = statistics([(np.zeros(3), 1)], {"inputs": 0})
    with pytest.raises(UsageError, match="neither fields nor statistics"):
        normalized([(1.0, 0)])
    with pytest.raises(UsageError, match=r"no statistics of 'input'.*'inputs'"):
        normalized([(1.0, 0)], ["input"], of)
    with pytest.raises(UsageError, match=r"along dim None, and its statistics .* along dim 0"):
        normalized([(np.zeros(3), 0)], {"inputs": None}, of)
    for useless in ({"workers": 2}, {"identity": "mine"}):
        with pytest.raises(UsageError, match=r"have no effect\. Leave them out"):
            normalized([(np.zeros(3), 0)], ["inputs"], of, **useless)
    with pytest.raises(UsageError, match="'standard'"):
        normalized([(1.0, 0)], ["inputs"], to="standart")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"sample 1 .*shape \[2\].*3 along dim 0"):
        normalized([(np.zeros(3), 0), (np.zeros(2), 0)], statistics=of)[1]
    with pytest.raises(RecipeError, match=r"sample 0 .*a str, which is no number"):
        normalized([("x", 0)], statistics=of)[0]


def test_statistics_of_all_layers_are_kept_for_a_run(tmp_path: Path) -> None:
    below = normalized(pairs(torch.float32), {"inputs.image": 0})
    source = mapped(normalized(below, {"target": None}), lambda sample: sample)
    save_run_statistics(source, tmp_path)
    kept = [load_statistics(tmp_path / f"statistics{end}.json") for end in ("", "-2")]
    assert [list(found.fields) for found in kept] == [["target"], ["inputs.image"]]
    assert kept[1] == below.statistics
