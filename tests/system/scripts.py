"""Scripts that `shoal run` and torchrun start: one file, told by its first argument what to do.

What rank 0 learns goes to standard output as lines of JSON.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import shoal

sys.path.insert(0, str(Path(__file__).parent))

import tiny


def own_loop(pause: float = 0.0) -> None:
    """Every step's loss, an evaluation after every second, and the weights at the end."""
    run = tiny.line(pause)
    held_out = shoal.data.tensors(torch.linspace(-2, 2, 10)[:, None], torch.zeros(10, 1))
    with shoal.trainer(run, plan="data=auto") as trainer:
        for info in trainer:
            scores = trainer.evaluate(held_out) if info.step % 2 == 0 else None
            if trainer.mesh.rank == 0:
                print(json.dumps({"step": info.step, "loss": info.loss, "scores": scores}))
        if trainer.mesh.rank == 0:
            weights = [p.tolist() for p in trainer.model.parameters()]
            print(json.dumps({"weights": weights}))


def saves() -> None:
    """Goes on from what an earlier call has saved."""
    with shoal.trainer(tiny.line(0.1), checkpoints="kept", resume=True) as trainer:
        for info in trainer:
            print(json.dumps({"step": info.step, "loss": info.loss}), flush=True)
    sys.exit(75 if trainer.stopped else 0)


def twice() -> None:
    own_loop()
    own_loop()


def raises() -> None:
    run = tiny.line()
    with shoal.trainer(run) as trainer:
        for info in trainer:
            if info.step == 3 and trainer.mesh.rank == 1:
                raise LookupError("what this script was looking for")


def asks_for_servers() -> None:
    shoal.trainer(tiny.line(), plan="data=auto sync=server")


def plain() -> None:
    """torch.distributed without Shoal."""
    dist.init_process_group("gloo")
    summed = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(summed)
    if dist.get_rank() == 0:
        print(json.dumps({"sum": summed.item(), "arguments": sys.argv[1:]}))
    dist.destroy_process_group()


def nothing() -> None:
    if os.environ["RANK"] == "0":
        print(json.dumps({"world": os.environ["WORLD_SIZE"]}))


def lacks_a_rank() -> None:
    if os.environ["RANK"] == "1":
        import time

        time.sleep(30)  # it does not come in time
    own_loop()


if __name__ == "__main__":
    {
        "own-loop": own_loop,
        "slow-loop": lambda: own_loop(0.05),
        "saves": saves,
        "twice": twice,
        "raises": raises,
        "asks-for-servers": asks_for_servers,
        "plain": plain,
        "nothing": nothing,
        "lacks-a-rank": lacks_a_rank,
    }[sys.argv[1]]()
