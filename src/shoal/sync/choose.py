"""Which strategy a plan names."""

from shoal.plan import Plan
from shoal.sync.allreduce import AllReduce
from shoal.sync.fully import FullySharded
from shoal.sync.local import LocalSGD
from shoal.sync.sharded import Sharded
from shoal.sync.strategy import Strategy


def strategy_for(plan: Plan, num_steps: int) -> Strategy:
    exact, round_size = plan.sums == "exact", plan.num_microbatches
    if plan.local_steps > 1:
        return LocalSGD(plan.num_pieces, plan.local_steps, num_steps, exact)
    if plan.zero == 3:
        return FullySharded(plan.num_pieces, round_size)
    if plan.zero:
        return Sharded(plan.num_pieces, scatter_each=plan.zero == 2, round_size=round_size)
    return AllReduce(plan.num_pieces, exact, round_size)
