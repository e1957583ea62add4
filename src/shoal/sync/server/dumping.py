"""A server's state on its way to workers, a stretch at a time.

What a worker asks for is made once, with its first stretch, and kept until it has the last. Cost:
a state of which some tensors are the server's own, and some copies.
"""

from collections.abc import Callable

from shoal.sync.server.messages import Answer, Dump, Dumped
from shoal.sync.state import State, pack_state
from shoal.sync.stretches import kinds_of, stretch_of


class Dumping:
    def __init__(self) -> None:
        self._states: dict[bytes, State] = {}  # by worker

    def answer(self, sender: bytes, dump: Dump, make: Callable[[Dump], State]) -> Answer:
        """A stretch of what a worker asks for."""
        state = self._states.pop(sender, None) if dump.first else None
        if state is None:
            state = make(dump)
            state = kinds_of(state) if dump.kinds else state
        stretch = stretch_of(state, dump.first)
        if stretch.next:
            self._states[sender] = state
        dumped = Dumped(request=dump.request, next=stretch.next)
        return Answer(sender, dumped, pack_state(stretch.state))
