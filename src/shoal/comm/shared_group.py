"""A process group of torch whose ranks are of one host and share memory instead of sending.

Ranks of one host that talk through Gloo send every byte through the kernel's TCP. This group moves
it through memory (`shared_rounds.py`). Being a `ProcessGroup` it serves buckets, FSDP2, DTensor and
pipelines, which do not know it. Where ranks cannot share memory, `new_shared_group` returns None on
all of them, and Gloo stays.

No thread works in the background. An operation puts what fits into memory when it is started; the
rest is done while this process waits, for whatever operation, so that ranks which wait for unlike
things never wait for each other. Who waits polls, yields its core, then sleeps, so that more ranks
than cores do not starve. A peer that is gone, or does not come by the deadline, is named.

Not for GPUs, nor for several hosts. Read next: `collectives.py`, for what uses it.
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
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.shared_memory import NotShared, SegmentHandle, SharedSegment
from shoal.comm.shared_rounds import SUM, Mailbox, Operator, SharedRounds, Steps, segment_bytes
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
        self._is_done, self._failure = False, ""

    def advance(self) -> bool:
        """Do what can be done now; whether it is over."""
        try:
            self._is_done = self._is_done or next(self._steps, self) is self
        except NotShared as error:
            self.fail(str(error))
        return self.is_completed()

    def fail(self, why: str) -> None:
        self._failure = f"{self.what}: {why}"

    def is_completed(self) -> bool:
        return self._is_done or bool(self._failure)

    def is_success(self) -> bool:
        return self._is_done

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Raises RuntimeError, as transports of torch do, if it failed or takes longer."""
        if not self.is_completed():
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

    def __init__(self, rounds: SharedRounds, timeout_s: float):
        super().__init__(rounds.rank, rounds.num_ranks)  # type: ignore[call-arg]
        self._rounds, self.timeout_s = rounds, timeout_s
        self.is_lost: Callable[[], bool] = lambda: False  # whether the generation is over
        self._collectives: deque[SharedWork] = deque()
        self._boxes: dict[tuple[int, int], tuple[Mailbox, deque[SharedWork]]] = {}

    # ---- under way

    def progress(self) -> None:
        """Do what can be done now of all that is under way, each kind in its order."""
        for queue in self._queues():
            while queue and queue[0].advance():
                queue.popleft()
        if not any(self._queues()):
            _BUSY.discard(self)

    def look_for_peers(self, work: SharedWork) -> None:
        for rank, pid in self._rounds.pids().items():
            if is_gone(pid):
                work.fail(f"rank {rank} of the group (process {pid}) is gone")

    def who_is_late(self) -> str:
        late = self._rounds.late()
        return f"rank {', '.join(map(str, late))} of the group" if late else "another rank"

    def _queues(self) -> list[deque[SharedWork]]:
        return [self._collectives, *(queue for _, queue in self._boxes.values())]

    def _start(
        self,
        what: str,
        steps: Steps,
        tensors: Sequence[Tensor] = (),
        queue: deque[SharedWork] | None = None,
    ) -> SharedWork:
        work = SharedWork(self, what, steps, tensors)
        with _LOCK:
            (self._collectives if queue is None else queue).append(work)
            _BUSY.add(self)
            self.progress()
        return work

    # ---- numbers, without tensors

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """Of all ranks, each at most a few hundred kilobytes."""
        found: list[bytes] = []
        self._start("all-gather", self._rounds.gather_bytes(content, found)).wait()
        return found

    # ---- what torch calls

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> SharedWork:
        operator = self._operator(opts)
        steps = (self._rounds.all_reduce(tensor, operator) for tensor in tensors)
        return self._start("all-reduce", _one_by_one(steps), tensors)

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
        return self._start("all-gather", _one_by_one(steps), outputs)

    def _allgather_base(self, output: Tensor, own: Tensor, opts: Any = None) -> SharedWork:
        return self.allgather_into_tensor_coalesced([output], [own])

    all_gather_single = _allgather_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> SharedWork:
        operator, pairs = self._operator(opts), zip(outputs, inputs, strict=True)
        steps = (self._rounds.reduce_scatter(o, i, operator) for o, i in pairs)
        return self._start("reduce-scatter", _one_by_one(steps), outputs)

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
        return self._start("barrier", self._rounds.gather_bytes(b"", []))

    def send(self, tensors: Sequence[Tensor], to: int, tag: int) -> SharedWork:
        box, queue = self._box(self._rounds.rank, to)
        return self._start(f"sending to rank {to}", box.send(tensors[0]), tensors, queue)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> SharedWork:
        box, queue = self._box(source, self._rounds.rank)
        steps = box.receive(tensors[0])
        return self._start(f"receiving from rank {source}", steps, tensors, queue)

    def shutdown(self) -> None:
        _BUSY.discard(self)

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

    def _box(self, source: int, to: int) -> tuple[Mailbox, deque[SharedWork]]:
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
            work.fail(f"{group.who_is_late()} did not come within {group.timeout_s:g} s")
        elif now - looked > LOOK_S:
            looked = now
            group.look_for_peers(work)
        elif timeout_s and now - began > timeout_s:
            raise RuntimeError(f"{work.what} is not done after {timeout_s:g} s")


def _one_by_one(operations: Iterable[Steps]) -> Steps:
    for steps in operations:
        yield from steps


def new_shared_group(
    ranks: Sequence[int], timeout: timedelta, is_lost: Callable[[], bool] = lambda: False
) -> SharedGroup | None:
    """A group of these ranks of the world; None if they do not share memory, as on two hosts. All
    of them call it, and get the same answer. Waits end when the group `is_lost`."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
    try:
        group = dist.new_group(
            ranks, timeout=timeout, backend=BACKEND, use_local_synchronization=True
        )
    except NotShared:
        return None
    assert isinstance(group, SharedGroup)
    group.is_lost = is_lost
    return group


def _create(store: dist.Store, rank: int, num_ranks: int, timeout: timedelta) -> SharedGroup:
    """Meet in the store: the first rank makes the memory, and all say whether they have it."""
    segment, why = None, ""
    try:
        if platform.machine() not in KEEPS_ORDER:
            raise NotShared(f"{platform.machine()} may show stores to another core out of order")
        if rank == 0:
            segment = SharedSegment.create(segment_bytes(num_ranks))
            store.set("segment", msgspec.json.encode(segment.place).decode())
        else:
            place = msgspec.json.decode(store.get("segment"), type=SegmentHandle)
            segment = SharedSegment.open(place, segment_bytes(num_ranks) + (1 << 16))
    except (NotShared, msgspec.MsgspecError) as error:
        why = str(error)
        if rank == 0:
            warn_once(f"Ranks of one host exchange through TCP, which is slower: {why}")
            store.set("segment", "none")
    store.set(f"why/{rank}", why)
    reasons = [store.get(f"why/{each}").decode() for each in range(num_ranks)]
    if segment is None or any(reasons):
        raise NotShared(next(filter(None, reasons)))
    return SharedGroup(SharedRounds(segment, rank, num_ranks), timeout.total_seconds())


def is_gone(pid: int) -> bool:
    """Whether a process has ended, though nobody may have waited for it yet."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rsplit(b")", 1)[1].split()[0] in (b"Z", b"X")
    except OSError:
        return True
