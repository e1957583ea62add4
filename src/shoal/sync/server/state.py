"""What servers hold, as workers fetch it for a checkpoint and send it from one."""

from collections.abc import Iterator

from torch import Tensor, nn

from shoal.comm.collectives import Group
from shoal.parallel.striping import Stripes, Striping, tables_of
from shoal.sync.server.layout import Layout
from shoal.sync.server.line import Line
from shoal.sync.server.messages import Dump, Load
from shoal.sync.server.shard import trained
from shoal.sync.state import Run, Source, State, Stepped, cut_state, pack_state, unpack_state


class ServedState:
    """Each server's state passes through one rank. Every rank must make every call."""

    def __init__(self, model: nn.Module, layout: Layout, line: Line, group: Group):
        self._model, self._layout, self._line, self._group = model, layout, line, group
        self._named, self._tables = trained(model), tables_of(model)

    def fetch(self, gradients: bool = False, tables: bool = False) -> State:
        """This rank's part of it; nobody goes on before all have theirs."""
        state = State({}, {})
        try:
            for server in self._servers():
                asked = self._line.ask(server, Dump, gradients=gradients, tables=tables)
                found = unpack_state(self._line.answer(asked)[1])
                state.plain.update(found.plain)
                for name, parts in found.tensors.items():
                    state.tensors.setdefault(name, []).extend(parts)
        finally:
            self._group.gather_numbers([0])
        return state

    def send(self, source: Source, step: int) -> None:
        """Let servers take over the state after a step, each when its rank comes to it."""
        asked = []
        for server in self._servers():
            frames = pack_state(cut_state(source, self._runs_of(server)))
            asked.append(self._line.ask(server, Load, frames, step=step))
        for request in asked:
            self._line.answer(request)

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
