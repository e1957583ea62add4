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
    mesh = trainer.mesh
    move = trainer.balance.observe(by_replica(busy_s, mesh.data.num_ranks, mesh.tensor.num_ranks))
    if move is None:
        return
    trainer.strategy.detach()
    trainer.take_place(mesh._replace(counts=tuple(move.after)))
    if mesh.rank == 0:
        trainer.seat.tell(
            "balanced",
            step=trainer.step,
            rounds=move.after,
            before=move.before,
            slow=slow_among(move.seconds),
        )


def slow_among(seconds: Sequence[float]) -> dict[str, float]:
    """The replicas to be named as slow, and how many times as long as usual each takes."""
    usual = median(seconds)
    return {str(r): round(s / usual, 2) for r, s in enumerate(seconds) if s > _SLOW * usual}


def by_replica(busy_s: Sequence[float], num_replicas: int, num_tensor: int) -> list[float]:
    """The longest that a rank of each replica was busy; ranks count by tensor, data, pipeline."""
    found = [0.0] * num_replicas
    for rank, busy in enumerate(busy_s):
        replica = rank // num_tensor % num_replicas
        found[replica] = max(found[replica], busy)
    return found
