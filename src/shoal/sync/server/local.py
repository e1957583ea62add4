"""Local steps through servers: replicas step on their own, and servers keep what they agreed on.

In lockstep it is `sync/local.py` with servers in the place of the all-reduce, and the same bits;
out of lockstep a replica waits for nobody, and reports its own losses. Either way what replicas
have agreed on is on the servers, so a replica that dies is replaced alone: the newcomer does its
seat's window again, from the anchor and with an optimizer that has seen nothing, and the others
keep what they have learnt.

That needs an order. In lockstep all ranks first agree on losses and buffers, and then push: so as
long as a server misses a push of a window, every rank does all of that window's agreement once more
in a new group, and as soon as none does, nobody does. Cost and codecs: `windows.py`.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from shoal.errors import AgreementLost, GroupLost
from shoal.logs import warn_on_screen
from shoal.mesh import NOTHING_ASKED, Mesh
from shoal.parallel.layout import WHOLE, Holding, slices_of
from shoal.sync.local import LocalSGD
from shoal.sync.replicas import REPLICAS, Merged, of_replica
from shoal.sync.server.windows import Windows
from shoal.sync.state import Source, State
from shoal.sync.strategy import Agreed, Tally


class LocalThroughServers(LocalSGD):
    """`in_lockstep` is about steps, of which each replica takes its own."""

    in_lockstep = False

    def __init__(self, num_pieces: int, windows: Windows, exact: bool = True):
        super().__init__(num_pieces, windows.timetable, exact)
        self.windows, self._meets = windows, windows.bound == 0
        self._made = 0  # the step that is made, and perhaps not agreed on
        self._said_in = -1  # the generation in which all told each other of a window

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        holding: Holding = WHOLE,
    ) -> None:
        super().attach(model, optimizer, mesh, holding)
        self.holding = holding
        self.windows.open(model, mesh)
        self.begins_at = self.windows.last_step_before(self.windows.begins_at)

    def detach(self) -> None:
        super().detach()
        self.windows.detach()

    def microbatch(self, first: bool, last: bool) -> AbstractContextManager[object]:
        servers = self.windows.mesh.servers
        if first and servers is not None and servers.is_lost():
            # Now, and not when the window ends: a newcomer waits for all to come.
            raise GroupLost("another generation was announced")
        return super().microbatch(first, last)

    def exchange(self, tally: Tally, want_norm: bool) -> Agreed:
        step = self.step + 1
        if self._meets:
            agreed = super().exchange(tally, want_norm)
            self._said_in = self._generation
            return agreed
        own = self.inner.exchange(tally, want_norm)._replace(num_samples=None, mark=None)
        asked = NOTHING_ASKED
        if self._averages(step):
            ask = self.windows.ask_to_stop if tally.asked.stop else self.windows.stops_after
            asked = ask(step)
        return own._replace(busy_s=[tally.busy_s] * self.group.num_ranks, asked=asked)

    def update(self, scale: float, check: bool = True) -> bool:
        """Raises AgreementLost if the step is made and replicas could not agree on the window:
        then call it again, in a new group."""
        step = self.step + 1
        ends = self._averages(step)
        if self._made != step:
            if not self.inner.update(scale, check):
                return False
            self._made = step
        if ends:
            try:
                self._agree(step)
            except GroupLost as lost:
                raise AgreementLost(str(lost)) from lost
        self._commit(step, ends)
        return True

    def state_dict(self, served: bool = True) -> State:
        """What a newcomer gets of a peer is what servers do not have."""
        if not served:
            return State(
                {f"model.{n}": slices_of(n, t, self.holding) for n, t in self._others()}, {}
            )
        state = self.inner.state_dict()
        own = of_replica("", self.group.rank)
        tensors = {
            name if name.startswith("model.") else own + name: parts
            for name, parts in state.tensors.items()
        }
        if not self._meets and self.group.rank:  # buffers differ: those of rank 0 are kept
            for name, _ in self._others():
                tensors.pop(f"model.{name}", None)
        tensors |= self.windows.outer_state(own)
        return State(tensors, state.plain | {REPLICAS: self.group.num_ranks})

    def load_state_dict(self, source: Source, step: int, served: bool = True) -> None:
        if served:
            super().load_state_dict(source, step)
            same = source.plain.get(REPLICAS) == self.group.num_ranks
            own = Merged(source, self.group.rank if same else None)
            self.windows.load_outer(own, Merged(source), step)
            return
        for name, tensor in self._others():
            source.fill(f"model.{name}", slices_of(name, tensor, self.holding))
        self.buffers.hold()
        self.step, self._marked, self._knows_marks = step, 0, True
        self.windows.join(step)
        warn_on_screen(
            f"Replica {self.group.rank} goes on from step {step}, where replicas agreed last, with "
            "an optimizer that has seen nothing yet. The others keep what they have learnt."
        )

    @property
    def _generation(self) -> int:
        servers = self.windows.mesh.servers
        assert servers is not None
        return servers.generation

    def _agree(self, step: int) -> None:
        misses_some = self.begins_at < step  # of this window's pushes, as a server said at first
        if self._meets and misses_some:
            if self._said_in != self._generation:
                self.group.gather_numbers(self._mine)  # a newcomer asks
                self._said_in = self._generation
            self._average(list(self.model.buffers()))
        self.windows.agree(step)

    def _others(self) -> Iterator[tuple[str, Tensor]]:
        """What servers do not hold: buffers, and weights that nothing trains."""
        served = {name for name, _ in self.windows.anchor.named_parameters()}
        yield from ((n, p) for n, p in self.model.named_parameters() if n not in served)
        yield from self.model.named_buffers()
