"""What servers hold, as workers fetch it for a checkpoint and send it from one."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from shoal import memory
from shoal.comm.collectives import Group
from shoal.parallel.striping import Stripes, Striping, tables_of
from shoal.sync.server.layout import Layout
from shoal.sync.server.line import Line
from shoal.sync.server.messages import Dump, Load
from shoal.sync.server.shard import trained
from shoal.sync.state import Run, Source, State, Stepped, pack_state, unpack_state
from shoal.sync.stretches import Spool, outline_of, read, stretches_of


class ServedState:
    """Each server's state passes through one rank. Every rank must make every call."""

    def __init__(self, model: nn.Module, layout: Layout, line: Line, group: Group):
        self._model, self._layout, self._line, self._group = model, layout, line, group
        self._named, self._tables = trained(model), tables_of(model)

    def fetch(self, **what: bool) -> State:
        """This rank's part of it, or of what else a `Dump` can ask for; nobody goes on before all
        have theirs.

        OSError, and FailedElsewhere on the others, if there is no room for it on a disk.
        """
        spool = Spool()
        with self._group.all_or_none():
            for server in self._servers():
                for stretch in self._stretches(server, **what):
                    spool.add(stretch)
        return spool.state()

    def kinds(self) -> State:
        """The names and types of the tensors that pass through this rank."""
        spool = Spool()
        for server in self._servers():
            for stretch in self._stretches(server, kinds=True):
                spool.add(stretch)
        return spool.state()

    def send(self, source: Source, step: int) -> None:
        """Let servers take over the state after a step, each when its rank comes to it."""
        last = []
        for server in self._servers():
            sent: int | None = None
            for stretch in stretches_of(outline_of(source, self._runs_of(server))):
                frames = pack_state(read(source, stretch.state))
                if sent is not None:
                    self._line.answer(sent)
                    memory.trim()
                begins, ends = sent is None, not stretch.next
                sent = self._line.ask(server, Load, frames, step=step, begins=begins, ends=ends)
            last.append(sent)
        for request in last:
            assert request is not None
            self._line.answer(request)

    def _stretches(self, server: int, **what: Any) -> Iterator[State]:
        first = 0
        while True:
            dumped, frames = self._line.answer(self._line.ask(server, Dump, first=first, **what))
            yield unpack_state(frames)
            first = dumped.next
            if not first:
                return
            memory.trim()  # or the gaps between stretches come to as much as a table

    def others(self) -> Iterator[tuple[str, Tensor]]:
        """What servers do not hold: buffers, and weights that nothing trains."""
        served = {name for name, _ in self._named} | self._tables.keys()
        yield from ((n, p) for n, p in self._model.named_parameters() if n not in served)
        yield from self._model.named_buffers()

    def _servers(self) -> range:
        """Those whose state passes through this rank."""
        return range(self._group.rank, len(self._line), self._group.num_ranks)

    def _runs_of(self, server: int) -> Iterator[tuple[Stepped, tuple[int, ...]]]:
        """What a server steps on, with its shape."""
        for key in self._layout.held_by(server):
            for s in self._layout.segments(key):
                name, p = self._named[s.parameter]
                shape = tuple(p.shape) if s.length == p.numel() else (s.length,)
                yield Run(name, p.shape, s.start), shape
        for name, module in self._tables.items():
            stripes = Striping(module.num_embeddings, len(self._line)).stripes_of(server)
            shape = sum(map(len, stripes)), module.embedding_dim
            if stripes:
                yield Stripes(name, module.num_embeddings, stripes), shape
