"""The members of a run, numbered in the order of their start, each on one host. Pure."""

from collections.abc import Callable, Iterable, Sequence, Set

from shoal.elastic.actions import Action, MemberState, Spawn


class Roster:
    """Members in `taken` have a seat, or just left one; the others are spares."""

    def __init__(self) -> None:
        self.members: dict[int, MemberState] = {}
        self._next = 0

    def spawn(self, now: float, host: int) -> Spawn:
        number, self._next = self._next, self._next + 1
        self.members[number] = MemberState(now, host)
        return Spawn(number, host)

    def spawn_spares(
        self,
        now: float,
        hosts: Iterable[int],
        taken: Set[int | None],
        wanted: Callable[[int], int],
    ) -> list[Action]:
        """Spawn until each host has as many spares as wanted there."""
        spawned: list[Action] = []
        for host in hosts:
            num_missing = wanted(host) - len(self.spares(host, taken))
            spawned += [self.spawn(now, host) for _ in range(num_missing)]
        return spawned

    def lose(self, host: int) -> set[int]:
        """Forget the members of a host, which is gone; a number is never given again."""
        gone = {number for number, member in self.members.items() if member.host == host}
        for number in gone:
            del self.members[number]
        return gone

    def choose(self, hosts: Sequence[int], taken: Set[int | None]) -> list[int] | None:
        """A ready spare for each of these places; None if there is one too few."""
        ready = {host: iter(self.ready_spares(host, taken)) for host in hosts}
        chosen = [next(ready[host], -1) for host in hosts]
        return None if -1 in chosen else chosen

    def spares(self, host: int | None, taken: Set[int | None]) -> list[int]:
        """Members of a host that can take a seat, now or once they are ready."""
        own = [number for number, member in self.members.items() if member.host == host]
        return [n for n in own if n not in taken and not self.members[n].suspected]

    def ready_spares(self, host: int | None, taken: Set[int | None]) -> list[int]:
        return [number for number in self.spares(host, taken) if self.members[number].ready]

    def suspects(self) -> list[int]:
        return [number for number, member in self.members.items() if member.suspected]
