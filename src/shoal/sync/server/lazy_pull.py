"""Lazy pull: parameters arrive from servers while the next forward runs.

A step is committed when every server has replied that it made the step. Then its parameters are
fetched a few keys at a time, in the order in which a forward uses them, and a reader waits for the
parameter it reads: a module for its own when it is entered, and every function of torch for those
among its arguments. These are known by their memory, so it does not matter in which forward they
are read. When the first forward and backward have ended, all are here.

If the group breaks meanwhile, parameters are of two steps, of which the newer is committed. They
are pulled again before they are read (`strategy.py`).

Not noticed: that C++ code reads a parameter by its address, outside of the forward of the module
that owns it. Functions that torch compiled or scripted may read any parameter, and a module that is
not training may choose another kernel while functions are watched: with such modules a forward
waits for everything. Cost: about two microseconds for each function called in that forward.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, jit, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from shoal.numerics.storage_address import storage_address
from shoal.sync.server.client import ServerClient
from shoal.sync.server.layout import ServerLayout
from shoal.sync.server.messages import Fetch
from shoal.sync.server.shard import served_parameters
from shoal.sync.server.worker_memory import WorkerMemory

PART_BYTES = 1 << 22  # of keys that are fetched together
MOST_ASKED = 16  # of such parts, so that servers need not hold many ready

Frame = tuple[int, memoryview]  # of a key


class _KeyGroup(NamedTuple):
    first: int  # of its parameters the one that a forward uses first; parts are sorted by it
    server: int
    version: int
    keys: list[int]


class KeyFetcher:
    """What servers were asked for and have not sent yet. Used by one thread at a time."""

    def __init__(self, client: ServerClient, layout: ServerLayout):
        self._client, self._layout = client, layout
        self._orders = [
            layout.forward_order(layout.held_by(server)) for server in range(len(client))
        ]
        self._parts: deque[_KeyGroup] = deque()
        self._asked: deque[int] = deque()  # requests, for the first ones of these parts
        self.missing: set[int] = set()  # keys

    def expect(self, server: int, version: int, frames: Sequence[memoryview]) -> list[Frame]:
        """After a server's answer: what came with it; the rest is on its way."""
        order = self._orders[server]
        came, rest = order[: len(frames)], order[len(frames) :]
        self._parts.extend(self._cut(server, version, rest))
        self.missing.update(rest)
        return list(zip(came, frames, strict=True))

    def begin(self) -> None:
        """After all servers' answers: fetch what is missing, in the order of the forward."""
        self._parts = deque(sorted(self._parts))
        self._ask()

    def take(self, put: Callable[[int, memoryview], None]) -> None:
        """Wait for the next part; `put` is given its keys."""
        _, frames = self._client.answer(self._asked[0])
        part = self._parts.popleft()
        self._asked.popleft()
        self._ask()
        for key, frame in zip(part.keys, frames, strict=True):
            put(key, frame)
        self.missing.difference_update(part.keys)  # last: other threads read it without the lock

    def gather(self) -> list[Frame]:
        """Wait for all."""
        found: list[Frame] = []
        while self.missing:
            self.take(lambda key, frame: found.append((key, frame)))
        return found

    def _ask(self) -> None:
        while len(self._asked) < min(MOST_ASKED, len(self._parts)):
            part = self._parts[len(self._asked)]
            self._asked.append(
                self._client.ask(part.server, Fetch, version=part.version, keys=part.keys)
            )

    def _cut(self, server: int, version: int, keys: Sequence[int]) -> Iterator[_KeyGroup]:
        together: list[int] = []
        for key in keys:
            num_bytes = sum(self._layout.keys[k].num_bytes for k in (*together, key))
            if together and num_bytes > PART_BYTES:
                yield _KeyGroup(self._first(together[0]), server, version, together)
                together = []
            together.append(key)
        if together:
            yield _KeyGroup(self._first(together[0]), server, version, together)

    def _first(self, key: int) -> int:
        return min(s.parameter for s in self._layout.segments(key))


class LazyPull(TorchFunctionMode):
    """A model's parameters as servers give them. As a context: reading one waits for it."""

    def __init__(
        self, model: nn.Module, layout: ServerLayout, client: ServerClient, memory: WorkerMemory
    ):
        super().__init__()
        self._fetcher, self._memory = KeyFetcher(client, layout), memory
        self._modules = list(model.modules())
        self._keys: dict[int, set[int]] = {}  # by the address of the storage that they are for
        parameters = [p for _, p in served_parameters(model)]
        for key in range(len(layout.keys)):
            for s in layout.segments(key):
                self._keys.setdefault(storage_address(parameters[s.parameter]), set()).add(key)
        self._has_addresses = 0 not in self._keys  # which parameter is read: each has an address
        self.is_complete = True  # all parameters are of one step
        self._lock = threading.RLock()  # a model may have threads of its own

    def take(self, answers: Sequence[tuple[Any, list[memoryview]]], at_once: bool) -> None:
        """Take what servers answer who were asked for parameters.

        If `at_once`, all of it, or nothing is changed. Else some may come while it is read.
        """
        came = []
        for server, (values, frames) in enumerate(answers):
            if not self._memory.shares_with(server):
                came += self._fetcher.expect(server, values.version, frames)
        self._fetcher.begin()
        if at_once:
            came += self._fetcher.gather()
        for server, (values, _) in enumerate(answers):
            if self._memory.shares_with(server):
                self._memory.show(server, values.number)
        for key, frame in came:
            self._memory.put(key, frame)
        self.is_complete = not self._fetcher.missing

    def wait(self) -> None:
        """Wait until all parameters are here."""
        while not self.is_complete:
            self._fetcher.take(self._memory.put)
            self.is_complete = not self._fetcher.missing

    @contextmanager
    def watch(self, round_: AbstractContextManager[object]) -> Iterator[None]:
        """A round, during which parameters may still come; after it they are here."""
        if not (self._has_addresses and all(map(_is_plain, self._modules))):
            self.wait()
        hook = register_module_forward_pre_hook(self._enter)
        try:
            with self, round_:
                yield
        finally:
            hook.remove()
        self.is_complete = not self._fetcher.missing
        self.wait()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._fetcher.missing:
            self._wait_for_values(args)
            if kwargs:
                self._wait_for_values(kwargs.values())
        return func(*args, **(kwargs or {}))

    def _enter(self, module: nn.Module, _: Any) -> None:
        if self._fetcher.missing:
            with torch._C.DisableTorchFunction():  # what is done here is not the model's
                self._wait_for_values(module._parameters.values())

    def _wait_for_values(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self._wait_for(self._keys.get(storage_address(value)))
            elif isinstance(value, list | tuple):
                self._wait_for_values(value)
            elif isinstance(value, dict):
                self._wait_for_values(value.values())

    def _wait_for(self, keys: set[int] | None) -> None:
        if keys is not None:
            with self._lock:
                while not self._fetcher.missing.isdisjoint(keys):
                    self._fetcher.take(self._memory.put)


def _is_plain(module: nn.Module) -> bool:
    """Whether it runs as it is written, and as it would without a function mode."""
    is_compiled = module._compiled_call_impl is not None or "_orig_mod" in module._modules
    return module.training and not is_compiled and not isinstance(module, jit.ScriptModule)
