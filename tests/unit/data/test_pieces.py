"""Pieces of a source in order, loaded before their turn."""

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.data.batches import LoadOptions
from shoal.data.pieces import pieces_in_order
from shoal.data.transforms.quarantine import quarantine
from shoal.errors import RecipeError


class Told:
    """Samples that say who loaded them."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Any:
        if index == 6:
            raise ValueError("broken")
        return torch.tensor(index), torch.tensor(os.getpid())


def children() -> list[str]:
    here = os.getpid()
    return Path(f"/proc/{here}/task/{here}/children").read_text().split()


@pytest.mark.parametrize("loaders", [0, 2])
def test_the_same_pieces_with_any_number_of_loaders(tmp_path: Path, loaders: int) -> None:
    before = children()
    source = quarantine(Told(), tmp_path / "bad.jsonl")
    pieces = pieces_in_order(source, 3, LoadOptions(loaders=loaders))
    indices = [5, *range(8), 0, 0]
    found = list(pieces.ahead(indices))
    assert [piece.inputs.tolist() for piece in found] == [
        [i for i in range(3 * at, min(3 * at + 3, 23)) if i != 6] for at in indices
    ]
    here = {int(pid) for piece in found for pid in piece.target} == {os.getpid()}
    assert here == (not loaders)
    assert children() == before


def test_loaders_end_with_the_pieces_that_were_left(tmp_path: Path) -> None:
    before = children()
    pieces = pieces_in_order(Told(), 3, LoadOptions(loaders=2))
    with closing(pieces.ahead(range(8))) as loaded:
        assert next(loaded).num_samples == 3
        assert len(children()) == len(before) + 2
    assert children() == before
    with pytest.raises(RecipeError, match="sample 6 of 23 failed: ValueError: broken"):
        list(pieces.ahead(range(8)))
    assert children() == before
