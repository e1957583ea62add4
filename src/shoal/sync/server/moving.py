"""Keys that change hands when servers come or go.

Keys are cut once, for the number of servers that a run began with; which server holds which follows
from the numbers that there were since, one after another, so that every worker and server knows it
alike and only what must move does. When all batches are applied each server writes down what each
server of the next layout will hold of its keys: values and optimizer state. All of that is on disk
before anybody is told of the new layout, so whoever dies then, a successor finds it. Servers of
local steps do the same when replicas come or go, since they count a window by its replicas.

Cost: a server's state into the page cache, once.
"""

import shutil
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import torch
from torch import nn

from shoal.errors import ShoalError
from shoal.faults import faultpoint
from shoal.storage.files import replacing
from shoal.sync.server.journal import records_of, write_record
from shoal.sync.server.layout import Layout
from shoal.sync.server.placement import place
from shoal.sync.server.server import Server
from shoal.sync.server.shard import Shard, layout_of
from shoal.sync.state import Given, State, Stepped, pack_state, unpack_state
from shoal.sync.stretches import outline_of, read

_Count = TypeVar("_Count")


def layout_after(
    model: nn.Module, optimizer: torch.optim.Optimizer, counts: Sequence[int]
) -> Layout:
    """Of a run that had these numbers of servers, one after another. Pure."""
    first, *later = changes(counts)
    layout = layout_of(model, optimizer, first)
    for count in later:
        layout = relaid(layout, count)
    return layout


def relaid(layout: Layout, num_servers: int) -> Layout:
    """The same keys on another number of servers, of which as few as can be move. Pure."""
    sizes = [key.num_bytes for key in layout.keys]
    holders = place(sizes, range(num_servers), before=layout.holders)
    return layout._replace(holders=holders)


def changes(counts: Sequence[_Count]) -> list[_Count]:
    """Without those that are as the one before."""
    return [count for count, _ in groupby(counts)]


class Shelf(NamedTuple):
    """Where servers of one layout write: the run's directory for them, and the layout's number."""

    directory: Path
    number: int

    def journal(self, server: int) -> Path:
        return self.directory / (f"{server:03d}" + (f".{self.number}" if self.number else ""))

    def part(self, server: int, source: int) -> Path:
        """What another server, of the layout before, wrote down for this one."""
        return self.directory / f"{server:03d}.{self.number}.from-{source:03d}"


class _Part(msgspec.Struct, frozen=True):
    """With the tensors of the state in frames."""

    step: int
    version: int


def write_parts(server: Server, number: int, num_servers: int, shelf: Shelf) -> int:
    """As server `number`, write down what each of so many will hold; the bytes that move.

    ValueError or OSError, and nothing is lost, if that cannot be.
    """
    step = server.clock.committed
    faultpoint("server.parting", step)
    if server.clock.to_plain().applied:
        raise ValueError(f"pieces of batches after {step} are applied already")
    state, num_bytes = Given(server.shard.state_dict()), 0
    after = relaid(server.layout, num_servers)
    for other in range(num_servers):
        keys = [
            key
            for key, holder in enumerate(after.holders)
            if holder == other and server.layout.holders[key] == number
        ]
        runs = [*_runs(server.shard, keys), *server.shard.tables.moved_to(other, num_servers)]
        part = read(state, outline_of(state, runs))
        header = msgspec.msgpack.encode(_Part(step, server.version))
        with replacing(shelf.part(other, number)) as partial, partial.open("wb") as file:
            write_record(file, header, pack_state(part))
        if other != number and runs:
            num_bytes += sum(s.tensor.nbytes for parts in part.tensors.values() for s in parts)
    faultpoint("server.parted", step)
    return num_bytes


def _runs(shard: Shard, keys: Sequence[int]) -> Iterator[tuple[Stepped, tuple[int, ...]]]:
    """What a server steps on of these keys, with its shape."""
    for run, own in shard.runs.items():
        if run not in shard.tables.runs and shard.key_of(run) in keys:
            yield own, tuple(run.shape)


def take_parts(server: Server, number: int, num_before: int, shelf: Shelf) -> None:
    """Begin with what the servers of the layout before wrote down for this one.

    It is removed once there is a journal; of one that was given up nothing is left.
    """
    together = State({}, {})
    parts = []
    for source in range(num_before):
        path = shelf.part(number, source)
        found = list(records_of(path))
        if len(found) != 1:
            raise _lost(f"{path}, what server {source} handed over, is gone or damaged")
        part = msgspec.msgpack.decode(found[0][0], type=_Part)
        state = unpack_state([memoryview(frame) for frame in found[0][1]])
        together.plain.update(state.plain)
        for name, slices in state.tensors.items():
            together.tensors.setdefault(name, []).extend(slices)
        parts.append(part)
    if len({part.step for part in parts}) != 1:
        raise _lost(f"Servers handed over other steps: {[part.step for part in parts]}")
    server.go_on_from(Given(together), parts[0].step, max(part.version for part in parts))


def _lost(what: str) -> ShoalError:
    return ShoalError(
        f"{what}. A server that takes the place of another begins with its journal or with that. "
        "Go on from the newest checkpoint, with the same command and --resume."
    )


def clear(shelf: Shelf, number: int, num_before: int, num_now: int) -> None:
    """Remove what a server needs no more once it has begun: its own, and a leaver's."""
    old = shelf._replace(number=shelf.number - 1)
    for server in {number, *(range(num_now, num_before) if number == 0 else ())}:
        shutil.rmtree(old.journal(server), ignore_errors=True)
    for source in range(num_before):
        shelf.part(number, source).unlink(missing_ok=True)
