"""A model's answer becomes named columns with a row for each sample."""

from collections import namedtuple

import pytest
import torch

from shoal.errors import RecipeError
from shoal.inference.columns import columns_of, row_of

Pair = namedtuple("Pair", ["mean", "spread"])
ROWS = torch.arange(6.0).view(3, 2)


@pytest.mark.parametrize(
    ("output", "names"),
    [
        (ROWS, ["output"]),
        ((ROWS, ROWS + 1), ["0", "1"]),
        ({"logits": ROWS, "loss": torch.tensor(1.0)}, ["logits"]),
        ({"hidden": [ROWS, ROWS], "cache": object(), "none": None}, ["hidden.0", "hidden.1"]),
        (Pair(ROWS, ROWS), ["mean", "spread"]),
    ],
)
def test_tensors_with_a_row_for_each_sample_are_columns(output: object, names: list[str]) -> None:
    assert list(columns_of(output, 3)) == names


def test_rows() -> None:
    assert row_of(columns_of(ROWS, 3), 1).tolist() == [2, 3]
    assert {n: t.tolist() for n, t in row_of(columns_of((ROWS, ROWS), 3), 0).items()} == {
        "0": [0, 1],
        "1": [0, 1],
    }


@pytest.mark.parametrize("output", [torch.tensor(1.0), ROWS[:2], {}, None, {"sample": ROWS}])
def test_what_has_no_rows_is_refused(output: object) -> None:
    with pytest.raises(RecipeError):
        columns_of(output, 3)
