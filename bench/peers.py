"""What one would write by hand with PyTorch instead of a plan with `zero`.

Level 0 is DDP; 1 is DDP with its ZeroRedundancyOptimizer; 2 is FSDP2 that keeps the parameters it
gathered in the forward pass until the backward pass is over; 3 is FSDP2 that drops them after each
block and gathers them again. All use a fused AdamW, and DDP's gradients live in its buckets.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

NAMES = {0: "DDP", 1: "ZeroRedundancyOptimizer", 2: "FSDP2 kept", 3: "FSDP2"}

Trained = tuple[nn.Module, torch.optim.Optimizer]
Blocks = Callable[[nn.Module], Sequence[nn.Module]]


def peer(level: int, model: nn.Module, blocks: Blocks, rate: float, bucket_mb: int = 25) -> Trained:
    """The model spread over all ranks, and its optimizer. Every rank must call it.

    `bucket_mb` is for DDP, `blocks` names what FSDP2 gathers at a time.
    """
    adam = partial(torch.optim.AdamW, lr=rate, fused=True)
    if level < 2:
        model = DistributedDataParallel(
            model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb
        )
        if level == 0:
            return model, adam(model.parameters())
        return model, ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.AdamW,
            parameters_as_bucket_view=True,
            lr=rate,
            fused=True,
        )
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for module in (*blocks(model), model):
        fully_shard(module, mesh=mesh, reshard_after_forward=level == 3)
    return model, adam(model.parameters())
