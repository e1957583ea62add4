"""From a profile, a plan and a cluster to a simulation: the seconds of everything that happens.

`predict` says what a step takes, here for devices that are alike; how much slower each host's are
is left to the simulation, since work may move. A run has as many hosts as its ranks need, and some
that stand by. A state is saved by all ranks together, copied while the next step computes, and
written at the speed of the store. A sweep repeats the simulation for sizes of one axis, with the
same batch (strong scaling) and with one that grows with the ranks (weak).

Read next: `simulate.py`, `predict.py`.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import Literal, NamedTuple

import msgspec

from shoal.cost.cluster import Cluster
from shoal.cost.predict import predict, step_times
from shoal.cost.prediction import StepTimes
from shoal.cost.profile import Profile
from shoal.cost.simulate import Conditions, HostRooms, Simulation, simulate
from shoal.cost.simulated_members import Durations
from shoal.cost.work_log import SaveTimes
from shoal.errors import PlanError, UsageError, nearest
from shoal.formatting import plural
from shoal.plans.plan import Plan

COPY_BYTES_PER_S = 2e9  # in memory, of one rank
_SWEPT = ("data", "tensor", "pipeline")
_MOST_POINTS = 64


class Scenario(msgspec.Struct, frozen=True):
    """What a simulation is asked for, beside the recipe, its plan and the cluster."""

    conditions: Conditions
    spare_hosts: int = 0  # that stand by
    repair_s: float = 3600.0
    store_bytes_per_s: float = 1e9  # of the place of checkpoints, for all ranks together


class CurvePoint(msgspec.Struct, frozen=True):
    """One size of a sweep. `reason` says why there are no figures."""

    scaling: Literal["strong", "weak"]
    axis: str
    size: int
    ranks: int
    batch_size: int
    step_s: float | None = None
    samples_per_s: float | None = None  # over all of the time
    efficiency: float | None = None  # samples a second and rank, as a share of the first point's
    goodput: float | None = None
    reason: str = ""


class Effect(msgspec.Struct, frozen=True):
    """The goodput if one setting were another."""

    setting: str
    value: int
    goodput: float


class Sweep(NamedTuple):
    """The sizes of one axis."""

    axis: str
    sizes: tuple[int, ...]


def simulate_plan(profile: Profile, plan: Plan, cluster: Cluster, scenario: Scenario) -> Simulation:
    """A resolved plan of a profiled recipe on a cluster. PlanError if that is too small."""
    hosts = _hosts_for(plan, cluster, scenario.spare_hosts)
    fastest = max(cluster.group_of(host).flops for host in hosts)
    groups = tuple(msgspec.structs.replace(group, flops=fastest) for group in cluster.hosts)
    even = msgspec.structs.replace(cluster, hosts=groups)

    @cache
    def times_of(size: Plan) -> StepTimes:
        return step_times(profile, size, even)

    slowness = {host: fastest / cluster.group_of(host).flops for host in hosts}
    at = HostRooms(
        slots={host: cluster.group_of(host).devices for host in hosts},
        slowness={host: times for host, times in slowness.items() if times != 1},
        shares=profile.shares and all(even.group_of(host).device == "core" for host in hosts),
    )
    durations = _durations(profile, plan, even, scenario, times_of(plan))
    return simulate(plan, times_of, at, scenario.conditions, durations)


def check_numbers(plan: Plan, cluster: Cluster, given: Conditions) -> None:
    """Refuse slow ranks and hosts that the run does not have; those of a sweep's smaller sizes are
    left out instead."""
    _refuse_strangers(given.slow_ranks, plan.num_ranks, "rank")
    _refuse_strangers(given.slow_links, _num_hosts_for(plan, cluster), "host")


def sweep_sizes(text: str) -> Sweep:
    """Read `data=8..1024`: doubled from the first to the last."""
    found = re.fullmatch(r"\s*(\w+)\s*=\s*(\d+)\s*\.\.\s*(\d+)\s*", text)
    if found is None:
        raise UsageError(
            f"{text!r} is no sweep. Give an axis and its first and last size, as in data=8..1024; "
            "sizes in between are doubled."
        )
    axis, first, last = found[1], int(found[2]), int(found[3])
    if axis not in _SWEPT:
        raise UsageError(f"{axis!r} cannot be swept. {nearest(axis, _SWEPT)}")
    if not 1 <= first <= last:
        raise UsageError(f"{text!r} has no size: it must begin at 1 or more, and not end before.")
    sizes = [first]
    while sizes[-1] * 2 <= last and len(sizes) < _MOST_POINTS:
        sizes.append(sizes[-1] * 2)
    return Sweep(axis, tuple(sizes if sizes[-1] == last else [*sizes, last]))


def sweep(
    profile: Profile, plan: Plan, cluster: Cluster, scenario: Scenario, over: Sweep
) -> list[CurvePoint]:
    """Strong and weak scaling of a plan whose `data` and `pieces` may be open."""
    return [
        *_curve(profile, plan, cluster, scenario, over, "strong"),
        *_curve(profile, plan, cluster, scenario, over, "weak"),
    ]


def _curve(
    profile: Profile,
    plan: Plan,
    cluster: Cluster,
    scenario: Scenario,
    over: Sweep,
    scaling: Literal["strong", "weak"],
) -> Iterator[CurvePoint]:
    first: float | None = None  # samples a second and rank
    for size in over.sizes:
        batch = profile.batch_size
        batch = batch if scaling == "strong" else batch * size // over.sizes[0]
        ranks = 0
        try:
            sized = msgspec.structs.replace(plan, **{over.axis: size})
            sized = sized.resolve(ranks=None, cores=cluster.num_devices, batch_size=batch)
            ranks = sized.num_ranks
            own = msgspec.structs.replace(profile, batch_size=batch)
            found = simulate_plan(own, sized, cluster, scenario)
        except PlanError as error:
            yield CurvePoint(scaling, over.axis, size, ranks, batch, reason=str(error))
            continue
        speed = batch * found.goodput / found.undisturbed_step_s
        first = speed / ranks if first is None else first
        share = speed / ranks / first if first else 0.0
        yield CurvePoint(
            scaling, over.axis, size, ranks, batch, found.step_s, speed, share, found.goodput
        )


def effects(profile: Profile, plan: Plan, cluster: Cluster, scenario: Scenario) -> list[Effect]:
    """The goodput with other values of save_every, spares and hosts that stand by; the rest of the
    scenario, its failures too, is the same."""
    found, given = [], scenario.conditions
    every = given.save_every or 0
    for setting, values in {
        "save_every": sorted({max(1, every // 4), max(1, every // 2), every, 2 * every, 4 * every}),
        "spares": (0, 1, 2),
    }.items():
        for value in values if setting != "save_every" or every else ():
            other = msgspec.structs.replace(given, **{setting: value})
            with suppress(PlanError):
                changed = msgspec.structs.replace(scenario, conditions=other)
                result = simulate_plan(profile, plan, cluster, changed)
                found.append(Effect(setting, value, result.goodput))
    for count in (scenario.spare_hosts, scenario.spare_hosts + 1):
        if _num_hosts_for(plan, cluster) + count <= cluster.num_hosts:
            more = msgspec.structs.replace(scenario, spare_hosts=count)
            result = simulate_plan(profile, plan, cluster, more)
            found.append(Effect("spare_hosts", count, result.goodput))
    return found


def _num_hosts_for(plan: Plan, cluster: Cluster) -> int:
    """As many as have the devices for its ranks, in order; as many as the plan says, if it does."""
    if plan.num_ranks > cluster.num_devices:
        raise PlanError(
            f"The plan {str(plan)!r} has {plural(plan.num_ranks, 'rank')}, and {cluster.name} has "
            f"{plural(cluster.num_devices, 'device')}. Use a smaller plan or a larger cluster."
        )
    if plan.hosts > 1:
        return plan.hosts
    room = count = 0
    while room < plan.num_ranks:
        room += cluster.group_of(count).devices
        count += 1
    return count


def _hosts_for(plan: Plan, cluster: Cluster, num_spare: int) -> Sequence[int]:
    count = _num_hosts_for(plan, cluster) + num_spare
    if count > cluster.num_hosts:
        raise PlanError(
            f"The plan {str(plan)!r} takes {plural(count - num_spare, 'host')}, and with "
            f"{num_spare} that stand by that is more than the {cluster.num_hosts} of "
            f"{cluster.name}. Use a smaller plan, a larger cluster or fewer spare hosts."
        )
    return range(count)


def _refuse_strangers(given: dict[int, float], count: int, what: str) -> None:
    strange = [number for number in given if number >= count]
    if strange:
        raise UsageError(
            f"There is no {what} {strange[0]}: this run has {plural(count, what)}, which count "
            "from 0."
        )


def _durations(
    profile: Profile, plan: Plan, cluster: Cluster, scenario: Scenario, times: StepTimes
) -> Durations:
    alone = Plan(data=1).resolve(ranks=1, cores=1, batch_size=profile.batch_size)
    memory = predict(profile, alone, cluster).memory
    state_bytes = profile.parameter_bytes + memory.optimizer + memory.buffers
    computes_s = sum(stage.forward_s + stage.backward_s for stage in times.stages)
    copied_s = state_bytes / plan.num_ranks / COPY_BYTES_PER_S
    link = cluster.inside if _num_hosts_for(plan, cluster) == 1 else cluster.between
    stored_s = state_bytes / scenario.store_bytes_per_s
    return Durations(
        save=SaveTimes(stall_s=max(0.0, copied_s - computes_s), write_s=stored_s),
        load_s=stored_s,
        transfer_s=link.seconds(1, state_bytes),
        repair_s=scenario.repair_s,
    )
