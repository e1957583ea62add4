"""Moving work from slow replicas to fast ones, between two steps.

`data/balance.py` decides, from seconds that every rank knows alike; here the decision is carried
out: the strategy is attached again with other shares, and the run's record tells who is slow. Where
work does not move, only who is slow is reported, and what would let it move.
"""

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from shoal.comm.mesh import Mesh
from shoal.data.balance import LoadBalancer, StragglerDetector, can_balance
from shoal.data.split import shares
from shoal.events.events import BalancedEvent, SlowEvent
from shoal.plans.plan import Plan
from shoal.sync.choose import settled

if TYPE_CHECKING:
    from shoal.training.trainer import Trainer

_SLOW = 1.5  # times as long as replicas take at the median: named when work moves
_GRAIN = 4  # pieces a replica that are proposed, so that work can move


class Balancing(NamedTuple):
    """What decides on work, and what notices who is slow."""

    load: LoadBalancer | None  # None if work must not move
    pace: StragglerDetector


def make_balancer(plan: Plan, mesh: Mesh) -> Balancing:
    """Of a new mesh, whose replicas start with equal work."""
    if not can_balance(plan) or mesh.data.num_ranks == 1:
        return Balancing(None, StragglerDetector())
    num_rounds = plan.num_pieces // plan.num_microbatches
    return Balancing(LoadBalancer(num_rounds, mesh.data.num_ranks), StragglerDetector())


def rebalance(trainer: "Trainer", busy_s: Sequence[float]) -> None:
    """Move work if that makes steps shorter. Every rank decides alike and must call it."""
    mesh, plan = trainer.mesh, trainer.plan
    taken_s = by_replica(busy_s, mesh.data.num_ranks, mesh.tensor.num_ranks)
    num_rounds = plan.num_pieces // plan.num_microbatches
    dealt = mesh.counts or [len(own) for own in shares(num_rounds, mesh.data.num_ranks)]
    slow = trainer.balancing.pace.observe(taken_s, dealt)
    if slow and mesh.rank == 0:
        told = {str(replica): times for replica, times in slow.items()}
        why = advice(plan, trainer.run.batch_size)
        trainer.seat.emit(SlowEvent(step=trainer.step, slow=told, advice=why))
    load = trainer.balancing.load
    move = None if load is None else load.observe(taken_s)
    if move is None:
        return
    trainer.strategy.detach()
    trainer.take_place(mesh._replace(counts=tuple(move.after)))
    settled(trainer.strategy)
    if mesh.rank == 0:
        trainer.seat.emit(
            BalancedEvent(
                step=trainer.step,
                rounds=list(move.after),
                before=list(move.before),
                slow=slow_among(move.seconds),
            )
        )


def slow_among(seconds: Sequence[float]) -> dict[str, float]:
    """The replicas to be named as slow, and how many times as long as usual each takes."""
    usual = median(seconds)
    return {str(r): round(s / usual, 2) for r, s in enumerate(seconds) if s > _SLOW * usual}


def advice(plan: Plan, batch_size: int) -> str:
    """How work could move away from a slow replica. Pure."""
    if plan.sync == "server":
        return "under sync=server work does not move; with staleness=S the others do not wait"
    if plan.sums == "ring" or plan.zero >= 2 or plan.local_steps > 1:
        return "under this plan work does not move; with data=N pieces=P it does"
    least = plan.num_pieces + plan.num_microbatches
    wanted = _GRAIN * plan.num_replicas * plan.num_microbatches
    fitting = [p for p in range(least, batch_size + 1, plan.num_microbatches) if not batch_size % p]
    if not fitting:
        return "the batch cannot be cut finer, so no work can move to the others"
    best = min(fitting, key=lambda p: abs(p - wanted))
    place = " in place of accumulate" if plan.accumulate > 1 else ""
    return f"pieces={best}{place} lets work move to the others"


def by_replica(busy_s: Sequence[float], num_replicas: int, num_tensor: int) -> list[float]:
    """The longest that a rank of each replica was busy; ranks count by tensor, data, pipeline."""
    found = [0.0] * num_replicas
    for rank, busy in enumerate(busy_s):
        replica = rank // num_tensor % num_replicas
        found[replica] = max(found[replica], busy)
    return found
