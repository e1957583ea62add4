"""A process group of torch whose ranks share memory where they are of one host.

Ranks of one host that talk through Gloo send every byte through the kernel's TCP. This group moves
it through memory (`shared_rounds.py`); over several hosts it adds up inside each, and sends through
Gloo what is left (`hierarchical.py`). Being a `ProcessGroup` it serves buckets, FSDP2, DTensor and
pipelines, which do not know it. Where ranks cannot share memory, `new_shared_group` returns None on
all of them, and Gloo stays.

No thread works in the background. An operation puts what fits into memory when it is started; the
rest is done while this process waits, for whatever operation, so that ranks which wait for unlike
things never wait for each other. Who waits polls, yields its core, then sleeps, so that more ranks
than cores do not starve. A peer that is gone, or does not come by the deadline, is named.

Not for GPUs. Read next: `collectives.py`, for what uses it.
"""
# mypy: disable-error-code="override, assignment"
# (torch calls some methods by two names, and each in one of several ways)

import itertools
import os
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, cast

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.flight_recorder import RECORDER
from shoal.comm.hierarchical import (
    NUM_LANES,
    GlooBox,
    HierarchicalRounds,
    HostLayout,
    Links,
    PeerLost,
    this_host,
)
from shoal.comm.shared_memory import NotShared, SegmentHandle, SharedSegment
from shoal.comm.shared_rounds import (
    LEFT,
    SUM,
    Mailbox,
    Operator,
    SharedRounds,
    Steps,
    flat_of,
    segment_bytes,
)
from shoal.logs import warn_once

BACKEND = "shoal_shared"
KEEPS_ORDER = ("x86_64", "AMD64")  # CPUs that show the stores of a core to others in their order
SPINS = 200  # polls before a rank sleeps between them
LONGEST_PAUSE_S = 0.001
LOOK_S = 0.2  # between two looks whether a peer is gone


class SharedWork(dist.Work):
    """One operation of a group, in its queue. Who waits drives all that are before it."""

    def __init__(self, group: "SharedGroup", what: str, steps: Steps, tensors: Sequence[Tensor]):
        super().__init__()
        self.what, self.group = what, group
        self._steps, self._tensors = steps, list(tensors)
        self._is_done, self._failure, self.lane = False, "", 0

    def advance(self) -> bool:
        """Do what can be done now; whether it is over, or goes on in another lane."""
        if self.is_completed():
            return True
        try:
            found = next(self._steps, self)
        except (NotShared, PeerLost) as error:
            self.fail(str(error))
            return True
        if found is self:
            self._is_done = True
        elif found is not None:
            self.lane = cast(int, found)
        return found is not None

    def fail(self, why: str) -> None:
        self._failure = f"{self.what}: {why}"

    def is_completed(self) -> bool:
        return self._is_done or bool(self._failure)

    def is_success(self) -> bool:
        return self._is_done

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Raises RuntimeError, as transports of torch do, if it failed or takes longer."""
        if not self.is_completed():
            with RECORDER.blocked:
                _drive(self, timeout.total_seconds())
        if self._failure:
            raise RuntimeError(self._failure)
        return True

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class SharedGroup(dist.ProcessGroup):
    """Each method is called by all ranks, in the same order, but for `send` and `recv`."""

    def __init__(self, rounds: SharedRounds | HierarchicalRounds, timeout_s: float):
        super().__init__(rounds.rank, rounds.num_ranks)  # type: ignore[call-arg]
        self._rounds, self.timeout_s = rounds, timeout_s
        self.is_lost: Callable[[], bool] = lambda: False  # whether the generation is over
        # Of each lane, the collectives in it: those of a lane begin and end in one order.
        self._lanes: list[deque[SharedWork]] = [deque() for _ in range(NUM_LANES)]
        self._boxes: dict[tuple[int, int], tuple[Mailbox | GlooBox, deque[SharedWork]]] = {}

    # ---- under way

    def progress(self) -> None:
        """Do what can be done now of all that is under way, each kind in its order."""
        for queue in self._queues():
            while queue and queue[0].advance():
                work = queue.popleft()
                if not work.is_completed():
                    self._lanes[work.lane].append(work)
        if not any(self._queues()):
            _BUSY.discard(self)

    def look_for_peers(self, work: SharedWork) -> None:
        gone = {rank: pid for rank, pid in self._rounds.pids().items() if is_gone(pid)}
        with _LOCK:
            self.progress()  # they may have done their part before they went
        other = self._other_end(work)
        for rank, pid in gone.items() if not work.is_completed() else ():
            if pid == LEFT and other not in (None, rank):
                continue  # a third rank that is done: two that send to one another do without it
            how = "has left it" if pid == LEFT else f"(process {pid}) is gone"
            work.fail(f"rank {rank} of the group {how}")

    @property
    def is_of_one_host(self) -> bool:
        return isinstance(self._rounds, SharedRounds)

    @property
    def adds_by_tree(self) -> bool:
        """Whether sums are those of a tree over the ranks (`tree.py`)."""
        return self._rounds.adds_by_tree

    def who_is_late(self, work: SharedWork | None = None) -> str:
        """Whom a message waits for; else whom the oldest collective does."""
        if (other := self._other_end(work)) is not None:
            return f"rank {other} of the group"
        lane = max((k for k, queue in enumerate(self._lanes) if queue), default=0)
        late = self._rounds.late(lane)
        return f"rank {', '.join(map(str, late))} of the group" if late else "another rank"

    def _other_end(self, work: SharedWork | None) -> int | None:
        """Whom a message goes to or comes from; None for a collective."""
        for ends, (_, queue) in self._boxes.items():
            if work in queue:
                return sum(ends) - self._rounds.rank
        return None

    def _queues(self) -> list[deque[SharedWork]]:
        return [*self._lanes, *(queue for _, queue in self._boxes.values())]

    def _start(
        self,
        what: str,
        steps: Steps,
        tensors: Sequence[Tensor] = (),
        queue: deque[SharedWork] | None = None,
    ) -> SharedWork:
        work = SharedWork(self, what, steps, tensors)
        with _LOCK:
            (self._lanes[0] if queue is None else queue).append(work)
            _BUSY.add(self)
            self.progress()
        return work

    # ---- numbers, without tensors

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Of all ranks of one host, each at most a few hundred kilobytes."""
        found: list[bytes] = []
        assert isinstance(self._rounds, SharedRounds)
        self._start("all-gather", self._rounds.gather_bytes(content, found)).wait()
        return found

    # ---- what torch calls

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> SharedWork:
        operator = self._operator(opts)
        steps = (self._rounds.all_reduce(tensor, operator) for tensor in tensors)
        return self._start("all-reduce", _together(steps), tensors)

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> SharedWork:
        (tensor,) = tensors
        return self._start("broadcast", self._rounds.broadcast(tensor, opts.rootRank), tensors)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> SharedWork:
        return self._start("all-gather", self._rounds.all_gather(outputs[0], inputs[0]), outputs[0])

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> SharedWork:
        rows = [output.view(self._rounds.num_ranks, -1).unbind() for output in outputs]
        steps = map(self._rounds.all_gather, rows, inputs)
        return self._start("all-gather", _together(steps), outputs)

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> SharedWork:
        return self.allgather_into_tensor_coalesced([output], [own])

    all_gather_single = _allgather_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> SharedWork:
        operator, n = self._operator(opts), self._rounds.num_ranks
        rows = [flat_of(tensor)[0].view(n, -1).unbind() for tensor in inputs]
        pairs = zip(outputs, rows, strict=True)
        steps = (self._rounds.reduce_scatter(o, of_ranks, operator) for o, of_ranks in pairs)
        return self._start("reduce-scatter", _together(steps), outputs)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> SharedWork:
        """Rows of ranks may be of unlike lengths."""
        rows = [flat_of(row)[0] for row in inputs[0]]
        steps = self._rounds.reduce_scatter(outputs[0], rows, self._operator(opts))
        return self._start("reduce-scatter", steps, outputs)

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> SharedWork:
        return self.reduce_scatter_tensor_coalesced([output], [tensor], opts)

    reduce_scatter_single = _reduce_scatter_base

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> SharedWork:
        return self._start("all-to-all", self._rounds.all_to_all(outputs, inputs), outputs)

    def alltoall_base(
        self,
        output: Tensor,
        tensor: Tensor,
        output_lengths: Sequence[int],
        lengths: Sequence[int],
        opts: Any = None,
    ) -> SharedWork:
        n = self._rounds.num_ranks
        outputs = output.split(list(output_lengths) or len(output) // n)
        return self.alltoall(outputs, tensor.split(list(lengths) or len(tensor) // n))

    all_to_all_single = alltoall_base

    def barrier(self, opts: Any = None) -> SharedWork:
        return self._start("barrier", self._rounds.barrier())

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> SharedWork:
        box, queue = self._box(self._rounds.rank, to)
        return self._start(f"sending to rank {to}", box.send(tensors[0]), tensors, queue)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> SharedWork:
        box, queue = self._box(source, self._rounds.rank)
        steps = box.receive(tensors[0])
        return self._start(f"receiving from rank {source}", steps, tensors, queue)

    def shutdown(self) -> None:
        _BUSY.discard(self)
        self._rounds.leave()

    abort = shutdown

    # torch keeps the name of a group with its back end for a device, and this one has none.
    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_name(self) -> str:
        return self._group_name

    def getBackendName(self) -> str:
        return BACKEND

    # ---- parts of these

    def _box(self, source: int, to: int) -> tuple[Mailbox | GlooBox, deque[SharedWork]]:
        if (source, to) not in self._boxes:
            self._boxes[source, to] = self._rounds.mailbox(source, to), deque()
        return self._boxes[source, to]

    def _operator(self, opts: Any) -> Operator:
        if opts is None:
            return SUM
        known: list[tuple[Any, Operator]] = [
            (dist.ReduceOp.SUM, SUM),
            (dist.ReduceOp.AVG, (torch.add, self._rounds.num_ranks)),
            (dist.ReduceOp.MAX, (torch.maximum, 0)),
            (dist.ReduceOp.MIN, (torch.minimum, 0)),
            (dist.ReduceOp.PRODUCT, (torch.mul, 0)),
        ]
        for each, found in known:
            if opts.reduceOp == each:
                return found
        raise ValueError(f"Ranks that share memory do not reduce by {opts.reduceOp}.")


_BUSY: set[SharedGroup] = set()  # those with operations under way
_LOCK = threading.RLock()  # backward passes may run in threads of torch's


def _drive(work: SharedWork, timeout_s: float) -> None:
    """Until it is over; RuntimeError if that takes longer than `timeout_s`, unless it is 0."""
    group = work.group
    began = looked = time.monotonic()
    for count in itertools.count():
        with _LOCK:
            for busy in [*_BUSY]:
                busy.progress()
        if work.is_completed():
            return
        if count < SPINS:
            os.sched_yield()
            continue
        now = time.monotonic()
        time.sleep(min(LONGEST_PAUSE_S, (now - began) / 32))
        if group.is_lost():
            work.fail("the generation is over")
        elif now - began > group.timeout_s:
            work.fail(f"{group.who_is_late(work)} did not come within {group.timeout_s:g} s")
        elif now - looked > LOOK_S:
            looked = now
            group.look_for_peers(work)
        elif timeout_s and now - began > timeout_s:
            raise RuntimeError(f"{work.what} is not done after {timeout_s:g} s")


def _together(operations: Iterable[Steps]) -> Steps:
    """One after another in each lane."""
    left = [*operations]
    while left:
        lanes: list[int] = []
        for steps in left:
            for found in steps:
                if found is not None:
                    lanes.append(found)
                    break
                yield None
        assert len(lanes) in (0, len(left)), "operations of one kind go through the same lanes"
        left = left if lanes else []
        if lanes:
            yield lanes[0]


def new_shared_group(
    ranks: Sequence[int],
    timeout: timedelta,
    is_lost: Callable[[], bool] = lambda: False,
    deadline_s: float | None = None,
) -> SharedGroup | None:
    """A group of these ranks of the world; None if no two of them share memory, or some cannot. All
    of them call it, and get the same answer. Waits end when the group `is_lost`, or at the
    deadline, which is the `timeout` of Gloo if none is given."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
    try:
        group = dist.new_group(
            ranks, timeout=timeout, backend=BACKEND, use_local_synchronization=True
        )
    except NotShared:
        return None
    assert isinstance(group, SharedGroup)
    group.is_lost, group.timeout_s = is_lost, deadline_s or group.timeout_s
    return group


def _create(store: dist.Store, rank: int, num_ranks: int, timeout: timedelta) -> SharedGroup:
    """Meet in the store. Ranks of one host share memory; so do those of each of several."""
    hosts = HostLayout.of(_told(store, "host", rank, num_ranks, this_host()))
    if hosts.num_hosts == 1:
        (rounds,) = _share(store, rank, num_ranks, 1)
        return SharedGroup(rounds, timeout.total_seconds())
    if why := hosts.why_flat():
        if rank == 0 and max(hosts.counts) > 1:
            warn_once(f"Ranks exchange as if each were on a host of its own: {why}")
        raise NotShared(why)
    host, place = divmod(rank, hosts.counts[0])
    why = ""
    try:
        inward, outward = _share(dist.PrefixStore(f"{host}", store), place, hosts.counts[0], 2)
    except NotShared as error:
        why = str(error)
    if any(reasons := _told(store, "shares", rank, num_ranks, why)):
        raise NotShared(next(filter(None, reasons)))
    links = Links.form(store, rank, hosts, timeout)
    rounds_of_hosts = HierarchicalRounds(inward, outward, links, rank)
    return SharedGroup(rounds_of_hosts, timeout.total_seconds())


def _share(store: dist.Store, rank: int, num_ranks: int, count: int) -> list[SharedRounds]:
    """The first rank makes the memory of so many rounds, and all say whether they have it."""
    segment, why, size = None, "", segment_bytes(num_ranks)
    try:
        if platform.machine() not in KEEPS_ORDER:
            raise NotShared(f"{platform.machine()} may show stores to another core out of order")
        if rank == 0:
            segment = SharedSegment.create(size * count)
            store.set("segment", msgspec.json.encode(segment.place).decode())
        else:
            place = msgspec.json.decode(store.get("segment"), type=SegmentHandle)
            segment = SharedSegment.open(place, size * count + (1 << 16))
    except (NotShared, msgspec.MsgspecError) as error:
        why = str(error)
        if rank == 0:
            warn_once(f"Ranks of one host exchange through TCP, which is slower: {why}")
            store.set("segment", "none")
    reasons = _told(store, "why", rank, num_ranks, why)
    if segment is None or any(reasons):
        raise NotShared(next(filter(None, reasons)))
    parts = segment.bytes[: size * count].split(size)
    return [SharedRounds(part, rank, num_ranks) for part in parts]


def _told(store: dist.Store, what: str, rank: int, num_ranks: int, own: str) -> list[str]:
    """What each rank says, by rank."""
    store.set(f"{what}/{rank}", own)
    keys = [f"{what}/{each}" for each in range(num_ranks)]
    store.wait(keys)
    return [store.get(key).decode() for key in keys]


def is_gone(pid: int) -> bool:
    """Whether a process has ended, though it may not have been waited for yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rsplit(b")", 1)[1].split()[0] in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # it cannot be told now, without a free descriptor
        return False
