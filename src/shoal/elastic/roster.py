"""The members of a run, numbered in the order of their start, each on one host. Pure."""

from collections.abc import Callable, Sequence, Set

from shoal.elastic.actions import Action, MemberState, Spawn


class Roster:
    """Members in `taken` have a seat, or just left one; the others are spares."""

    def __init__(self, hosts: Sequence[int]):
        self.members: dict[int, MemberState] = {}
        self._hosts, self._next = hosts, 0

    def spawn(self, now: float, host: int) -> Spawn:
        number, self._next = self._next, self._next + 1
        self.members[number] = MemberState(now, host)
        return Spawn(number, host)

    def spawn_spares(
        self, now: float, taken: Set[int | None], wanted: Callable[[int], int]
    ) -> list[Action]:
        """Spawn until each host has as many spares as wanted there."""
        spawned: list[Action] = []
        for host in self._hosts:
            num_missing = wanted(host) - len(self.spares(host, taken))
            spawned += [self.spawn(now, host) for _ in range(num_missing)]
        return spawned

    def spares(self, host: int, taken: Set[int | None]) -> list[int]:
        """Members of a host that can take a seat, now or once they are ready."""
        own = [number for number, member in self.members.items() if member.host == host]
        return [n for n in own if n not in taken and not self.members[n].suspected]

    def ready_spares(self, host: int, taken: Set[int | None]) -> list[int]:
        return [number for number in self.spares(host, taken) if self.members[number].ready]

    def suspects(self) -> list[int]:
        return [number for number, member in self.members.items() if member.suspected]
