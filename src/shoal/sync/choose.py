"""Which strategy a plan names."""

from shoal.plan import Plan
from shoal.sync.allreduce import AllReduce
from shoal.sync.local import LocalSGD
from shoal.sync.strategy import Strategy


def strategy_for(plan: Plan, num_steps: int) -> Strategy:
    exact = plan.sums == "exact"
    if plan.local_steps > 1:
        return LocalSGD(plan.num_pieces, plan.local_steps, num_steps, exact)
    return AllReduce(plan.num_pieces, exact)
