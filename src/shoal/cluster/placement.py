"""Which host each rank and each server of a run is on. Pure: a plan and the hosts' slots in.

What communicates most stays together: the ranks of a replica on one host if it has the slots, else
those that cut layers between them (tensor), with the stages of a pipeline beyond; replicas, which
meet once a step, are on unlike hosts. Servers go to the hosts in turn, so that a server and the
next ones, which keep its copies, are on unlike hosts. Servers that wait for messages take no slot.
Read next: `hosts.py`, which asks for it, and `elastic/membership.py`, which keeps to it.
"""

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

from shoal.errors import PlanError
from shoal.formatting import plural
from shoal.plans.plan import Plan
from shoal.plans.resize import RunSize, size_of

Placement = tuple[int, ...]  # the host of each seat: of ranks, then of servers


def place(plan: Plan, slots: Mapping[int, int]) -> Placement:
    """The host of each seat of a resolved plan; `slots` says how many ranks each host takes.

    Hosts get as many ranks as the others where they have the slots, in the order of their numbers.
    PlanError says how many slots are missing.
    """
    hosts = sorted(host for host, count in slots.items() if count > 0)
    if plan.num_ranks > sum(slots[host] for host in hosts):
        raise PlanError(_too_few(plan, {host: slots[host] for host in hosts}))
    servers = [hosts[number % len(hosts)] for number in range(plan.num_servers)]
    if plan.hosts == 1 or len(hosts) == 1:
        own = [hosts[0]] * plan.num_host_servers
        return (*_place_ranks(plan, {host: slots[host] for host in hosts}), *servers, *own)
    if plan.hosts != len(hosts):
        raise PlanError(
            f"The plan adds up gradients on hosts={plan.hosts}, and there are {len(hosts)}. "
            f"Use hosts={len(hosts)}, or leave hosts out of the plan."
        )
    each = plan.num_ranks // plan.hosts  # whose gradients the host's own server adds up
    if each > min(slots[host] for host in hosts):
        raise PlanError(_too_few(plan, {host: slots[host] for host in hosts}))
    return (*(host for host in hosts for _ in range(each)), *servers, *hosts)


def _place_ranks(plan: Plan, slots: Mapping[int, int]) -> list[int]:
    """Whole replicas if they fit, else whole layers, else single ranks."""
    tensor, pipeline, data = plan.tensor, plan.pipeline, plan.num_replicas
    replica = plan.num_ranks_apart if plan.is_loose else tensor * pipeline
    for unit in (replica, tensor * pipeline, tensor, 1):
        room = {host: count // unit for host, count in slots.items()}
        num_units = plan.num_ranks // unit
        if sum(room.values()) < num_units:
            continue
        counts = _spread(num_units, room)
        in_order = [host for host, count in counts.items() for _ in range(count * unit)]
        # The mesh numbers ranks (pipeline, data, tensor); a replica is (pipeline, tensor).
        found = [0] * plan.num_ranks
        places = ((d, p, t) for d in range(data) for p in range(pipeline) for t in range(tensor))
        for host, (d, p, t) in zip(in_order, places, strict=True):
            found[(p * data + d) * tensor + t] = host
        return found
    raise AssertionError("single ranks fit wherever there are slots enough")


def _spread(num_units: int, room: Mapping[int, int]) -> dict[int, int]:
    """How many units each host gets: the next one always goes where the fewest are."""
    counts = dict.fromkeys(room, 0)
    free = [(0, host) for host in room if room[host]]
    heapify(free)
    for _ in range(num_units):
        count, host = heappop(free)
        counts[host] = count + 1
        if counts[host] < room[host]:
            heappush(free, (counts[host], host))
    return counts


def _too_few(plan: Plan, slots: Mapping[int, int]) -> str:
    listed = ", ".join(f"{count} on host {host}" for host, count in slots.items()) or "none"
    return (
        f"The plan {str(plan)!r} has {plural(plan.num_ranks, 'rank')}, and the hosts have slots "
        f"for {sum(slots.values())}: {listed}. Use fewer ranks or more hosts, or say with "
        "--slots N how many ranks each host takes; the default is its cores."
    )


def describe_seats(host: int, size: RunSize, placement: Sequence[int]) -> str:
    """The ranks and servers of a host, in words."""
    own = [seat for seat, where in enumerate(placement) if where == host]
    ranks = [seat for seat in own if size.server_of(seat) is None]
    servers = [server for seat in own if (server := size.server_of(seat)) is not None]
    told = [_listed(name, found) for name, found in (("rank", ranks), ("server", servers)) if found]
    return " and ".join(told) or "no seat yet"


def _listed(name: str, numbers: Sequence[int]) -> str:
    return f"{name}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def describe_placement(plan: Plan, placement: Sequence[int]) -> list[tuple[str, str]]:
    """A row for each host: its name, and who is on it."""
    size = size_of(plan)
    return [
        (f"host {host}", describe_seats(host, size, placement)) for host in sorted({*placement})
    ]


def clear_text(plan: Plan) -> str:
    """What of the model ranks on several hosts send through Gloo, which does not encrypt; empty if
    nothing."""
    if plan.cuts_model:
        return "activations and gradients"
    if plan.zero:
        return "gradients and parameters"
    return "" if plan.sync == "server" and plan.replicas in (None, plan.data) else "gradients"
