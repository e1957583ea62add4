"""The finished model as one safetensors file, with canonical names and no metadata.

Equal weights give equal bytes, so two runs can be compared with `cmp`. Where ranks hold parts,
each sends what no lower rank holds to the one that writes.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from shoal.checkpoint.chunks import Held, Placed, header
from shoal.checkpoint.manifest import ITEM_BYTES
from shoal.checkpoint.save import held_by_all, listed
from shoal.checkpoint.snapshot import PART_BYTES
from shoal.checkpoint.types import bytes_of, first_names, name_of_type, why_not
from shoal.comm.collectives import Group
from shoal.faults import faultpoint
from shoal.parallel.boxes import pieces, whole_box
from shoal.parallel.layout import Slice
from shoal.storage.files import replacing
from shoal.sync.stretches import room
from shoal.sync.touched import TOUCHED, joined


def canonical_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The model's state by name; a tensor shared under several names keeps its first."""
    state = model.state_dict()
    kept = {name: state[name].detach() for name in first_names(model).values()}
    # What no file can hold is told by name when it is written.
    return {name: t if why_not(t) else t.cpu().contiguous() for name, t in kept.items()}


def gather_model(
    world: Group, model: nn.Module, held: Mapping[str, Sequence[Slice]]
) -> dict[str, Tensor]:
    """The state of a model that ranks hold parts of, on rank 0; nothing on the others.

    Every rank must call it.
    """
    names = set(model.state_dict())
    if world.num_ranks > 1:  # with a deadline for slow disks and large tensors
        world = world.part(range(world.num_ranks))
    kept = {n: parts for n, parts in held.items() if n in names or n.startswith(TOUCHED)}
    own = dict(listed(kept, lambda dtype: str(dtype).removeprefix("torch.")))
    whole: dict[str, Tensor] = {}
    known: set[Held] = set()
    for rank, parts in enumerate(held_by_all(world, list(own))):
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
                    whole[part.name] = room(part.whole, values.dtype)
                part.box.of(whole[part.name]).copy_(values)
            elif world.rank == rank:
                world.send(own[part].contiguous(), 0)
    return joined(whole)


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write the file whole or not at all."""
    for name, tensor in tensors.items():
        if why := why_not(tensor):
            raise SafetensorError(f"{name} is {why}, which no such file can hold")
    with replacing(path) as partial:
        with partial.open("wb") as file:
            file.writelines(_contents(tensors))
        faultpoint("model.written")


def _contents(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """What such a file is made of, as `safetensors` writes it, a little at a time."""
    held = [
        Held(name, name_of_type(t.dtype), tuple(t.shape), whole_box(t.shape))
        for name, t in tensors.items()
    ]
    ends = [0]
    for one in (held := sorted(held, key=lambda one: (-ITEM_BYTES[one.dtype], one.name))):
        ends.append(ends[-1] + one.num_bytes)
    yield header([Placed(one, *span) for one, span in zip(held, pairwise(ends), strict=True)])
    for one in held:
        for box in pieces(one.box, PART_BYTES // ITEM_BYTES[one.dtype]):
            yield bytes_of(box.of(tensors[one.name]))
