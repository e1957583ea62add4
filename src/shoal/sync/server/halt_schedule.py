"""After which steps workers out of lockstep wait for one another, or stop.

All workers know beforehand where the whole state is wanted. If a rank asks for a stop or a meeting,
a server names a step that no worker has reached yet, and sends it with the parameters. Pure, but
for the request, and for what the ranks of a replica tell each other.
"""

from collections.abc import Callable

from shoal.comm.collectives import Group
from shoal.comm.mesh import NO_REQUESTS, RankRequests
from shoal.sync.server.client import ServerClient
from shoal.sync.server.messages import AskHalt, Halt


class HaltSchedule:
    """A worker's side. `wanted_after` says after which steps the whole state is wanted."""

    def __init__(self, wanted_after: Callable[[int], bool]):
        self._wanted_after = wanted_after
        self.halt: Halt | None = None  # what the server said last

    def join_group(self) -> None:
        """Some may have met in the group before: forget its meeting."""
        if self.halt is not None and not self.halt.for_good:
            self.halt = None

    def ask(self, client: ServerClient, batch: int, requests: RankRequests) -> None:
        """Let a server name a step, unless it has."""
        if any(requests) and (self.halt is None or self.halt.step <= batch):
            client.answer(client.ask(0, AskHalt, batch=batch, for_good=requests.stop))

    def hear(self, replica: Group) -> None:
        """Know what the first rank of a replica does. Every rank of it must call it."""
        if replica.num_ranks > 1:
            told = [0, 0] if self.halt is None else [self.halt.step, self.halt.for_good]
            step, for_good = replica.all_gather_numbers(told)[0]
            self.halt = Halt(int(step), bool(for_good)) if step else None

    def requests_after(self, step: int) -> RankRequests:
        if self.halt is None or self.halt.step != step:
            return NO_REQUESTS
        return RankRequests(stop=self.halt.for_good, meet=not self.halt.for_good)

    def meets_after(self, step: int) -> bool:
        return self._wanted_after(step) or any(self.requests_after(step))
