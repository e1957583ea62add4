"""The members of a run, numbered in the order of their start, each on one host. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence, Set

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
        self, now: float, taken: Set[int | None], wanted: Iterable[int | None]
    ) -> list[Action]:
        """Spawn until there is a spare for each of these places, of which None is no host."""
        missing = Counter(host for host in wanted if host is not None)
        missing -= Counter(m.host for n, m in self.members.items() if self._is_spare(n, taken))
        return [self.spawn(now, host) for host in sorted(missing.elements())]

    def lose(self, host: int) -> set[int]:
        """Forget the members of a host, which is gone; a number is never given again."""
        gone = {number for number, member in self.members.items() if member.host == host}
        for number in gone:
            del self.members[number]
        return gone

    def choose(self, hosts: Sequence[int], taken: Set[int | None]) -> list[int] | None:
        """A ready spare for each of these places; None if there is one too few."""
        ready = self.ready_spares(taken)
        chosen = [ready[host].pop(0) if ready.get(host) else -1 for host in hosts]
        return None if -1 in chosen else chosen

    def ready_spares(self, taken: Set[int | None]) -> dict[int | None, list[int]]:
        """By host, those that can take a seat now."""
        ready: dict[int | None, list[int]] = {}
        for number, member in self.members.items():
            if member.ready and self._is_spare(number, taken):
                ready.setdefault(member.host, []).append(number)
        return ready

    def _is_spare(self, number: int, taken: Set[int | None]) -> bool:
        return number not in taken and not self.members[number].suspected

    def suspects(self) -> list[int]:
        return [number for number, member in self.members.items() if member.suspected]

    def silent(self, seats: Sequence[int | None], since: float) -> list[int]:
        """Members in these seats that were ready, and not heard of since."""
        seated = [(n, self.members[n]) for n in seats if n is not None and n in self.members]
        return [n for n, member in seated if member.ready and member.last_heard < since]
