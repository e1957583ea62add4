"""After which steps workers out of lockstep wait for one another, or stop.

Where the whole state is wanted all know it beforehand. Where somebody asks for a stop or a meeting,
a server names a step that nobody has come to yet, and tells it with the parameters. Pure, but for
the question.
"""

from collections.abc import Callable

from shoal.comm.mesh import NOTHING_ASKED, Asked
from shoal.sync.server.line import Line
from shoal.sync.server.messages import Halt, Stop


class Halting:
    """A worker's side. `wanted_after` says after which steps the whole state is wanted."""

    def __init__(self, wanted_after: Callable[[int], bool]):
        self._wanted_after = wanted_after
        self.told: Halt | None = None  # what the server said last

    def join_group(self) -> None:
        """Some may have met in the group before: this one is asked anew."""
        if self.told is not None and not self.told.for_good:
            self.told = None

    def ask(self, line: Line, batch: int, asked: Asked) -> None:
        """Let a server name a step, unless it has."""
        if any(asked) and (self.told is None or self.told.step <= batch):
            line.answer(line.ask(0, Stop, batch=batch, for_good=asked.stop))

    def asked_after(self, step: int) -> Asked:
        if self.told is None or self.told.step != step:
            return NOTHING_ASKED
        return Asked(stop=self.told.for_good, meet=not self.told.for_good)

    def meets_after(self, step: int) -> bool:
        return self._wanted_after(step) or any(self.asked_after(step))
