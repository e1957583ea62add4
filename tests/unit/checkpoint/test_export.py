"""The finished model as one file: each tensor once, and none left out."""

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from shoal.checkpoint.export import canonical_tensors, write_safetensors


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 4))
        self.again = self.first
        self.turned = nn.Parameter(self.first.data.t())  # the same memory, other strides


def test_a_weight_tied_as_its_transpose_is_not_left_out(tmp_path: Path) -> None:
    model = Tied()
    write_safetensors(canonical_tensors(model), tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    assert found.keys() == {"first", "turned"}
    assert torch.equal(found["first"], model.first)
    assert torch.equal(found["turned"], model.first.t())


def test_what_no_file_can_hold_is_told_by_name(tmp_path: Path) -> None:
    model = Tied()
    model.register_buffer("table", torch.eye(3).to_sparse())
    with pytest.raises(SafetensorError, match="table is sparse_coo, not dense"):
        write_safetensors(canonical_tensors(model), tmp_path / "m.safetensors")
    assert not list(tmp_path.iterdir())
