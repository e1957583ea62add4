"""Which tensors of a strategy replicas hold alike, and which one rank alone holds.

    plan                  alike on all replicas                       held once
    data                  parameters, buffers, optimizer state
    data, in one memory   buffers, counts of steps                    each rank's share of the rest
    zero=1, 2             parameters, buffers                         optimizer state
    zero=3                what FSDP2 left whole, buffers              shards, and their state
    servers, in lockstep  the workers' parameters, buffers            on servers (`server/shard.py`)
    local steps           the last agreement, as the next one comes   parameters, optimizer state

A line of the data axis with one replica holds everything once. Workers that run ahead of each other
hold nothing alike. Left out are the rows of tables, which are on servers or only reserved, what
stands for another rank's (`absent`), and optimizer state that is kept in files.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from shoal.numerics.offload import is_offloaded
from shoal.numerics.reserved import ReservedParameter
from shoal.parallel.fsdp import held_parameters
from shoal.parallel.striping import tables_of, weights_of
from shoal.sync.allreduce import AllReduce
from shoal.sync.digests import CachedListing, NamedTensor, TensorListing
from shoal.sync.guard import tensors_in
from shoal.sync.local import LocalSGD
from shoal.sync.outer import averaged_parameters
from shoal.sync.strategy import Strategy
from shoal.sync.zero import ZeroSharded


class StateInventory:
    """As of an `attach`; buffers and the optimizer's state are those of when they are asked for.

    A listing that comes again with the same tensors is the same one, so that a reader knows it.
    """

    def __init__(self, strategy: Strategy):
        self._strategy, self._attached = strategy, strategy.attached
        self._names = {m: n for n, m in self._attached.model.named_modules()}
        several = self._attached.mesh.data.num_ranks > 1
        self._shares = several and strategy.in_lockstep and not isinstance(strategy, LocalSGD)
        self._alike, own = list[NamedTensor](), list[NamedTensor]()
        self._host = strategy.host if isinstance(strategy, AllReduce) else None
        for name, tensor, is_whole in self._parameters():
            found = self._alike if self._shares and is_whole else own
            found.append((tensor, ("model", name)))
        if self._host is not None:  # one memory for all: each guards what it alone writes
            self._alike = [(t, n) for t, n in self._alike if n[1] not in self._host.names]
        self.own_weights = TensorListing.of(own)
        self._shared = {id(tensor) for tensor, _ in self._alike}
        self._in_step, self._own_state = CachedListing(), CachedListing()

    @property
    def is_alike(self) -> bool:
        """Whether replicas hold anything alike, now or at times."""
        return self._shares or isinstance(self._strategy, LocalSGD)

    def in_step(self) -> TensorListing:
        """What replicas hold alike when a step is computed and not made yet."""
        if isinstance(self._strategy, LocalSGD):
            is_due = self._strategy.is_ending
            return TensorListing.of(self._strategy.agreed_tensors() if is_due else ())
        buffers = [value for _, _, value in self._buffer_values(at_rest=False)]
        return self._in_step.of(
            [*self._state_values(), *buffers],
            lambda: [*self._alike, *self._state(shared=True), *self._buffers(at_rest=False)],
        )

    def at_rest(self) -> TensorListing:
        """What they hold alike between two steps."""
        if isinstance(self._strategy, LocalSGD):
            return TensorListing.of(_alike_after_agreement(self._strategy))
        state, buffers = self._state(shared=True), self._buffers(at_rest=True)
        return TensorListing.of([*self._alike, *state, *buffers])

    def own_state(self) -> TensorListing:
        """Of the optimizer, what this rank alone holds."""
        return self._own_state.of(self._state_values(), lambda: list(self._state(shared=False)))

    def everything(self) -> Iterator[NamedTensor]:
        """All that can be corrupted, for tests to do so."""
        own = zip(self.own_weights.tensors, self.own_weights.names, strict=True)
        yield from (*self._alike, *((tensor, (name,)) for tensor, name in own))
        yield from (*self._state(shared=True), *self._state(shared=False))
        yield from self._buffers(at_rest=False)
        yield from ((b, ("live", *name)) for b, name in self._buffers(at_rest=True))
        if isinstance(self._strategy, LocalSGD):
            yield from self._strategy.agreed_tensors()
        for parameter, run in self._attached.runs.items():
            if parameter.grad is not None:
                yield parameter.grad, ("gradient", run.name)

    @property
    def _is_served(self) -> bool:
        """Whether servers hold the parameters, and step on them."""
        link = self._strategy.servers
        return link is not None and link.hold_parameters

    def _parameters(self) -> Iterator[tuple[str, Tensor, bool]]:
        """What is held of each, and whether that is all of it."""
        held = self._attached
        if self._is_served and not self._shares:
            return  # they are the servers', and change whenever these step
        here = held_parameters(held.model)
        tables = weights_of(tables_of(held.model).values()) if self._is_served else ()
        for name, p in held.model.named_parameters():
            if (
                name not in held.holding.absent
                and p not in tables
                and not isinstance(p, ReservedParameter)
            ):
                yield name, here[name], here[name] is p

    def _state(self, shared: bool) -> Iterator[NamedTensor]:
        """Of the optimizer: that of parameters which replicas share, or the rest."""
        if self._is_served or is_offloaded(self._attached.optimizer):
            return  # servers have it, or files
        if self._host is not None:
            if shared:
                yield from self._host.counts()
            else:  # weights with it: nothing of the recipe writes to them between two updates
                yield from (*self._host.own_parameters(), *self._host.own_state())
            return
        steps_on_parts = isinstance(self._strategy, ZeroSharded)
        state = self._attached.optimizer.state
        for p, run in self._attached.runs.items():  # whose order is the same on all
            is_shared = id(p) in self._shared and not steps_on_parts
            if is_shared == shared and p in state and not isinstance(p, ReservedParameter):
                yield from tensors_in(state[p], ("optimizer", run.name))

    def _state_values(self) -> list[Any]:
        """By which it is known whether the optimizer has put others in their places."""
        return [value for own in self._attached.optimizer.state.values() for value in own.values()]

    def _buffer_values(self, at_rest: bool) -> Iterable[tuple[nn.Module, str, Tensor]]:
        return self._strategy.buffers.values(at_rest) if self._shares else ()

    def _buffers(self, at_rest: bool) -> Iterator[NamedTensor]:
        for module, name, value in self._buffer_values(at_rest):
            yield value, ("model", *filter(None, (self._names.get(module, ""), name)))


def _alike_after_agreement(strategy: LocalSGD) -> Iterator[NamedTensor]:
    if strategy.is_alike:
        yield from ((p, ("model", name)) for name, p in averaged_parameters(strategy.model).items())
        yield from strategy.agreed_tensors()
