"""With whom a worker agrees on what a step was: with all others, or with nobody.

In lockstep all agree on losses and requests in every step. Those of one host do it at a board
(`comm/board.py`), since a message through the group would cost more than the rest of a small step;
those of several hosts send one. Out of lockstep each worker is a world of its own.
"""

import torch
from torch import nn

from shoal.comm.collectives import Group
from shoal.comm.mesh import Mesh
from shoal.parallel.layout import Holding
from shoal.sync.rounds import Held
from shoal.sync.server.shard import trained


def hold(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    holding: Holding,
    num_pieces: int,
    in_lockstep: bool,
) -> Held:
    """A worker's own `num_pieces`, or in lockstep those of all: every worker must reach this."""
    if not in_lockstep:
        alone = mesh._replace(world=Group(), data=Group())
        return Held(model, optimizer, alone, holding, num_pieces, 1)
    held = Held(model, optimizer, mesh, holding, num_pieces, 1)
    if mesh.data.num_ranks > 1:
        held.rounds.meet_at_board(len(trained(model)))
    return held
