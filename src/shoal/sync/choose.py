"""Makes the strategy that a plan names, and asks strategies what only some of them have."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from shoal.comm.mesh import NO_REQUESTS, Mesh, RankRequests
from shoal.numerics.codecs import make_codec
from shoal.numerics.fragments import FragmentSchedule
from shoal.parallel.layout import LocalLayout, Slice
from shoal.plans.keys import HALF_CODECS
from shoal.plans.plan import Plan
from shoal.sync.allreduce import AllReduce
from shoal.sync.fsdp import FullySharded
from shoal.sync.gradient_packing import GradientPacking
from shoal.sync.local import LocalSGD, lockstep_class
from shoal.sync.outer import OuterConfig
from shoal.sync.server.local import LocalServerStrategy
from shoal.sync.server.outer_client import OuterClient
from shoal.sync.server.packing import GradientPacker
from shoal.sync.server.strategy import ServerStrategy, WorkerOptions
from shoal.sync.state import ShardedState
from shoal.sync.strategy import Strategy
from shoal.sync.zero import ZeroSharded


def strategy_class(plan: Plan) -> type[Strategy]:
    """What a plan trains with; its `costs` can be asked without making one."""
    if plan.sync == "server":
        return LocalServerStrategy if plan.has_anchor else ServerStrategy
    return LocalSGD if plan.local_steps > 1 else lockstep_class(plan)


def make_strategy(
    plan: Plan,
    num_steps: int,
    meets_after: Callable[[int], bool] = lambda step: True,
    loss_scale: Callable[[], float] = lambda: 1.0,
    apart: str = "",
) -> Strategy:
    """`meets_after` says after which steps the whole state is wanted; `loss_scale` is of now;
    `apart` is why ranks of one host may not hold parameters and state together, in words."""
    chosen, checks = strategy_class(plan), plan.precision == "fp16"
    timetable = FragmentSchedule(plan.local_steps, plan.fragments, num_steps)
    rule = OuterConfig(*plan.outer_rates, make_codec(plan.codec)) if plan.has_anchor else None
    options = WorkerOptions(
        damps=plan.damping == "inverse",
        rates=plan.rate_factors if plan.rates != "even" else (),  # even for any number of replicas
        meets_after=meets_after,
    )
    if chosen is LocalServerStrategy:
        assert rule is not None
        closes_early = plan.deadline_s is not None
        outer_client = OuterClient(plan.staleness_bound, rule, timetable, options, closes_early)
        return LocalServerStrategy(
            plan.num_pieces, outer_client, partial(_in_lockstep, plan), checks
        )
    if chosen is ServerStrategy:
        options = options._replace(
            checks=checks or plan.codec not in ("none", *HALF_CODECS),
            packing=_push_packing(plan, num_steps, loss_scale),
            hosts=plan.hosts,
            round_size=plan.num_microbatches,
        )
        return ServerStrategy(plan.num_pieces, plan.staleness_bound, options)
    if chosen is LocalSGD:
        return LocalSGD(plan.num_pieces, timetable, partial(_in_lockstep, plan), rule, checks)
    packing = None
    if plan.packed_codec != "none":
        packing = GradientPacking(plan.codec, num_steps, loss_scale)
    return _in_lockstep(plan, plan.num_pieces, packing, apart if plan.shares else None)


def _in_lockstep(
    plan: Plan, num_pieces: int, packing: GradientPacking | None = None, apart: str | None = None
) -> Strategy:
    """For the ranks of a run, or of a replica that takes so many pieces."""
    chosen = lockstep_class(plan)
    if chosen is FullySharded:
        return FullySharded(num_pieces, plan.num_microbatches, packing)
    if chosen is ZeroSharded and apart is None:
        scatters = plan.zero == 2
        return ZeroSharded(num_pieces, scatters, plan.num_microbatches, packing, plan.bucket_bytes)
    exact, round_size = plan.sums == "exact" and plan.zero != 2, plan.num_microbatches
    return AllReduce(num_pieces, exact, round_size, packing, plan.bucket_bytes, apart)


def attach(
    strategy: Strategy,
    plan: Plan,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    mesh: Mesh,
    holding: LocalLayout,
) -> Strategy:
    """Attach a strategy of a plan's, and return it. If ranks that are to hold once what `zero`
    shards cannot share memory, another is attached and returned, which shards it. Every rank must
    call it."""
    strategy.attach(model, optimizer, mesh, holding)
    if not plan.zero or not isinstance(strategy, AllReduce) or strategy.holds_whole():
        return strategy
    strategy.detach()
    sharded = _in_lockstep(plan, plan.num_pieces)
    sharded.attach(model, optimizer, mesh, holding)
    return sharded


def num_stepped(strategy: Strategy, optimizer: torch.optim.Optimizer) -> int:
    """The elements that this rank steps on."""
    if isinstance(strategy, AllReduce) and strategy.host is not None:
        return sum(s.length for _, s in strategy.host.own_segments())
    return sum(p.numel() for group in optimizer.param_groups for p in group["params"])


def recovers(strategy: Strategy, plan: Plan) -> bool | None:
    """Whether a rank that dies can be replaced, if only an attached strategy knows."""
    return isinstance(strategy, AllReduce) if plan.zero and plan.shares else None


def _push_packing(
    plan: Plan, num_steps: int, loss_scale: Callable[[], float]
) -> GradientPacker | None:
    if plan.codec == "none":
        return None
    return GradientPacker(plan.codec, plan.precision == "fp16", num_steps, loss_scale)


def settled(strategy: Strategy) -> None:
    """All ranks of a new mesh hold the same state. Every rank must call it before a step."""
    if isinstance(strategy, AllReduce):
        strategy.settled()


def wait_for_parameters(strategy: Strategy) -> None:
    """Wait until all parameters are here. Call it before anything but the next step reads them."""
    if strategy.servers is not None:
        strategy.servers.wait_for_parameters()


def current_requests(strategy: Strategy) -> RankRequests:
    """Whether all stop or pause after the last step of this rank, as far as servers know."""
    return NO_REQUESTS if strategy.servers is None else strategy.servers.requests()


def late_mark(strategy: Strategy) -> int | None:
    """The mark of the last step's samples, if only servers know it, and only after the update."""
    return None if strategy.servers is None else strategy.servers.late_mark


def served_tables(strategy: Strategy, dense: bool = False) -> dict[str, list[Slice]]:
    """This rank's share of what servers alone hold of the model; if `dense`, of lazy tables all
    rows. What the model itself holds is complete then. Every rank must call it."""
    wait_for_parameters(strategy)
    return {} if strategy.servers is None else strategy.servers.tables(dense)


def state_types(strategy: Strategy) -> ShardedState:
    """Names and types of the tensors that this rank saves; of servers' without their values."""
    served = None if strategy.servers is None else strategy.servers.types()
    if served is None:
        return strategy.state_dict()
    own = strategy.newcomer_state()
    return ShardedState(served.tensors | own.tensors, {})
