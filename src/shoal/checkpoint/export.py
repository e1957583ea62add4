"""The finished model as one safetensors file, with canonical names and no metadata.

Equal weights give equal bytes, so two runs can be compared with `cmp`. Where ranks hold parts,
each sends what no lower rank holds to the one that writes.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from shoal.checkpoint.dealing import Held
from shoal.checkpoint.types import why_not
from shoal.comm.collectives import Group
from shoal.faults import faultpoint
from shoal.parallel.boxes import Box
from shoal.parallel.layout import Slice
from shoal.sync.state import share_bytes


def canonical_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's state by name; a tensor shared under several names keeps its first."""
    kept: dict[str, Tensor] = {}
    seen: set[tuple[int, int, tuple[int, ...]]] = set()
    for name, tensor in model.state_dict().items():
        if why_not(tensor):
            kept[name] = tensor.detach()  # to be told by name when it is written
            continue
        place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tuple(tensor.shape))
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        kept[name] = tensor.detach().cpu().contiguous()
    return kept


def gather_model(
    world: Group, model: nn.Module, held: Mapping[str, Sequence[Slice]]
) -> dict[str, Tensor]:
    """The state of a model that ranks hold parts of, on rank 0; nothing on the others.

    Every rank must call it.
    """
    names = set(model.state_dict())
    world = world.part(range(world.num_ranks))  # with a deadline for slow disks and large tensors
    own = {
        Held(
            name,
            str(s.tensor.dtype).removeprefix("torch."),
            s.global_shape,
            Box(s.offset, tuple(s.tensor.shape)),
        ): s.tensor
        for name, slices in held.items()
        if name in names
        for s in slices
    }
    listed = [
        msgspec.msgpack.decode(
            share_bytes(world, rank, msgspec.msgpack.encode(list(own))), type=list[Held]
        )
        for rank in range(world.num_ranks)
    ]
    whole: dict[str, Tensor] = {}
    known: set[Held] = set()
    for rank, parts in enumerate(listed):
        for part in parts:
            if part in known:
                continue
            known.add(part)
            if world.rank == 0:
                values = own.get(part)
                if values is None:
                    values = torch.empty(part.box.shape, dtype=getattr(torch, part.dtype))
                    world.receive(values, rank)
                if part.name not in whole:
                    whole[part.name] = torch.empty(part.whole, dtype=values.dtype)
                part.box.of(whole[part.name]).copy_(values)
            elif world.rank == rank:
                world.send(own[part].contiguous(), 0)
    return whole


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write the file whole or not at all."""
    for name, tensor in tensors.items():
        if why := why_not(tensor):
            raise SafetensorError(f"{name} is {why}, which no such file can hold")
    partial = path.with_name(path.name + ".partial")
    try:
        save_file(dict(tensors), partial)
        faultpoint("model.written")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
