"""Collectives over several hosts: through memory inside a host, through Gloo between hosts.

Ranks of a host first add up among themselves (`shared_rounds.py`); then each exchanges its share
with the ranks of the same place on the other hosts, so that a gradient crosses the network once a
host: an all-reduce of S bytes over H hosts costs a host 2 (H - 1) / H times S, where a ring over
all N ranks takes 2 (N - 1) / N. Sums are those of one tree over all ranks where a host has 2, 4, 8
... of them. Hosts must have as many ranks as each other, neighbours in the group; else Gloo moves
all. Messages to one rank alone, of pipelines and all-to-all, cost what they cost without this.

An operation goes through four lanes, in each of which all begin and end in one order: while the
sum of one bucket crosses the network, the next one is added up inside the host. Read next:
`shared_group.py`, which drives them.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.shared_rounds import (
    SUM,
    Mailbox,
    Operator,
    SharedRounds,
    Steps,
    flat_of,
    put_back,
    reduce_rows,
    shares_of,
)
from shoal.errors import ShoalError
from shoal.formatting import name_ranks
from shoal.system.identity import boot_id

INSIDE, ADDING, SPREADING, BACK = range(4)  # lanes: in a host, twice between hosts, in a host
NUM_LANES = 4
Gloo = Any  # a dist.ProcessGroupGloo, of whose operations torch's stubs do not know
DIRECT_BYTES = 64 << 10  # that go whole to each other host, in one message instead of two
_TAG = 1


class PeerLost(ShoalError):
    """A rank of another host does not answer any more."""


class HostLayout(NamedTuple):
    """The hosts of a group: the host of each rank, counted from 0 in the order of ranks."""

    host_of: tuple[int, ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> Self:
        numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
        return cls(tuple(numbers[name] for name in names))

    @property
    def counts(self) -> list[int]:
        """The ranks of each host."""
        found = Counter(self.host_of)
        return [found[host] for host in sorted(found)]

    @property
    def num_hosts(self) -> int:
        return len(self.counts)

    def why_flat(self) -> str:
        """Why these hosts exchange as if each rank were on one of its own; empty if they do not."""
        counts = self.counts
        if max(counts) == 1:
            return "no two of them share a host."
        if len({*counts}) > 1:
            return f"hosts have unlike numbers of ranks: {', '.join(map(str, counts))}."
        if list(self.host_of) != sorted(self.host_of):
            return "ranks of a host are not neighbours. Number them host by host."
        return ""


def this_host() -> str:
    """The same for all processes that could share memory, and have one network in common."""
    found = [boot_id()]
    for name in ("pid", "net"):
        with suppress(OSError):
            found.append(os.readlink(f"/proc/self/ns/{name}"))
    return " ".join(found)


class Links(NamedTuple):
    """Connections to other hosts. Those of `adding` and `spreading` join the ranks that have one
    place on all hosts; each is used in one lane alone, since Gloo matches operations by order."""

    adding: Gloo
    spreading: Gloo
    all: Gloo

    @classmethod
    def form(cls, store: dist.Store, rank: int, layout: HostLayout, timeout: timedelta) -> Self:
        host, place = divmod(rank, layout.counts[0])
        peers, num_hosts = dist.PrefixStore(f"peers/{place}", store), layout.num_hosts
        return cls(
            _gloo(dist.PrefixStore("adding", peers), host, num_hosts, timeout),
            _gloo(dist.PrefixStore("spreading", peers), host, num_hosts, timeout),
            _gloo(dist.PrefixStore("all", store), rank, len(layout.host_of), timeout),
        )


def _gloo(store: dist.Store, rank: int, num_ranks: int, timeout: timedelta) -> Gloo:
    return dist.ProcessGroupGloo(store, rank, num_ranks, timeout=timeout)


class HierarchicalRounds:
    """What `SharedRounds` is for one host. All ranks make the same operations, in one order."""

    def __init__(self, inward: SharedRounds, outward: SharedRounds, links: Links, rank: int):
        self._inward, self._outward, self._links, self.rank = inward, outward, links, rank
        self._num_local = inward.num_ranks
        self.num_ranks: int = links.all.size()
        self.num_hosts = self.num_ranks // self._num_local
        self._host, self._place = divmod(rank, self._num_local)

    @property
    def adds_by_tree(self) -> bool:
        return self._num_local & (self._num_local - 1) == 0

    def leave(self) -> None:
        """Let the ranks of this host know that nothing more comes from here."""
        self._inward.leave()
        self._outward.leave()

    def pids(self) -> dict[int, int]:
        """The processes of this host's ranks that have come so far, by rank."""
        first = self._host * self._num_local
        return {first + local: pid for local, pid in self._inward.pids().items()}

    def late(self, lane: int) -> list[int]:
        """The ranks that an operation in this lane waits for."""
        if lane in (INSIDE, BACK):
            rounds = self._inward if lane == INSIDE else self._outward
            return [self._host * self._num_local + local for local in rounds.late()]
        return [rank for rank in self._peers if rank != self.rank]

    def mailbox(self, source: int, to: int) -> "Mailbox | GlooBox":
        n = self._num_local
        if source // n == to // n:
            return self._inward.mailbox(source % n, to % n)
        return GlooBox(self._links.all, source, to)

    # ---- operations: each goes through all lanes

    def all_reduce(self, tensor: Tensor, operator: Operator) -> Steps:
        flat, is_copy = flat_of(tensor)
        shares = shares_of(flat, self._num_local)
        own = shares[self._place]
        yield from self._inward.reduce_scatter(own, shares, (operator[0], 0))
        is_direct = own.nbytes * (self.num_hosts - 1) <= DIRECT_BYTES
        parts = [own] * self.num_hosts if is_direct else shares_of(own, self.num_hosts)
        works, rows = self._exchange(own.repeat(self.num_hosts) if is_direct else own, parts)
        yield ADDING
        yield from _until(works, self._peers)
        reduce_rows(parts[self._host], rows, operator)
        works = [] if is_direct else self._spread(parts)
        yield SPREADING
        yield from _until(works, self._peers)
        yield BACK
        yield from self._outward.all_gather(shares, own)
        put_back(tensor, flat, is_copy)

    def reduce_scatter(self, output: Tensor, rows: Sequence[Tensor], operator: Operator) -> Steps:
        """`rows` are by rank, flat, maybe of unlike lengths."""
        flat, is_copy = flat_of(output)
        lengths = [len(row) for row in rows[self._place :: self._num_local]]
        sums = flat.new_empty(sum(lengths))
        parts = sums.split(lengths)
        for own, of_host in zip(parts, self._by_host(rows), strict=True):
            yield from self._inward.reduce_scatter(own, of_host, (operator[0], 0))
        works, arrived = self._exchange(sums, parts)
        yield ADDING
        yield from _until(works, self._peers)
        reduce_rows(flat, arrived, operator)
        put_back(output, flat, is_copy)
        yield SPREADING
        yield BACK

    def broadcast(self, tensor: Tensor, source: int) -> Steps:
        flat, is_copy = flat_of(tensor)
        host, place = divmod(source, self._num_local)
        yield ADDING
        works = self._send_from(host, flat) if place == self._place else []
        yield SPREADING
        yield from _until(works, self._peers)
        yield BACK
        yield from self._outward.broadcast(flat, place)
        put_back(tensor, flat, is_copy and self.rank != source)

    def all_gather(self, outputs: Sequence[Tensor], own: Tensor) -> Steps:
        """Tensors of ranks may be of unlike lengths."""
        of_place = [flat_of(output)[0] for output in outputs[self._place :: self._num_local]]
        of_place[self._host].copy_(flat_of(own)[0])
        yield ADDING
        works = self._spread(of_place)
        yield SPREADING
        yield from _until(works, self._peers)
        yield BACK
        for found, of_host in zip(of_place, self._by_host(outputs), strict=True):
            yield from self._outward.all_gather(of_host, found)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Steps:
        """What is for ranks of this host goes through memory."""
        flats = [flat_of(tensor) for tensor in outputs]
        sent = [flat_of(tensor)[0] for tensor in inputs]
        arrived = [flat for flat, _ in flats]
        own = slice(self._host * self._num_local, (self._host + 1) * self._num_local)
        yield from self._inward.all_to_all(arrived[own], sent[own])
        arrived[own] = sent[own] = [sent[0][:0]] * self._num_local
        lengths = [len(flat) for flat in arrived]
        found = sent[0].new_empty(sum(lengths))
        with _as_lost(range(self.num_ranks)):
            work = self._links.all.alltoall_base(
                found, torch.cat(sent), lengths, [len(flat) for flat in sent]
            )
        yield ADDING
        yield from _until([work], range(self.num_ranks))
        for flat, part in zip(arrived, found.split(lengths), strict=True):
            flat.copy_(part)
        for output, (flat, is_copy) in zip(outputs, flats, strict=True):
            put_back(output, flat, is_copy)
        yield SPREADING
        yield BACK

    def barrier(self) -> Steps:
        yield from self.all_reduce(torch.zeros(self._num_local), SUM)

    # ---- between hosts

    def _exchange(
        self, sent: Tensor, parts: Sequence[Tensor]
    ) -> tuple[list[dist.Work], Sequence[Tensor]]:
        """Part h of what is sent goes to host h, and the own part of each host comes."""
        lengths, own = [len(part) for part in parts], len(parts[self._host])
        rows = sent.new_empty(self.num_hosts, own)
        if not len(sent):
            return [], rows.unbind()
        with _as_lost(self._peers):
            work = self._links.adding.alltoall_base(
                rows.view(-1), sent, [own] * self.num_hosts, lengths
            )
        return [work], rows.unbind()

    def _spread(self, parts: Sequence[Tensor]) -> list[dist.Work]:
        """Each host has the part of its own number; afterwards all have all of them."""
        return [work for host, part in enumerate(parts) for work in self._send_from(host, part)]

    def _send_from(self, host: int, flat: Tensor) -> list[dist.Work]:
        if not len(flat):
            return []
        with _as_lost(self._peers):
            return [self._links.spreading.broadcast(flat, host)]

    @property
    def _peers(self) -> range:
        """The ranks of this one's place on all hosts."""
        return range(self._place, self.num_ranks, self._num_local)

    def _by_host(self, of_ranks: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        n = self._num_local
        return [of_ranks[host * n : (host + 1) * n] for host in range(self.num_hosts)]


class GlooBox:
    """What one rank sends to another on another host, in order."""

    def __init__(self, gloo: Gloo, source: int, to: int):
        self._gloo, self._source, self._to = gloo, source, to

    def send(self, tensor: Tensor) -> Steps:
        """It leaves at once, whenever these steps are taken."""
        flat = flat_of(tensor)[0]
        if not len(flat):
            return _until([], [self._to])
        with _as_lost([self._to]):
            return _until_waited(self._gloo.send([flat], self._to, _TAG), self._to)

    def receive(self, tensor: Tensor) -> Steps:
        flat, is_copy = flat_of(tensor)
        if len(flat):
            with _as_lost([self._source]):
                work = self._gloo.recv([flat], self._source, _TAG)
            yield from _until_waited(work, self._source)
        put_back(tensor, flat, is_copy)


def _until(works: Sequence[dist.Work], ranks: Sequence[int]) -> Steps:
    for work in works:
        while not work.is_completed():
            yield None
        with _as_lost(ranks):
            work.wait()


def _until_waited(work: dist.Work, rank: int) -> Steps:
    """Gloo says of a message whether it is done only to who waits, and no wait may end early."""
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            work.wait()
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=wait, name="shoal-message", daemon=True)
    thread.start()
    while thread.is_alive():
        yield None
    with _as_lost([rank]):
        for error in failed:
            raise error


@contextmanager
def _as_lost(ranks: Sequence[int]) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        told = str(error).splitlines()[0].partition("] ")[2] or str(
            error
        )  # without Gloo's own line
        raise PeerLost(f"no answer from another host, of {name_ranks(ranks)}: {told}") from error
