"""The collectives Shoal uses, on one group, with what they cost.

A thin layer over torch.distributed with two duties: an error of the transport becomes
`GroupLost`, so that the trainer can tell a broken group from a broken recipe, and the bytes that
leave this rank are counted. Each collective is on record while it lasts (`flight_recorder.py`), and
one that does not end by the deadline is lost, with what it was and who did not come. A group of one
communicates nothing.

Every method must be called by all ranks of the group, in the same order.
"""

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from time import monotonic

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shoal.comm.flight_recorder import RECORDER, CollectiveRecord
from shoal.comm.shared_group import SharedGroup, new_shared_group
from shoal.comm.shared_rounds import MOST_CONTENT
from shoal.errors import FailedElsewhere, GroupLost, ShoalError, TookTooLong, UsageError


class UnlikeOperations(ShoalError):
    """Ranks of a group met in different operations."""


def _deadline_s(given: str) -> float:
    with suppress(ValueError):
        if float(given) > 0:
            return float(given)
    raise UsageError(
        f"SHOAL_EXCHANGE_TIMEOUT_S={given!r} in the environment is no number of seconds. It says "
        "how long a rank waits for others in an exchange; the default is 600."
    )


DEADLINE_S = _deadline_s(os.environ.get("SHOAL_EXCHANGE_TIMEOUT_S", "600"))
# What a transport is given, which does not say who is missing: it is not to speak first.
COLLECTIVE_TIMEOUT = timedelta(seconds=DEADLINE_S + 30)
LOOK = timedelta(seconds=0.5)  # between two checks whether the group of a wait is lost
DRAIN_S = 2.0
SMALL_BYTES = 128 * 1024  # to send in a sum that waits for messages rather than for bytes


@contextmanager
def as_group_lost(doing: str, record: CollectiveRecord | None = None) -> Iterator[None]:
    """Turn what the transport raises when a peer is gone into `GroupLost`."""
    try:
        yield
    except RuntimeError as error:
        told = f"{doing} {record.named}" if record is not None else doing
        raise GroupLost(f"the group broke while {told}: {str(error).splitlines()[0]}") from error


def fits_direct_exchange(num_bytes: int, num_ranks: int) -> bool:
    """Whether each rank sends its whole tensor to each other rank, which adds them up. Pure.

    The latency of one message instead of a ring's 2 (n - 1), for n / 2 times the bytes.
    """
    return num_bytes * (num_ranks - 1) <= SMALL_BYTES


def bytes_of_all_reduce(num_bytes: int, num_ranks: int) -> int:
    """The bytes that a rank sends in an all-reduce. Pure."""
    if fits_direct_exchange(num_bytes, num_ranks):
        return num_bytes * (num_ranks - 1)
    return int(num_bytes * 2 * (num_ranks - 1) / num_ranks)


class Pending:
    """Operations under way on some tensors. `wait` once before the tensors are read.

    Gloo forgets what it had begun to send when a connection breaks, and would wait for it until
    the group's timeout. So `wait` polls whether the group is lost, or the deadline has passed;
    except for messages between two ranks, which a wait that ends early would break.
    """

    def __init__(
        self,
        works: Sequence[dist.Work] = (),
        then: Sequence[Callable[[], object]] = (),
        is_lost: Callable[[], bool] | None = None,
        records: Sequence[CollectiveRecord] = (),
        who_is_late: Callable[[], str] = str,
    ):
        """`is_lost`: whether they will never finish; None if waiting does not block."""
        self._works, self._then, self._is_lost = works, then, is_lost
        self._records, self._who_is_late = records, who_is_late

    def __add__(self, other: "Pending") -> "Pending":
        works, then = [*self._works, *other._works], [*self._then, *other._then]
        records = [*self._records, *other._records]
        who_is_late = self._who_is_late if self._works else other._who_is_late
        return Pending(works, then, self._is_lost or other._is_lost, records, who_is_late)

    def wait(self) -> None:
        record = self._records[0] if self._records else None
        with as_group_lost("waiting for", record), RECORDER.blocked:
            for work in self._works:
                self._await(work)
        for record in self._records:
            record.end()
        for finish in self._then:
            finish()

    def _await(self, work: dist.Work) -> None:
        deadline = monotonic() + DEADLINE_S
        while self._is_lost is not None and not _ends_within(work, LOOK):
            if self._is_lost():
                raise GroupLost("the generation is over")
            if monotonic() > deadline:
                raise took_too_long(self._records, self._who_is_late())
        work.wait()

    def drain(self, deadline: float) -> None:
        """Wait until no operation uses the tensors any more, failed or not; or until `deadline`.

        The group is being left: what has not ended by then ends with its connections.
        """
        for work in self._works:
            _ends_within(work, timedelta(seconds=max(deadline - monotonic(), 0.001)))


def took_too_long(records: Sequence[CollectiveRecord], who: str) -> TookTooLong:
    """What to raise once the deadline has passed; `who` did not come, as far as that is known."""
    what = records[0].named if records else "an exchange"
    return TookTooLong(
        f"{what} did not end within {DEADLINE_S:g} s: {who or 'it is not known who did not come'}. "
        "If a step may take that long, set SHOAL_EXCHANGE_TIMEOUT_S."
    )


def drain_deadline() -> float:
    """By when the pending operations of a group that is being left must have ended."""
    return monotonic() + DRAIN_S


def _ends_within(work: dist.Work, time: timedelta) -> bool:
    """Whether an operation ends in this time, well or not."""
    with suppress(RuntimeError):
        work.wait(time)
    return bool(work.is_completed())


class ByteCounter:
    """Counts the bytes that left this rank, through a group or its subgroups."""

    num_bytes = 0


class Group:
    """The ranks along one axis of the mesh. `is_lost`: whether their generation is over."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        is_lost: Callable[[], bool] = lambda: False,
        sent: ByteCounter | None = None,
        explain: Callable[[], str] = str,
    ):
        """`explain` says who keeps the others waiting, where ranks can ask each other."""
        self.handle, self.is_lost, self._explain = group, is_lost, explain
        self.rank = dist.get_rank(group) if group else 0
        self.num_ranks = dist.get_world_size(group) if group else 1
        self._sent = ByteCounter() if sent is None else sent
        self.name = group.group_name[:8] if group else ""  # of a hash, where it is one
        self._ranks = tuple(dist.get_process_group_ranks(group)) if group else ()

    def begin(self, op: str, num_bytes: int, what: str = "") -> CollectiveRecord:
        """Put a collective of this group on record, which all its ranks begin in the same order."""
        return RECORDER.begin(op, self.name, self._ranks, num_bytes, what)

    def begin_message(self, peer: int, num_bytes: int, sends: bool) -> CollectiveRecord:
        """Put a message between two ranks of this group on record: the two number theirs alike."""
        source, target = (self.rank, peer) if sends else (peer, self.rank)
        pair = self._ranks[source], self._ranks[target]
        op = f"send to rank {pair[1]}" if sends else f"receive from rank {pair[0]}"
        return RECORDER.begin(op, f"{self.name}:{pair[0]}>{pair[1]}", pair, num_bytes)

    @property
    def bytes_sent(self) -> int:
        return self._sent.num_bytes

    @bytes_sent.setter
    def bytes_sent(self, value: int) -> None:
        self._sent.num_bytes = value

    @property
    def shares_memory(self) -> bool:
        """Whether its ranks are of one host, and exchange what they do in memory."""
        return isinstance(self.handle, SharedGroup) and self.handle.is_of_one_host

    @property
    def adds_by_tree(self) -> bool:
        """Whether an all-reduce adds in the order of a tree over the ranks (`tree.py`)."""
        return isinstance(self.handle, SharedGroup) and self.handle.adds_by_tree

    def who_is_late(self) -> str:
        """Who does not come to what this rank waits for, as far as it is known."""
        if told := self._explain():
            return told
        if isinstance(self.handle, SharedGroup):
            return f"{self.handle.who_is_late()} did not come"
        return ""

    def subgroup(self, ranks: Sequence[int]) -> "Group":
        """A group of some of these ranks; of this one alone if it is not among them.

        All ranks of this group must call it, as often as each other and in the same order: torch
        names a group by how many a process has, and ranks with two names would deadlock.
        """
        ranks_of_world = dist.get_process_group_ranks(self.handle)
        ranks = ranks if self.rank in ranks else [self.rank]
        own = [ranks_of_world[rank] for rank in ranks]
        with as_group_lost(f"forming the group of ranks {ranks}"):
            handle: dist.ProcessGroup | None = None
            if self._device == "cpu" and len(own) > 1:
                handle = new_shared_group(own, COLLECTIVE_TIMEOUT, self.is_lost, DEADLINE_S)
            if handle is None:
                handle = dist.new_group(
                    own, timeout=COLLECTIVE_TIMEOUT, use_local_synchronization=True
                )
            return Group(handle, is_lost=self.is_lost, sent=self._sent, explain=self._explain)

    def all_reduce(self, tensor: Tensor) -> Pending:
        """Sum in place, in whatever order is fastest."""
        if self.num_ranks == 1:
            return Pending()
        self.bytes_sent += bytes_of_all_reduce(tensor.nbytes, self.num_ranks)
        record = self.begin("all-reduce", tensor.nbytes)
        with as_group_lost("starting an all-reduce"):
            is_gloo = not isinstance(self.handle, SharedGroup)
            if is_gloo and fits_direct_exchange(tensor.nbytes, self.num_ranks):
                sent = tensor.reshape(1, -1).repeat(self.num_ranks, 1)
                rows = torch.empty_like(sent)
                work = dist.all_to_all_single(rows, sent, group=self.handle, async_op=True)
                then = Pending(then=[lambda: tensor.copy_(rows.sum(0).view(tensor.shape))])
                return self._pending(work, record=record) + then
            work = dist.all_reduce(tensor, group=self.handle, async_op=True)
            return self._pending(work, record=record)

    def all_to_all(
        self, out: Tensor, tensor: Tensor, out_lengths: list[int], lengths: list[int]
    ) -> Pending:
        """Send `lengths[r]` elements to each rank r, receive `out_lengths[r]` from it."""
        if self.num_ranks == 1:
            out.copy_(tensor)
            return Pending()
        self.bytes_sent += (sum(lengths) - lengths[self.rank]) * tensor.element_size()
        record = self.begin("all-to-all", tensor.nbytes)
        with as_group_lost("starting an all-to-all"):
            work = dist.all_to_all_single(
                out, tensor, out_lengths, lengths, group=self.handle, async_op=True
            )
            return self._pending(work, record=record)

    def reduce_scatter(self, out: Tensor, rows: Sequence[Tensor]) -> Pending:
        """The sum over ranks of the row of this one's number; of a group that `adds_by_tree`."""
        assert isinstance(self.handle, SharedGroup)
        self.bytes_sent += sum(row.nbytes for row in rows) - out.nbytes
        record = self.begin("reduce-scatter", sum(row.nbytes for row in rows))
        with as_group_lost("starting a reduce-scatter"):
            return self._pending(self.handle.reduce_scatter([out], [rows]), record=record)

    def all_gather_shards(self, shards: Sequence[Tensor]) -> Pending:
        """Each rank holds the shard of its own number; afterwards all hold all of them.

        One broadcast a shard: with Gloo faster than its all-gather, and in place.
        """
        if self.num_ranks == 1:
            return Pending()
        self.bytes_sent += shards[self.rank].nbytes * (self.num_ranks - 1)
        record = self.begin("all-gather", sum(shard.nbytes for shard in shards))
        with as_group_lost("starting to gather shards"):
            works = [_broadcast(self.handle, t, r) for r, t in enumerate(shards) if t.numel()]
            return self._pending(*works, record=record)

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Copy the source's tensor to all; returns when it has arrived."""
        if self.num_ranks == 1:
            return
        if self.rank == source:
            self.bytes_sent += tensor.nbytes * (self.num_ranks - 1)
        record = self.begin("broadcast", tensor.nbytes, f"from rank {source}")
        with as_group_lost(f"copying from rank {source}"):
            there = tensor.to(self._device)  # the tensor itself, unless the transport wants a GPU
            self._pending(_broadcast(self.handle, there, source), record=record).wait()
            if there is not tensor:
                tensor.copy_(there)

    def send(self, tensor: Tensor, to: int) -> None:
        """Hand a tensor to one rank, which must call `receive`."""
        self.bytes_sent += tensor.nbytes
        record = self.begin_message(to, tensor.nbytes, sends=True)
        with as_group_lost("in", record):
            dist.send(tensor.to(self._device), group_dst=to, group=self.handle)
        record.end()

    def receive(self, tensor: Tensor, source: int) -> None:
        record = self.begin_message(source, tensor.nbytes, sends=False)
        with as_group_lost("in", record), RECORDER.blocked:
            there = tensor.to(self._device)
            dist.recv(there, group_src=source, group=self.handle)
            if there is not tensor:
                tensor.copy_(there)
        record.end()

    def all_gather_numbers(self, numbers: Sequence[float]) -> list[list[float]]:
        """The numbers of all ranks, by rank."""
        if self.shares_memory and 8 * len(numbers) <= MOST_CONTENT:
            table_bytes = 8 * self.num_ranks * len(numbers)
            self.bytes_sent += bytes_of_all_reduce(table_bytes, self.num_ranks)
            return self._numbers_in_memory(numbers)
        table = torch.zeros(self.num_ranks, len(numbers), dtype=torch.float64)
        table[self.rank] = torch.tensor(numbers, dtype=torch.float64)
        rows: list[list[float]] = self.merge(table).tolist()
        return rows

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Over all ranks. Exact if each number has one contributor, or is a count."""
        if self.shares_memory and 8 * len(numbers) <= MOST_CONTENT:
            self.bytes_sent += bytes_of_all_reduce(8 * len(numbers), self.num_ranks)
            return [*map(sum, zip(*self._numbers_in_memory(numbers), strict=True))]
        found: list[float] = self.merge(torch.tensor(numbers, dtype=torch.float64)).tolist()
        return found

    def _numbers_in_memory(self, numbers: Sequence[float]) -> list[list[float]]:
        assert isinstance(self.handle, SharedGroup)
        packed = struct.Struct(f"={len(numbers)}d")
        record = self.begin("all-gather", packed.size, "numbers")
        with as_group_lost("gathering numbers:", record), RECORDER.blocked:
            rows = self.handle.gather_bytes(packed.pack(*numbers))
        record.end()
        if any(len(row) != packed.size for row in rows):
            raise UnlikeOperations(
                "Ranks are not at the same operation: each must make the same calls as the others, "
                "in the same order."
            )
        return [[*packed.unpack(row)] for row in rows]

    @contextmanager
    def raise_on_all(self) -> Iterator[None]:
        """If the body fails on one rank, raise on all ranks before any of them continues."""
        try:
            yield
        except GroupLost:
            raise
        except Exception:
            self.all_gather_numbers([True])
            raise
        if any(failed for (failed,) in self.all_gather_numbers([False])):
            raise FailedElsewhere("Another rank failed in what all ranks had to do.")

    def merge(self, table: Tensor) -> Tensor:
        """Sum of tables in which each entry has one contributor: exact in any order."""
        if self.num_ranks == 1:
            return table
        table = table.to(self._device)
        self.all_reduce(table).wait()
        return table

    def _pending(self, *works: dist.Work, record: CollectiveRecord) -> Pending:
        is_lost = self.is_lost if self._device == "cpu" else None
        return Pending(works, (), is_lost, (record,), self.who_is_late)

    def device_mesh(self, device: str) -> DeviceMesh:
        """The same ranks as PyTorch's sharding knows them."""
        assert self.handle is not None
        return DeviceMesh.from_group(self.handle, device.split(":")[0])

    @property
    def _device(self) -> str:
        return "cuda" if dist.get_backend(self.handle) == "nccl" else "cpu"


def _broadcast(handle: dist.ProcessGroup | None, tensor: Tensor, source: int) -> dist.Work:
    work: dist.Work = dist.broadcast(tensor, group_src=source, group=handle, async_op=True)
    return work
