"""A server's state on its way to workers, a chunk at a time.

The state is made once, with a worker's first request, and kept until it has the last chunk. Cost: a
state of which some tensors are the server's own, and some copies.
"""

from collections.abc import Callable

from shoal.sync.server.messages import DumpedState, DumpState, Reply
from shoal.sync.state import ShardedState, pack_state
from shoal.sync.state_chunks import chunk_at, without_values


class StateDumps:
    def __init__(self) -> None:
        self._states: dict[bytes, ShardedState] = {}  # by worker

    def answer(
        self, sender: bytes, dump: DumpState, make: Callable[[DumpState], ShardedState]
    ) -> Reply:
        """A chunk of what a worker asks for."""
        state = self._states.pop(sender, None) if dump.first else None
        if state is None:
            state = make(dump)
            state = without_values(state) if dump.types else state
        chunk = chunk_at(state, dump.first)
        if chunk.next:
            self._states[sender] = state
        dumped = DumpedState(request=dump.request, next=chunk.next)
        return Reply(sender, dumped, pack_state(chunk.state))
