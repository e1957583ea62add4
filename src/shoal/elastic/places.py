"""The hosts of a run: room for how many ranks each has, and which seat is on which. Pure.

A slot is room for one rank; servers take none. A seat stays on its host. One whose host is lost
has no place until `membership.py` gives it one, drops it, or another host comes. Cost: arithmetic.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from shoal.elastic.resize_barrier import keep_ranks
from shoal.plans.resize import RunSize, host_of

UNLIMITED = 1 << 30  # slots of a host that is the only one


class Places:
    """`seats` has the host of each seat, None for one without a place; `rooms` the slots."""

    def __init__(self, seats: Sequence[int], slots: Mapping[int, int]):
        self.seats: list[int | None] = [*seats]
        self.rooms = dict(slots)

    @property
    def hosts(self) -> list[int]:
        return sorted(self.rooms)

    @property
    def num_slots(self) -> int:
        return sum(self.rooms.values())

    @property
    def is_complete(self) -> bool:
        """Whether each seat has a place."""
        return None not in self.seats

    def lose(self, host: int) -> None:
        self.rooms.pop(host, None)
        self.seats = [None if place == host else place for place in self.seats]

    def fill(self, size: RunSize) -> None:
        """Give each seat without a place one, on the host with most room for it."""
        ranks, servers = self.seats[: size.num_ranks], self.seats[size.num_ranks :]
        for rank, place in enumerate(ranks):
            ranks[rank] = self._roomiest(ranks) if place is None else place
        for server, place in enumerate(servers):
            servers[server] = self._least_served(servers) if place is None else place
        self.seats = [*ranks, *servers]

    def spread(self, before: RunSize, size: RunSize, replica: int) -> None:
        """Place all ranks again, for processes that are all new; servers stay where they can."""
        servers = self.seats[before.num_ranks :]
        self.seats = [*spread_ranks(self.rooms, size.num_ranks, replica), *servers]
        self.fill(size)

    def resize(self, before: RunSize, after: RunSize) -> None:
        self.seats = [*self._resized(before, after)[0]]

    def of_newcomers(self, before: RunSize, after: RunSize) -> list[int]:
        """The hosts of the seats that another size adds, ranks first."""
        return self._resized(before, after)[1]

    def _resized(self, before: RunSize, after: RunSize) -> tuple[list[int | None], list[int]]:
        ranks = self.seats[: before.num_ranks][: after.num_ranks]
        servers = self.seats[before.num_ranks :][: after.num_servers]
        coming: list[int] = []
        while len(ranks) < after.num_ranks:
            coming.append(self._roomiest(ranks))
            ranks.append(coming[-1])
        while len(servers) < after.num_servers:
            coming.append(self._least_served(servers))
            servers.append(coming[-1])
        return [*ranks, *servers], coming

    def by_room(self, num_ranks: int, count: int) -> list[int]:
        """The ranks in an order in which those after the first `count` are best done without: those
        of hosts that have no room for them, then the last."""
        ranks = self.seats[:num_ranks]
        staying: list[int | None] = [*range(num_ranks)]
        for _ in range(num_ranks - count):
            there = [ranks[rank] for rank in staying if rank is not None]
            full = {host for host in self.hosts if there.count(host) > self.rooms[host]}
            able = [rank for rank in staying if rank is not None]
            staying[max([r for r in able if ranks[r] in full] or able)] = None
        kept = keep_ranks(staying, min(count, num_ranks))
        return [*kept, *(rank for rank in range(num_ranks) if rank not in kept)]

    def _roomiest(self, ranks: Sequence[int | None]) -> int:
        used = Counter(ranks)
        return max(self.hosts, key=lambda host: self.rooms[host] - used[host])

    def _least_served(self, servers: Sequence[int | None]) -> int:
        return min(self.hosts, key=servers.count)


def places_at_first(size: RunSize, num_hosts: int) -> list[int]:
    return [host_of(seat, size, num_hosts) for seat in range(sum(size))]


def slots_at_first(
    seats: Sequence[int], num_ranks: int, slots: Mapping[int, int]
) -> dict[int, int]:
    """The slots of each host: as given, and as many as ranks begin there at least. Pure."""
    hosts, ranks = sorted({*seats, *slots}), seats[:num_ranks]
    if len(hosts) == 1:
        return dict.fromkeys(hosts, UNLIMITED)
    return {host: max(ranks.count(host), slots.get(host, 0)) for host in hosts}


def has_copies(held: Sequence[bool], size: RunSize, copies: int) -> bool:
    """Whether members that are left hold what was trained: a rank, and of each server itself or a
    backup (`sync/server/replication.py`). `held` says for each seat whether it does. Pure."""
    ranks, servers = held[: size.num_ranks], held[size.num_ranks :]
    count = len(servers)
    kept = [any(servers[(s + k) % count] for k in range(copies)) for s in range(count)]
    return any(ranks) and all(kept)


def spread_ranks(rooms: Mapping[int, int], num_ranks: int, replica: int) -> list[int]:
    """Hosts for ranks in order: whole replicas on one host as far as there is room, then in the
    slots that are left. Pure; there are as many slots at least."""
    room = {host: min(rooms[host], num_ranks) for host in sorted(rooms)}
    hosts = [host for host, slots in room.items() for _ in range(slots // replica * replica)]
    hosts += [host for host, slots in room.items() for _ in range(slots % replica)]
    return hosts[:num_ranks]
