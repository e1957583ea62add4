"""The finished model as one safetensors file, with canonical names and no metadata.

Equal weights give equal bytes, so two runs can be compared with `cmp`.
"""

import os
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn


def canonical_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's state by name; a tensor shared under several names keeps its first."""
    kept: dict[str, Tensor] = {}
    seen: set[tuple[int, int, tuple[int, ...]]] = set()
    for name, tensor in model.state_dict().items():
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape))
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        kept[name] = tensor.detach().cpu().contiguous()
    return kept


def write_model(model: nn.Module, path: Path) -> None:
    """Write the file whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    save_file(canonical_tensors(model), partial)
    os.replace(partial, path)
