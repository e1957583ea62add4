"""The state that servers hold, as workers fetch it for a checkpoint and send it from one."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from shoal.comm.collectives import Group
from shoal.parallel.layout import WHOLE, LocalLayout, slices_of
from shoal.parallel.striping import Stripes, Striping, tables_of
from shoal.sync.rounds import AttachedModel
from shoal.sync.server.client import ServerClient
from shoal.sync.server.layout import ServerLayout
from shoal.sync.server.messages import DumpState, LoadState
from shoal.sync.server.shard import served_parameters
from shoal.sync.state import (
    OptimizedPart,
    ParameterRun,
    ShardedState,
    StateSource,
    TrainState,
    pack_state,
    unpack_state,
)
from shoal.sync.state_chunks import SpillFile, outline_state, read_outline, split_state
from shoal.system.memory import trim

_KINDS = ("model.", "optimizer.")  # of names in a state


class ServedState:
    """Each server's state passes through one rank. Every rank must make every call."""

    def __init__(
        self,
        model: nn.Module,
        layout: ServerLayout,
        client: ServerClient,
        group: Group,
        holding: LocalLayout = WHOLE,
    ):
        """Of these servers, which hold what a rank does. What servers of several parts hold whole,
        those of the first tell of."""
        self._layout, self._client, self._group, self._holding = layout, client, group, holding
        self._named, self._tables = served_parameters(model), tables_of(model)
        self._elsewhere = [n for n, _ in self._named if not holding.is_first(n)]

    def fetch(self, **what: bool) -> ShardedState:
        """This rank's part of it, or of what else a `DumpState` can ask for; returns when all
        have theirs.

        OSError, and FailedElsewhere on the others, if there is no room for it on a disk.
        """
        spill = SpillFile()
        with self._group.raise_on_all():
            for server in self._servers():
                for chunk in self._chunks(server, **what):
                    spill.add(self._without_elsewhere(chunk))
        return spill.state()

    def _without_elsewhere(self, state: ShardedState) -> ShardedState:
        if not self._elsewhere:
            return state
        heads = tuple(f"{kind}{name}." for name in self._elsewhere for kind in _KINDS)
        tensors, plain = (
            {name: value for name, value in kept.items() if not f"{name}.".startswith(heads)}
            for kept in (state.tensors, state.plain)
        )
        return state._replace(tensors=tensors, plain=plain)

    def types(self) -> ShardedState:
        """The names and types of the tensors that pass through this rank."""
        spill = SpillFile()
        for server in self._servers():
            for chunk in self._chunks(server, types=True):
                spill.add(chunk)
        return spill.state()

    def send(self, source: StateSource, step: int) -> None:
        """Let servers take over the state after a step, each when its rank comes to it."""
        last = []
        for server in self._servers():
            sent: int | None = None
            for chunk in split_state(outline_state(source, self._runs_of(server), self._holding)):
                frames = pack_state(read_outline(source, chunk.state))
                if sent is not None:
                    self._client.answer(sent)
                    trim()
                begins, ends = sent is None, not chunk.next
                sent = self._client.ask(
                    server, LoadState, frames, step=step, begins=begins, ends=ends
                )
            last.append(sent)
        for request in last:
            assert request is not None
            self._client.answer(request)

    def _chunks(self, server: int, **what: Any) -> Iterator[ShardedState]:
        first = 0
        while True:
            dumped, frames = self._client.answer(
                self._client.ask(server, DumpState, first=first, **what)
            )
            yield unpack_state(frames)
            first = dumped.next
            if not first:
                return
            trim()  # or the gaps between chunks come to as much as a table

    def _servers(self) -> range:
        """Those whose state passes through this rank."""
        return range(self._group.rank, len(self._client), self._group.num_ranks)

    def _runs_of(self, server: int) -> Iterator[tuple[OptimizedPart, tuple[int, ...]]]:
        """What a server steps on, with its shape."""
        for key in self._layout.held_by(server):
            for s in self._layout.segments(key):
                name, p = self._named[s.parameter]
                shape = tuple(p.shape) if s.length == p.numel() else (s.length,)
                yield ParameterRun(name, p.shape, s.start), shape
        for name, module in self._tables.items():
            stripes = Striping(module.num_embeddings, len(self._client)).stripes_of(server)
            shape = sum(map(len, stripes)), module.embedding_dim
            if stripes:
                yield Stripes(name, module.num_embeddings, stripes), shape


def unserved_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What servers do not hold: buffers, and weights that nothing trains."""
    served = {name for name, _ in served_parameters(model)} | tables_of(model).keys()
    yield from ((n, p) for n, p in model.named_parameters() if n not in served)
    yield from model.named_buffers()


def all_held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """All that a worker has of a model, as servers gave it."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def load_held(
    attached: AttachedModel, source: StateSource, held: Iterable[tuple[str, Tensor]]
) -> None:
    """Take the optimizer's settings, and what this worker holds itself."""
    if source.plain:  # else its own weights come from elsewhere, and no server's through it
        TrainState({}, attached.optimizer, {}).load_groups(source)
    for name, tensor in held:
        source.fill(f"model.{name}", slices_of(name, tensor, attached.holding))
