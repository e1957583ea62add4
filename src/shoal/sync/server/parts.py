"""Parts of a model that have servers of their own, where a replica is a mesh of ranks.

A rank pushes and pulls what it holds of the model: its stage, its part of each matrix. Of the ranks
of a replica that hold the same, the first speaks with the servers of that part, as a worker among
those of the other replicas, and hands what it pulls to the others. A server's optimizer steps on
parts just as a rank's does.

Cost: of a replica, one push and one pull of the model; the weights once more, to its other ranks.
"""

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from shoal.comm.collectives import Group
from shoal.comm.mesh import Mesh
from shoal.numerics.optimizers import ParameterPart, swap_parameters
from shoal.parallel.layout import WHOLE, LocalLayout, part_of
from shoal.parallel.pipeline.stages import rank_of_stage
from shoal.plans.plan import Plan

if TYPE_CHECKING:
    from shoal.parallel.apply import Survey


def line_of(mesh: Mesh) -> Mesh:
    """This rank and its peers, each as a replica of its own, with the servers of their part."""
    assert mesh.servers is not None
    part = mesh.tensor.rank + mesh.tensor.num_ranks * mesh.pipeline.rank
    num_parts = mesh.tensor.num_ranks * mesh.pipeline.num_ranks
    servers = mesh.servers._replace(addresses=mesh.servers.addresses[part::num_parts])
    sizes = tuple(s._replace(num_servers=s.num_servers // num_parts) for s in mesh.sizes)
    alone = Group(is_lost=mesh.world.is_lost)
    line = mesh._replace(
        data=mesh.peers, tensor=alone, pipeline=alone, servers=servers, sizes=sizes, replica=None
    )
    return line._replace(replica=line._replace(world=alone, data=alone))


class PartOfModel(nn.Module):
    """Parameters under the model's names, and nothing else of it."""

    def __init__(self, named: Mapping[str, nn.Parameter]):
        super().__init__()
        self._named = dict(named)

    def named_parameters(self, *_: object, **__: object) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._named.items()


def part_on_servers(
    model: nn.Module, optimizer: torch.optim.Optimizer, plan: Plan, survey: "Survey", part: int
) -> tuple[nn.Module, LocalLayout]:
    """What the servers of a part hold of a model; the optimizer steps on that from now on."""
    if plan.num_parts == 1:
        return model, WHOLE
    true = dict(model.named_parameters())
    names = {p: name for name, p in true.items()}
    pipeline, tensor = divmod(part, plan.tensor)
    cuts = {} if survey.tensor is None else survey.tensor.cuts
    held = {
        name: true[name] if own is true[name] else nn.Parameter(own, true[name].requires_grad)
        for name, own in survey.held_at(plan, pipeline, tensor, true).items()
    }

    def parts_of(p: nn.Parameter) -> list[ParameterPart] | None:
        name = names[p]
        if name not in held:
            return []
        if held[name] is p:
            return None
        take = partial(part_of, cut=cuts[name], rank=tensor, num_ranks=plan.tensor)
        return [ParameterPart(held[name], take)]

    swap_parameters(optimizer, parts_of)
    stages = {} if survey.stages is None else survey.stages.holders
    ranks = {
        name: tuple(sorted({rank_of_stage(s, plan.pipeline, plan.schedule) for s in users}))
        for name, users in stages.items()
    }
    holding = LocalLayout(
        cuts={name: cut for name, cut in cuts.items() if name in held},
        shapes={name: tuple(p.shape) for name, p in true.items()},
        rank=tensor,
        num_ranks=plan.tensor,
        pipeline=pipeline,
        holders={name: held_by for name, held_by in ranks.items() if len(held_by) > 1},
    )
    return PartOfModel(held), holding


@torch.no_grad()
def spread(alike: Group, weights: Collection[Tensor]) -> None:
    """Give the weights of the first of these ranks to the others. Each of them must call it."""
    if alike.num_ranks == 1:
        return
    for dtype in dict.fromkeys(p.dtype for p in weights):
        same = [p for p in weights if p.dtype == dtype]
        flat = torch.cat([p.detach().reshape(-1) for p in same])
        alike.broadcast(flat, 0)
        if alike.rank:
            for p, part in zip(same, flat.split([p.numel() for p in same]), strict=True):
                p.copy_(part.view(p.shape))
