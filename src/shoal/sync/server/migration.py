"""Migration of keys when the number of servers changes.

Keys are cut once, for the number of servers that a run began with; which server holds which follows
from the sequence of numbers since, so every worker and server computes it alike and as few keys as
possible move. When all batches are applied each server writes a file for each server of the next
layout, with values and optimizer state of the keys that it will hold. All files are complete before
any process gets the new layout, so a successor finds them after any death. Servers of local steps
do the same when the number of replicas changes, since a window has one piece for each replica.

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
from shoal.storage.files import atomic_replace
from shoal.sync.server.journal import records_of, write_record
from shoal.sync.server.layout import ServerLayout
from shoal.sync.server.placement import place_keys
from shoal.sync.server.server import Server
from shoal.sync.server.shard import ServerShard, layout_of
from shoal.sync.state import MemorySource, OptimizedPart, ShardedState, pack_state, unpack_state
from shoal.sync.state_chunks import outline_state, read_outline

_Count = TypeVar("_Count")


def layout_after(
    model: nn.Module, optimizer: torch.optim.Optimizer, counts: Sequence[int]
) -> ServerLayout:
    """Of a run that had these numbers of servers, one after another. Pure."""
    first, *later = without_repeats(counts)
    layout = layout_of(model, optimizer, first)
    for count in later:
        layout = rebalance(layout, count)
    return layout


def rebalance(layout: ServerLayout, num_servers: int) -> ServerLayout:
    """The same keys on another number of servers, of which as few as can be move. Pure."""
    sizes = [key.num_bytes for key in layout.keys]
    holders = place_keys(sizes, range(num_servers), before=layout.holders)
    return layout._replace(holders=holders)


def without_repeats(counts: Sequence[_Count]) -> list[_Count]:
    """Without those that are as the one before."""
    return [count for count, _ in groupby(counts)]


class LayoutFiles(NamedTuple):
    """Where servers of one layout write: the run's directory for them, and the layout's number."""

    directory: Path
    number: int

    def journal(self, server: int) -> Path:
        return self.directory / (f"{server:03d}" + (f".{self.number}" if self.number else ""))

    def part(self, server: int, source: int) -> Path:
        """What another server, of the layout before, wrote down for this one."""
        return self.directory / f"{server:03d}.{self.number}.from-{source:03d}"


class _PartHeader(msgspec.Struct, frozen=True):
    """With the tensors of the state in frames."""

    step: int
    version: int


def write_parts(server: Server, number: int, num_servers: int, files: LayoutFiles) -> int:
    """As server `number`, write down what each of so many will hold; the bytes that move.

    ValueError or OSError, and nothing is lost, if that cannot be.
    """
    step = server.clock.committed
    faultpoint("server.parting", step)
    if server.clock.to_plain().applied:
        raise ValueError(f"pieces of batches after {step} are applied already")
    state, num_bytes = MemorySource(server.shard.state_dict()), 0
    after = rebalance(server.layout, num_servers)
    for other in range(num_servers):
        keys = [
            key
            for key, holder in enumerate(after.holders)
            if holder == other and server.layout.holders[key] == number
        ]
        runs = [*_runs(server.shard, keys), *server.shard.tables.moved_to(other, num_servers)]
        part = read_outline(state, outline_state(state, runs))
        header = msgspec.msgpack.encode(_PartHeader(step, server.version))
        with atomic_replace(files.part(other, number)) as partial, partial.open("wb") as file:
            write_record(file, header, pack_state(part))
        if other != number and runs:
            num_bytes += sum(s.tensor.nbytes for parts in part.tensors.values() for s in parts)
    faultpoint("server.parted", step)
    return num_bytes


def _runs(
    shard: ServerShard, keys: Sequence[int]
) -> Iterator[tuple[OptimizedPart, tuple[int, ...]]]:
    """What a server steps on of these keys, with its shape."""
    for run, own in shard.runs.items():
        if run not in shard.tables.runs and shard.key_of(run) in keys:
            yield own, tuple(run.shape)


def load_parts(server: Server, number: int, num_before: int, files: LayoutFiles) -> None:
    """Begin with what the servers of the layout before wrote down for this one.

    It is removed once there is a journal; of one that was given up nothing is left.
    """
    together = ShardedState({}, {})
    parts = []
    for source in range(num_before):
        path = files.part(number, source)
        found = list(records_of(path))
        if len(found) != 1:
            raise _lost(f"{path}, what server {source} handed over, is gone or damaged")
        part = msgspec.msgpack.decode(found[0][0], type=_PartHeader)
        state = unpack_state([memoryview(frame) for frame in found[0][1]])
        together.plain.update(state.plain)
        for name, slices in state.tensors.items():
            together.tensors.setdefault(name, []).extend(slices)
        parts.append(part)
    if len({part.step for part in parts}) != 1:
        raise _lost(f"Servers handed over other steps: {[part.step for part in parts]}")
    server.resume_from(MemorySource(together), parts[0].step, max(part.version for part in parts))


def _lost(what: str) -> ShoalError:
    return ShoalError(
        f"{what}. A server that takes the place of another begins with its journal or with that. "
        "Resume from the newest checkpoint, with the same command and --resume."
    )


def remove_parts(files: LayoutFiles, number: int, num_before: int, num_now: int) -> None:
    """Remove what a server needs no more once it has begun: its own, and a leaver's."""
    old = files._replace(number=files.number - 1)
    for server in {number, *(range(num_now, num_before) if number == 0 else ())}:
        shutil.rmtree(old.journal(server), ignore_errors=True)
    for source in range(num_before):
        files.part(number, source).unlink(missing_ok=True)
