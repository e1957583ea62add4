"""What `shoal explain` predicts, held against ranks that train; and the verb on the command line."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.cli.main import run_here
from shoal.comm.collectives import Group
from shoal.explain import explain
from shoal.mesh import Mesh
from shoal.run import resolve
from shoal.testing.faults import Trained
from shoal.testing.ranks import Pool
from shoal.training import Trainer
from tests import zoo
from tests.parity.runs import GivenSeat

TINY = str(Path(__file__).with_name("tiny.py"))
FSDP = ("all-gather", "reduce-scatter")


class Watched:
    """Everything this rank sends: through our groups, and what FSDP2 sends by itself."""

    def __init__(self, monkey: pytest.MonkeyPatch):
        self.groups: list[Group] = []
        self.by_fsdp = self.count_by_fsdp = 0
        init = Group.__init__

        def watched(group: Group, handle: Any = None) -> None:
            init(group, handle)
            self.groups.append(group)

        monkey.setattr(Group, "__init__", watched)
        for name in ("all_gather_single", "reduce_scatter_single"):
            monkey.setattr(dist, name, self._counted(getattr(dist, name), name))

    def _counted(self, function: Any, name: str) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
            shard = min(t.nbytes for t in tensors)
            num_ranks = max(t.nbytes for t in tensors) // shard if shard else 1
            self.by_fsdp += shard * (num_ranks - 1)
            self.count_by_fsdp += 1
            return function(*args, **kwargs)

        return counted

    def taken(self) -> dict[str, int]:
        return {
            "by_groups": sum(group.bytes_sent for group in self.groups),
            "by_fsdp": self.by_fsdp,
            "count_by_fsdp": self.count_by_fsdp,
        }


def train(mesh: Mesh, recipe: str, plan: str) -> dict[str, Any]:
    """Train some steps on this rank; what it holds, and what the last step sent."""
    run = getattr(zoo, recipe)()
    with pytest.MonkeyPatch.context() as monkey:
        watched = Watched(monkey)
        with Trainer(run, resolve(run, plan, mesh.num_ranks), GivenSeat(mesh)) as trainer:
            steps = iter(trainer)
            next(steps)
            before = watched.taken()
            info = next(steps)
            after = watched.taken()
            names = {name for name, _ in trainer.model.named_parameters()}
            held = {n: parts for n, parts in trainer.spread.held().items() if n in names}
            groups = trainer.optimizer.param_groups
            states = trainer.optimizer.state.values()
            return {
                "held": sum(part.tensor.numel() for parts in held.values() for part in parts),
                "stepped": sum(p.numel() for g in groups for p in g["params"]),
                "state": sum(
                    t.nbytes for s in states for t in s.values() if isinstance(t, Tensor)
                ),
                "bytes_sent": info.bytes_sent,
                **{name: after[name] - before[name] for name in after},
            }


PLANS = [
    ("gpt", "data=2"),
    ("gpt", "data=2 accumulate=2"),
    ("gpt", "data=4 sums=ring"),
    ("cnn", "data=4"),
    ("cnn", "data=2 pieces=4"),
    ("gpt", "data=4 zero=1"),
    ("gpt", "data=2 zero=1 accumulate=2"),
    ("cnn", "data=2 zero=2 accumulate=2"),
    ("frozen", "data=2 zero=2"),
    ("gpt", "data=2 zero=3"),
    ("frozen", "data=2 zero=3"),
    ("gpt", "pipeline=2"),
    ("gpt", "pipeline=4 schedule=gpipe"),
    ("gpt", "pipeline=2 schedule=zbv microbatches=4"),
    ("unet", "pipeline=2 schedule=interleaved microbatches=4"),
    ("towers", "pipeline=2 schedule=zero-bubble"),
    ("gpt", "tensor=2"),
    ("cnn", "tensor=2 recompute=blocks"),
    ("gpt", "data=2 tensor=2 zero=1"),
    ("gpt", "data=2 pipeline=2 zero=2 microbatches=2"),
    ("gpt", "data=2 pipeline=2 zero=3 microbatches=2"),
    ("gpt", "tensor=2 pipeline=2"),
    ("gpt", "data=2 tensor=2 zero=3"),
]


@pytest.mark.parametrize(("recipe", "plan"), PLANS)
def test_ranks_hold_and_send_what_was_said(pool: Pool, recipe: str, plan: str) -> None:
    run = getattr(zoo, recipe)()
    told = explain(run, resolve(run, plan, None))
    truth = pool.run(train, told.num_ranks, recipe, plan)
    for rank, real in zip(told.ranks, truth, strict=True):
        assert rank.num_held == real["held"]
        assert rank.num_stepped == real["stepped"]
        assert rank.memory.optimizer.num_bytes == real["state"]
        by_fsdp = [m for m in rank.messages if m.how in FSDP]
        by_groups = [m for m in rank.messages if m.how not in FSDP]
        assert sum(m.num_bytes for m in by_groups) == pytest.approx(real["by_groups"], rel=0.02)
        assert sum(m.num_bytes for m in by_fsdp) == real["by_fsdp"]
        assert sum(m.count for m in by_fsdp) == real["count_by_fsdp"]
        if told.axes["tensor"] == 1 and told.zero < 3 and not told.tied:
            assert sum(m.num_bytes for m in rank.messages) == real["bytes_sent"]
