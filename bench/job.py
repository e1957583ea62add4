"""The job that `recovery` and `startup` run: once as a recipe, once as a plain DDP script.

Both train the same small MLP on the same data with the same optimizer, and both note each step that
a rank has made: a line with the process and the system-wide monotonic clock, appended to the file
that STEPS_FILE names. Nothing is imported but torch, and `shoal`, which loads nothing until it is
used, so the script starts as fast as a script can. It saves and loads nothing.
"""

import gc
import os
import time
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import shoal

NUM_SAMPLES = 4096
BATCH = 48  # divisible by 3 and by 4 ranks
WIDTH = 256

gc.disable()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(NUM_SAMPLES, 64), torch.randint(0, 10, (NUM_SAMPLES,))


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """A fused AdamW that notes every step it has made."""
    found = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    path = os.environ["STEPS_FILE"]
    pid, file = 0, -1

    def note(*_: object) -> None:
        nonlocal pid, file
        if pid != os.getpid():  # after a fork, too
            pid, file = os.getpid(), os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(file, f"{pid} {time.monotonic_ns()}\n".encode())

    found.register_step_post_hook(note)
    return found


def recipe(steps: int = 1_000_000) -> shoal.Run:
    return shoal.Run(
        model=model,
        loss=cross_entropy,
        optimizer=optimizer,
        data=shoal.data.tensors(*samples()),
        batch_size=BATCH,
        steps=steps,
    )


def script(steps: int) -> None:
    """The same under torchrun, or alone where nobody launched it."""
    torch.set_num_threads(1)
    num_ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    trained = model()
    if num_ranks > 1:
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel

        # torchrun keeps its store over a restart. Without a prefix the new ranks find the addresses
        # of the dead ones, and most restarts fail.
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=60))
        fresh = dist.PrefixStore(f"restart/{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        dist.init_process_group("gloo", store=fresh, rank=rank, world_size=num_ranks)
        trained = DistributedDataParallel(trained, gradient_as_bucket_view=True)
    stepper = optimizer(trained.parameters())
    inputs, target = samples()
    share = BATCH // num_ranks
    for step in range(steps):
        at = step * BATCH % (NUM_SAMPLES - BATCH) + rank * share
        stepper.zero_grad()
        cross_entropy(trained(inputs[at : at + share]), target[at : at + share]).backward()
        stepper.step()
    if num_ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    script(int(os.environ.get("STEPS", "1000000")))
