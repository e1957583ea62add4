"""Collates of one's own and of transformers: what they may return, write to, and draw from."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal.data.batches import Batches, LoadOptions
from shoal.errors import RecipeError, UsageError

ROWS = [{"input_ids": torch.tensor([i, i]), "label": i} for i in range(24)]


def collated(collate: Any, num_pieces: int = 2, step: int = 0, **changes: Any) -> list[Any]:
    loading = LoadOptions(collate)
    batch = Batches(ROWS, batch_size=8, num_pieces=num_pieces, loading=loading, **changes).at(step)
    return [batch.piece(index) for index in range(num_pieces)]


def drawing(rows: list[Any]) -> tuple[Any, Any]:
    drawn = [torch.rand(()).item(), float(np.random.rand()), random.random()]
    return torch.tensor(drawn, dtype=torch.float64), torch.stack([r["input_ids"] for r in rows])


def test_labels_are_the_target_and_the_rest_the_inputs() -> None:
    default = pytest.importorskip("transformers").default_data_collator
    piece, _ = collated(default)
    assert set(piece.inputs) == {"input_ids"}
    assert piece.inputs["input_ids"][:, 0].tolist() == piece.target.tolist() == piece.ids.tolist()


def test_a_dict_without_labels_is_refused() -> None:
    with pytest.raises(RecipeError, match="must be a pair"):
        collated(lambda rows: {"input_ids": torch.zeros(1)})


def test_a_collate_may_write_to_its_rows() -> None:
    def greedy(rows: list[Any]) -> Any:
        return torch.tensor([row.pop("label") for row in rows]), torch.zeros(len(rows))

    assert collated(greedy)[0].inputs.tolist() == collated(greedy)[0].inputs.tolist()


def test_draws_follow_from_seed_pass_and_samples() -> None:
    once, again = collated(drawing), collated(drawing)
    for piece, same in zip(once, again, strict=True):
        assert torch.equal(piece.inputs, same.inputs)
    assert not torch.equal(once[0].inputs, once[1].inputs)
    assert not torch.equal(once[0].inputs, collated(drawing, seed=1)[0].inputs)
    assert not torch.equal(once[0].inputs, collated(drawing, step=3)[0].inputs)


def test_draws_in_a_collate_leave_no_trace() -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    expected = torch.rand(()).item(), float(np.random.rand()), random.random()
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    collated(drawing)
    assert (torch.rand(()).item(), float(np.random.rand()), random.random()) == expected


def test_bad_rows_are_left_out_before_they_are_collated(tmp_path: Any) -> None:
    def check(row: Any) -> Any:
        if row["label"] == 3:
            raise ValueError("bad")
        return row

    rows = shoal.data.quarantine(shoal.data.mapped(ROWS, check), tmp_path / "bad.jsonl")
    batches = Batches(rows, batch_size=24, loading=LoadOptions(drawing))
    assert sorted(batches.at(0).piece(0).target[:, 0].tolist()) == [*range(3), *range(4, 24)]


def test_a_collator_with_a_seed_of_its_own_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    from tests.parity.streamed import tokenizer

    with pytest.raises(UsageError, match=r"DataCollatorForLanguageModeling\(seed=7\) draws from"):
        shoal.Run(
            model=lambda: nn.Linear(1, 1),
            loss=shoal.losses.labels,
            optimizer=torch.optim.SGD,
            data=ROWS,
            collate=transformers.DataCollatorForLanguageModeling(tokenizer(), seed=7),
            batch_size=2,
            steps=1,
        )
