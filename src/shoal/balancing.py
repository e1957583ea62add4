"""Moving work from slow replicas to fast ones, between two steps.

`data/balance.py` decides, from seconds that every rank knows alike; here the decision is carried
out: the strategy is attached anew with other shares, and the run's record tells who is slow.
"""

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from shoal.data.balance import Balance, can_balance
from shoal.mesh import Mesh
from shoal.plan import Plan

if TYPE_CHECKING:
    from shoal.training import Trainer

_SLOW = 1.5  # times as long as replicas take at the median: named


def balance_of(plan: Plan, mesh: Mesh) -> Balance | None:
    """Of a new mesh, whose replicas start with equal work; None if work must not move."""
    if not can_balance(plan) or mesh.data.num_ranks == 1:
        return None
    return Balance(plan.num_pieces // plan.num_microbatches, mesh.data.num_ranks)


def rebalance(trainer: "Trainer", busy_s: Sequence[float]) -> None:
    """Move work if that makes steps shorter. Every rank decides alike and must call it."""
    if trainer.balance is None:
        return
    mesh, before = trainer.mesh, list(trainer.balance.counts)
    replicas = by_replica(busy_s, mesh.data.num_ranks, mesh.tensor.num_ranks)
    seconds = [busy / count for busy, count in zip(replicas, before, strict=True)]
    counts = trainer.balance.observe(replicas)
    if counts is None:
        return
    trainer.strategy.detach()
    trainer.take_place(mesh._replace(counts=tuple(counts)))
    if mesh.rank == 0:
        usual = median(seconds)
        slow = {str(r): round(s / usual, 2) for r, s in enumerate(seconds) if s > _SLOW * usual}
        trainer.seat.tell("balanced", step=trainer.step, rounds=counts, before=before, slow=slow)


def by_replica(busy_s: Sequence[float], num_replicas: int, num_tensor: int) -> list[float]:
    """The longest that a rank of each replica was busy; ranks count by tensor, data, pipeline."""
    found = [0.0] * num_replicas
    for rank, busy in enumerate(busy_s):
        replica = rank // num_tensor % num_replicas
        found[replica] = max(found[replica], busy)
    return found
