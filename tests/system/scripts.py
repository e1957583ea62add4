"""Scripts that `shoal run` and torchrun start: one file, told by its first argument what to do.

What rank 0 learns goes to standard output as lines of JSON.
"""

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

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


def keeps() -> None:
    """Averages that are evaluated, a plateau, a decay and weights that the loop itself changes;
    a member may be killed in the middle of that (KILL=place:member:step)."""
    held_out = shoal.data.tensors(torch.linspace(-2, 2, 10)[:, None], torch.zeros(10, 1))
    with shoal.trainer(tiny.line(), plan="data=auto") as trainer:
        weights, state = list(trainer.model.parameters()), trainer.state
        state["count"] = 0
        ema = state["ema"] = [p.detach().clone() for p in weights]
        state["plateau"] = ReduceLROnPlateau(trainer.optimizer, patience=0, factor=0.5)
        for info in trainer:
            state["count"] += 1
            torch._foreach_lerp_(ema, [p.detach() for p in weights], 0.1)
            own = [p.detach().clone() for p in weights]
            put(ema, weights)
            die_at("evaluate", info.step)
            state["plateau"].step(trainer.evaluate(held_out)["loss"])
            put(own, weights)
            die_at("evaluated", info.step)
            trainer.optimizer.param_groups[0]["weight_decay"] += 1e-3 * state["count"]
            put([0.95 * p.detach() for p in weights], weights)
        groups = [
            {k: v for k, v in g.items() if "param" not in k} for g in trainer.optimizer.param_groups
        ]
        told = {"weights": [p.tolist() for p in weights], "ema": [e.tolist() for e in ema]}
        print(json.dumps(told | {"count": state["count"], "groups": groups}))


@torch.no_grad()
def put(values: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    for value, weight in zip(values, weights, strict=True):
        weight.copy_(value)


def die_at(place: str, step: int) -> None:
    member = os.environ.get("SHOAL_MEMBER", "").partition(":")[0]
    if os.environ.get("KILL") == f"{place}:{member}:{step}":
        os.kill(os.getpid(), signal.SIGKILL)


def ends(how: str) -> None:
    """Something is done after step 3, on all ranks or on one."""
    held_out = shoal.data.tensors(torch.ones(10, 1), torch.zeros(10, 1))
    with shoal.trainer(tiny.line(), plan="data=auto", checkpoints="kept") as trainer:
        is_odd = trainer.mesh.rank == 1
        for info in trainer:
            if info.step != 3:
                continue
            if how == "break" or (how == "break-on-one" and is_odd):
                break
            if how == "stop-on-one" and is_odd:
                trainer.stop()
            if how == "stop-and-break-on-one" and is_odd:
                trainer.state["large"] = torch.ones(5000)  # compared in full, or not at all
                trainer.stop()
                break
            if how == "stop-and-break-on-one":
                trainer.state["large"] = torch.ones(5000)
            if how == "hang":
                open("hangs", "w").close()
                time.sleep(1000)
            if how == "evaluate-on-one" and is_odd:
                trainer.evaluate(held_out)
            if how == "rate-on-one" and is_odd:
                trainer.optimizer.param_groups[0]["lr"] = 0.05
            if how == "state-on-one":
                trainer.state["seen"] = [1, {"rank": trainer.mesh.rank}]
            if how == "freeze-on-one" and is_odd:
                trainer.model[0].weight.requires_grad_(False)
        if trainer.mesh.rank == 0:
            print(json.dumps({"steps": trainer.step, "stopped": trainer.stopped}))


def unlike(what: str) -> None:
    """One rank makes another run than the other."""
    run = tiny.line()
    changes: dict[str, Any] = {
        "rate": {"optimizer": lambda named: torch.optim.SGD(named, lr=0.2, momentum=0.9)},
        "loss": {"loss": torch.nn.functional.l1_loss},
        "width": {"model": lambda: torch.nn.Linear(1, 1)},
        "seed": {"seed": 3},
    }
    plan = "data=auto"
    if os.environ["RANK"] == "1":
        run = dataclasses.replace(run, **changes.get(what, {}))
        plan = "tensor=2" if what == "plan" else plan
    with shoal.trainer(run, plan=plan) as trainer:
        for _ in trainer:
            pass


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
        "keeps": keeps,
        "ends": lambda: ends(sys.argv[2]),
        "unlike": lambda: unlike(sys.argv[2]),
    }[sys.argv[1]]()
