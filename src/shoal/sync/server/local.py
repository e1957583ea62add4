"""Local steps through servers: replicas step on their own, and servers keep what they agreed on.

In lockstep it is `sync/local.py` with servers in the place of the all-reduce, and the same bits;
out of lockstep a replica waits for nobody, and reports its own losses. Either way what replicas
have agreed on is on the servers, so a replica that dies is replaced alone: the newcomer does its
seat's window again, from the anchor and with an optimizer that has seen nothing, and the others
keep what they have learnt.

That needs an order. In lockstep all ranks first agree on losses and buffers, and then push: so as
long as a server misses a push of a window, every rank does all of that window's agreement once more
in a new group, and as soon as none does, nobody does. Cost and codecs: `windows.py`.

With a deadline nobody waits for a late replica, so each reports its own losses and keeps its own
buffers, as out of lockstep; samples are counted by the server that closes rounds.
"""

from contextlib import AbstractContextManager

from torch import Tensor

from shoal.comm.mesh import NOTHING_ASKED, Mesh
from shoal.data.ledger import add_marks
from shoal.logs import warn_once
from shoal.parallel.layout import Slice
from shoal.sync.local import LocalSGD
from shoal.sync.means import Means
from shoal.sync.replicas import REPLICAS, of_replica
from shoal.sync.server.windows import Windows
from shoal.sync.state import Source, State
from shoal.sync.strategy import Agreed, Tally


class LocalThroughServers(LocalSGD):
    """`begins_at` is what servers say of this replica's seat."""

    def __init__(self, num_pieces: int, windows: Windows, exact: bool = True):
        super().__init__(num_pieces, windows.timetable, exact)
        self.windows = windows
        self._meets = windows.bound == 0 and not windows.closes_early
        self._num_samples = self._brought = 0  # since a round was joined; with the step under way
        self._was_in = True  # the last round

    def _find_place(self, mesh: Mesh) -> None:
        self.windows.open(self.model, mesh)
        self.begins_at = self.windows.last_step_before(self.windows.begins_at)

    def detach(self) -> None:
        super().detach()
        self.windows.detach()

    def microbatch(self, first: bool, last: bool) -> AbstractContextManager[object]:
        self.settle()
        return super().microbatch(first, last)

    def settle(self) -> None:
        """Hold the anchor of the window that is due: before anybody looks at weights."""
        self.windows.await_turn()

    @property
    def is_ending(self) -> bool:
        return self._meets and super().is_ending

    @property
    def is_alike(self) -> bool:
        return self._meets and super().is_alike

    def agreed_tensors(self) -> list[tuple[Tensor, tuple[str, ...]]]:
        anchor = self.windows.anchor
        return [(p, ("outer", "anchor", name)) for name, p in anchor.named_parameters()]

    def exchange(self, tally: Tally, want_norm: bool) -> Agreed:
        step = self.step + 1
        if self._meets:
            return super().exchange(tally, want_norm)
        own = self.inner.exchange(tally, want_norm)._replace(num_samples=None, mark=None)
        self._mark = add_marks((self._marked, tally.mark))
        self._brought = self._num_samples + tally.num_samples
        asked = NOTHING_ASKED
        if self._averages(step):
            asked = self.windows.asked_after(step, tally.asked)
        return own._replace(busy_s=[tally.busy_s] * self.group.num_ranks, asked=asked)

    def state_dict(self, served: bool = True) -> State:
        """What a newcomer gets of a peer is what servers do not have."""
        if not served:
            return super().state_dict(served)
        state = self.inner.state_dict()
        own = of_replica("", self.group.rank)
        tensors = {
            name if name.startswith("model.") else own + name: parts
            for name, parts in state.tensors.items()
        }
        if not self._meets and self.group.rank:  # buffers differ: those of rank 0 are kept
            for name in self._untrained():
                tensors.pop(name, None)
        tensors |= self.windows.outer_state(own)
        return State(tensors, state.plain | {REPLICAS: self.group.num_ranks})

    def _agree(self, step: int, ends: bool) -> None:
        if not ends:
            return
        if self._meets and self.begins_at < step:  # a server misses some of this window's pushes
            self._tell_anew()
            self._means = Means(self.group, list(self.model.buffers()))
        self._was_in = self.windows.agree(step, self._brought, self._mark)
        if self.windows.closes_early:
            self._look_at_round()

    def _look_at_round(self) -> None:
        joined = self.windows.last_round
        assert joined is not None
        self.late_mark = joined.mark if self._was_in and self._knows_marks else None
        if not self._was_in:
            warn_once(
                f"Replica {self.group.rank} came after the deadline of a round. What it learnt "
                "goes into a later one, with its samples. Is it often so? Give a longer deadline."
            )

    def _commit(self, step: int, ends: bool) -> None:
        super()._commit(step, ends)
        counts = ends and self._was_in
        self._num_samples = 0 if counts else self._brought
        self._marked = 0 if counts else self._mark
        self.late_mark = self.late_mark if ends else None

    def _join(self, source: Source, step: int) -> None:
        for name, places in self._untrained().items():
            source.fill(name, places)
        self.buffers.hold()
        self._num_samples = 0
        self.windows.join(step)

    def _take_agreed(self, own: Source, mean: Source, step: int) -> int:
        self.windows.load_outer(own, mean, step)
        self._num_samples = 0
        return step

    def _agreed_state(self) -> dict[str, list[Slice]]:
        return {}  # servers have it

    def _untrained(self) -> dict[str, list[Slice]]:
        served = {f"model.{name}" for name, _ in self.windows.anchor.named_parameters()}
        return {name: p for name, p in super()._untrained().items() if name not in served}
