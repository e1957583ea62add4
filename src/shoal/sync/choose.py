"""Which strategy a plan names."""

from collections.abc import Callable

from shoal.comm.mesh import NOTHING_ASKED, Asked
from shoal.numerics.fragments import Timetable
from shoal.numerics.quantization import codec_of
from shoal.parallel.layout import Slice
from shoal.plans.plan import Plan
from shoal.sync.allreduce import AllReduce
from shoal.sync.fully import FullySharded
from shoal.sync.local import LocalSGD
from shoal.sync.outer import Rule
from shoal.sync.server.local import LocalThroughServers
from shoal.sync.server.strategy import ThroughServers
from shoal.sync.server.windows import Windows
from shoal.sync.sharded import Sharded
from shoal.sync.state import State
from shoal.sync.strategy import Strategy


def strategy_for(
    plan: Plan, num_steps: int, meets_after: Callable[[int], bool] = lambda step: True
) -> Strategy:
    """`meets_after` says after which steps the whole state is wanted."""
    exact, round_size = plan.sums == "exact", plan.num_microbatches
    timetable = Timetable(plan.local_steps, plan.fragments, num_steps)
    rates = plan.rate_factors if plan.rates != "even" else ()
    rule = Rule(*plan.outer_rates, codec_of(plan.codec)) if plan.has_anchor else None
    rates = plan.rate_factors if plan.rates != "even" else ()  # even for any number of replicas
    if plan.sync == "server" and rule is not None:
        windows = Windows(
            plan.bound,
            rule,
            timetable,
            damps=plan.damping == "inverse",
            rates=rates,
            closes_early=plan.deadline_s is not None,
            meets_after=meets_after,
        )
        return LocalThroughServers(plan.num_pieces, windows, exact)
    if plan.sync == "server":
        return ThroughServers(
            plan.num_pieces,
            plan.bound,
            checks=plan.precision == "fp16",
            codec=plan.codec,
            hosts=plan.hosts,
            damps=plan.damping == "inverse",
            rates=rates,
            meets_after=meets_after,
        )
    if plan.local_steps > 1:
        return LocalSGD(plan.num_pieces, timetable, exact, rule)
    if plan.zero == 3:
        return FullySharded(plan.num_pieces, round_size)
    if plan.zero:
        return Sharded(plan.num_pieces, scatter_each=plan.zero == 2, round_size=round_size)
    return AllReduce(plan.num_pieces, exact, round_size)


def settle(strategy: Strategy) -> None:
    """Before anybody but the next step looks at parameters: let all of them be here."""
    if isinstance(strategy, ThroughServers | LocalThroughServers):
        strategy.settle()


def asked_now(strategy: Strategy) -> Asked:
    """Whether all stop or meet after the last step of this rank, as far as servers know."""
    through = strategy.windows if isinstance(strategy, LocalThroughServers) else strategy
    if not isinstance(through, ThroughServers):
        return NOTHING_ASKED
    return through.halting.asked_after(through.batch)


def tables_held(strategy: Strategy, dense: bool = False) -> dict[str, list[Slice]]:
    """This rank's share of what servers alone hold of the model; if `dense`, of lazy tables all
    rows. What the model itself holds is complete then. Every rank must call it."""
    settle(strategy)
    return strategy.tables(dense) if isinstance(strategy, ThroughServers) else {}


def kinds_held(strategy: Strategy) -> State:
    """Names and types of the tensors that this rank saves; of servers' without their values."""
    if not isinstance(strategy, ThroughServers):
        return strategy.state_dict()
    own, served = strategy.state_dict(served=False), strategy.kinds()
    return State(served.tensors | own.tensors, {})
