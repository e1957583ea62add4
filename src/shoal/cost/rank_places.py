"""Where the ranks of a plan are on a cluster, how fast they are, what messages take. Pure.

Ranks are placed by the function that places those of a run (`cluster/placement.py`). A group whose
ranks are on one host uses the link inside it; another crosses hosts, whose ranks share the link
between them. Where hosts have as many of its ranks as each other, what is summed or gathered
crosses once a host (`comm/hierarchical.py`).
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

from shoal.cluster.placement import place
from shoal.comm.mesh import ranks_by_replica
from shoal.cost.cluster import Cluster, HostGroup
from shoal.cost.profile import ALONE, Crowding
from shoal.data.balance import can_balance
from shoal.plans.plan import Plan
from shoal.sync.costs import Message

# What crosses hosts once a host, by the names of `sync/costs.py`.
_BY_HOST = ("all-reduce", "reduce-scatter", "all-gather", "gather")


class RankGroup(NamedTuple):
    """Ranks that communicate: their number, and how they lie on hosts."""

    num_ranks: int
    num_hosts: int
    num_local: int  # on the host that has most of them
    num_groups: int  # of such groups on that host, which send at once
    is_even: bool = False  # each host has as many, and more than one

    @property
    def is_inside(self) -> bool:
        """All on one host."""
        return self.num_hosts == 1


class RankPlaces:
    """The ranks of one plan on one cluster."""

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        flops_per_s: float,
        crowding: Crowding = ALONE,
    ):
        """`flops_per_s` is the speed of the device that seconds were measured on, alone."""
        self.plan, self.cluster, self._flops_per_s = plan, cluster, flops_per_s
        self._crowding = crowding
        self.hosts = _hosts_of(plan, cluster)

    @cached_property
    def ranks_on(self) -> Counter[int]:
        return Counter(self.hosts[: self.plan.num_ranks])

    def group(self, axis: str, rank: int = 0) -> RankGroup:
        return group_of(self.plan, self.hosts, axis, rank)

    def scale(self, ranks: Sequence[int], factor: float | None = None) -> float:
        """By how much events take longer than in the profile: on the slowest of these ranks, or,
        where work moves to fast ones, as all of them together. `factor` is by how much the plan's
        precision lengthens them on a core; None for what is done in fp32."""
        counts = Counter(map(self.hosts.__getitem__, ranks))
        speeds = {host: self._speed(self.cluster.group_of(host), factor) for host in counts}
        num_rounds = self.plan.num_pieces // self.plan.num_microbatches
        moves = can_balance(self.plan) and num_rounds > self.plan.num_replicas
        mean = sum(speeds[host] * count for host, count in counts.items()) / len(ranks)
        return self._flops_per_s / (mean if moves else min(speeds.values())) * self.crowd

    def _speed(self, group: HostGroup, factor: float | None) -> float:
        is_half = factor is not None and self.plan.precision.startswith(("bf16", "fp16"))
        return group.half_flops if is_half and group.half_flops else group.flops / (factor or 1.0)

    @cached_property
    def crowd(self) -> float:
        """By how much a rank is slower as others compute on the cores beside it."""
        if self._is_gpu:
            return 1.0
        busy = (min(n, self.cluster.group_of(host).devices) for host, n in self.ranks_on.items())
        return self._crowding.at(max(busy))

    @cached_property
    def sharers(self) -> float:
        """Ranks for each device of the host that has most ranks for its devices, 1 or more."""
        crowds = (n / self.cluster.group_of(host).devices for host, n in self.ranks_on.items())
        return max(1.0, *crowds)

    @cached_property
    def spare(self) -> float:
        """The share of messages that runs beside computation: all on GPUs, on cores as far as
        there are more of them than ranks."""
        found = 1.0
        for host, count in self.ranks_on.items():
            group = self.cluster.group_of(host)
            if group.device == "core":
                found = min(found, max(0.0, group.devices - count) / count)
        return found

    def rank_scale(self, p: int, factor: float | None = None) -> float:
        data, tensor = self.plan.num_replicas, self.plan.tensor
        return self.scale(range(p * data * tensor, (p + 1) * data * tensor), factor)

    @property
    def may_share(self) -> bool:
        """Whether ranks may hold parameters and state together: on cores of one host."""
        return not self._is_gpu and self.group("data").is_inside

    def seconds(self, message: Message) -> float:
        """Of the messages of one kind."""
        if not message.count:
            return 0.0
        return self.transfer(
            self.group(message.axis), message.count, message.num_bytes, message.how
        )

    def transfer(self, group: RankGroup, count: float, num_bytes: float, how: str = "") -> float:
        hops = max(1.0, math.log2(max(2, group.num_ranks)))
        link = self.cluster.inside if group.is_inside else self.cluster.between
        if group.is_inside:
            return link.seconds(count * hops, num_bytes) * self._talk_share()
        by_host = crosses_by_host(group, how) and not self._is_gpu
        across = bytes_across(group, num_bytes, how, by_host) * group.num_groups
        if not by_host:
            return link.seconds(count * hops, max(num_bytes, across))
        whole = num_bytes * group.num_ranks / (group.num_ranks - 1)
        inside = whole * (group.num_local - 1) / group.num_local
        in_host, between = math.log2(group.num_local), math.log2(group.num_hosts)
        seconds = self.cluster.inside.seconds(count * in_host, inside) * self._talk_share()
        return seconds + link.seconds(count * between, across)

    def _talk_share(self) -> float:
        """Messages between cores take what cores there are."""
        return 1.0 if self._is_gpu else self.sharers

    @property
    def _is_gpu(self) -> bool:
        return self.cluster.group_of(self.hosts[0]).device == "gpu"


def group_of(plan: Plan, hosts: Sequence[int], axis: str, rank: int = 0) -> RankGroup:
    """The ranks that a rank communicates with along an axis; `hosts` are by seat. Pure."""
    data = plan.num_replicas
    members: Sequence[int] = range(plan.num_ranks)  # of those with servers, too
    together = plan.local_steps == 1 and plan.staleness_bound == 0
    apart = plan.num_apart
    if axis == "tensor":
        members = range(rank, rank + plan.tensor)
    elif axis == "data":
        members = range(rank, rank + data // (1 if together else apart) * plan.tensor, plan.tensor)
    elif axis == "within":
        members = range(rank, rank + plan.num_within * plan.tensor, plan.tensor)
    elif axis == "replicas":
        members = range(rank, rank + data * plan.tensor, data // apart * plan.tensor)
    elif axis == "replica":
        shape = plan.pipeline, apart, data // apart, plan.tensor
        members = next(own for own in ranks_by_replica(shape) if rank in own)
    elif axis == "pipeline":
        members = range(rank, plan.num_ranks, data * plan.tensor)
    lie = Counter(hosts[r] for r in members)
    if axis not in ("tensor", "data", "pipeline", "world", "replicas", "replica", "within"):
        lie.update(hosts[plan.num_ranks :])
    host, local = lie.most_common(1)[0]
    crowd = Counter(hosts[: plan.num_ranks])[host] // max(1, local) if axis != "world" else 1
    is_even = local > 1 and len({*lie.values()}) == 1
    return RankGroup(len(members), len(lie), local, max(1, crowd), is_even)


def crosses_by_host(group: RankGroup, how: str) -> bool:
    """Whether ranks on cores add up, or hand out, inside each host first. Pure."""
    return group.is_even and not group.is_inside and how.startswith(_BY_HOST)


def bytes_across(group: RankGroup, num_bytes: float, how: str, by_host: bool) -> float:
    """What leaves a host for others, if each rank sends `num_bytes` where all are alone. Pure."""
    if group.is_inside:
        return 0.0
    if by_host:
        whole = num_bytes * group.num_ranks / (group.num_ranks - 1)
        return whole * (group.num_hosts - 1) / group.num_hosts
    # A ring crosses to the next host once for all of a host's ranks; others for each of them.
    apart = max(1, group.num_ranks - group.num_local) / max(1, group.num_ranks - 1)
    return num_bytes if how == "all-reduce" else num_bytes * group.num_local * apart


@lru_cache(256)
def _hosts_of(plan: Plan, cluster: Cluster) -> tuple[int, ...]:
    """The host of each rank and server, on as few hosts as have the devices."""
    needed, slots = plan.num_ranks, dict[int, int]()
    times = -(-plan.num_ranks // cluster.num_devices)  # ranks for each device
    host = 0
    for group in cluster.hosts:
        for _ in range(group.count):
            enough = needed <= 0 if plan.hosts == 1 else len(slots) == plan.hosts
            if enough:
                break
            slots[host] = group.devices * times
            needed, host = needed - slots[host], host + 1
    if plan.hosts > 1 and needed > 0:
        slots = dict.fromkeys(slots, -(-plan.num_ranks // plan.hosts))
    return place(plan, slots)
