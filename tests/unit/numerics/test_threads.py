"""Several threads for a step: only where they may, with the same bits, and after a fork."""

import os
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.numerics import threads
from shoal.numerics.threads import ComputeThreads, num_spare_threads
from shoal.parallel.striping import sparse_rows
from shoal.sync.server import shard
from shoal.sync.server.shard import ServerShard, layout_of, settings_of
from shoal.sync.server.tables import ServerTables

ODD = 500_009  # elements, of which no two threads get whole vectors by chance


def test_it_computes_with_several_threads_only_when_asked() -> None:
    found: list[tuple[str, int]] = []

    def look() -> None:
        found.append((threading.current_thread().name, torch.get_num_threads()))

    def work(own: ComputeThreads) -> None:
        look()
        own.do(look)
        look()

    before = torch.get_num_threads()
    for one, (name, count) in (
        (ComputeThreads(2), ("shoal-crew_0", 2)),
        (ComputeThreads(1), ("MainThread", before)),
    ):
        one.host(partial(work, one))
        assert found == [(name, before), (name, count), (name, before)]
        found.clear()
    assert "shoal-crew_0" not in {thread.name for thread in threading.enumerate()}


def test_what_it_raises_is_raised() -> None:
    def fail() -> None:
        raise ValueError("no")

    for one in (ComputeThreads(1), ComputeThreads(2)):
        with pytest.raises(ValueError, match="no"):
            one.do(fail)
        with pytest.raises(ValueError, match="no"):
            one.host(partial(one.do, fail))


def test_threads_that_would_spin_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(12)))
    monkeypatch.setattr(threads, "_idle_sleep", True)
    assert [num_spare_threads(sharing) for sharing in (1, 3, 20)] == [8, 4, 1]
    monkeypatch.setattr(threads, "_idle_sleep", False)
    assert num_spare_threads(1) == 1


@pytest.fixture(autouse=True)
def whatever_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step has its threads."""
    monkeypatch.setattr(shard, "WORTH_A_CREW", 0)


@pytest.mark.parametrize(("num_bytes", "num_threads"), [(1 << 12, 2), ((1 << 12) + 4, 1)])
def test_little_is_stepped_on_by_one_thread(
    monkeypatch: pytest.MonkeyPatch, num_bytes: int, num_threads: int
) -> None:
    monkeypatch.setattr(shard, "WORTH_A_CREW", num_bytes)
    model = nn.ParameterList([torch.randn(1 << 10)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    own = ServerShard(model, optimizer, layout_of(model, optimizer, 1), 0)
    own.step_with(ComputeThreads(2))
    assert threads_of(own, optimizer) == [num_threads]


def threads_of(own: ServerShard, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> list[int]:
    """How many a step has."""
    counts: list[int] = []
    hook = optimizer.register_step_pre_hook(lambda *_: counts.append(torch.get_num_threads()))
    sums = {key: torch.randn_like(value) for key, value in own.values.items()}
    touched = {key: [True] * len(own.layout.segments(key)) for key in own.keys}
    own.apply(sums, touched, scale, 1.0, settings_of(optimizer))
    hook.remove()
    return counts


def stepped(make: type[torch.optim.Optimizer], num_threads: int, **options: float) -> list[Tensor]:
    """Parameters after some steps of a server, on tensors of odd lengths."""
    torch.manual_seed(1)
    model = nn.ParameterList([torch.randn(ODD), torch.randn(17), torch.randn(ODD // 7)])
    optimizer = make(model.parameters(), lr=0.3, fused=True, **options)  # type: ignore[call-arg]
    own = ServerShard(model, optimizer, layout_of(model, optimizer, 1), 0)
    own.step_with(ComputeThreads(num_threads))
    for _ in range(3):
        assert threads_of(own, optimizer, scale=0.7) == [num_threads]
    return [value.clone() for value in own.values.values()]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.AdamW, {"weight_decay": 0.1}),
        (torch.optim.Adagrad, {}),
    ],
)
def test_a_fused_step_has_the_same_bits(
    make: type[torch.optim.Optimizer], options: dict[str, float]
) -> None:
    alone = stepped(make, 1, **options)
    for num_threads in (2, 3):
        assert all(map(torch.equal, alone, stepped(make, num_threads, **options)))


def table_after(make: type[torch.optim.Optimizer], num_threads: int) -> Tensor:
    torch.manual_seed(1)
    model = nn.Embedding(9_000, 33, sparse=True)
    tables = ServerTables(model, 0, 1)
    optimizer = make(model.parameters(), lr=0.3)  # type: ignore[call-arg]
    own = ServerShard(model, optimizer, layout_of(model, optimizer, 1), 0, tables=tables)
    own.step_with(ComputeThreads(num_threads))
    (key,) = tables.keys
    for _ in range(3):
        places = torch.randperm(9_000)[:5_003].sort().values
        sums = {key: sparse_rows(places, torch.randn(5_003, 33), 9_000)}
        own.apply(sums, {key: [True]}, 0.7, 1.0, settings_of(optimizer))
    return tables.slabs[0].detach()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam])
def test_rows_of_tables_have_the_same_bits(make: type[torch.optim.Optimizer]) -> None:
    alone = table_after(make, 1)
    assert all(torch.equal(alone, table_after(make, num_threads)) for num_threads in (2, 3))


class OfOnesOwn(torch.optim.Optimizer):
    """It may look at all tensors at once, as none of torch's does."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("make", "size"),
    [(partial(torch.optim.Adam, fused=False), ODD), (partial(OfOnesOwn, defaults={}), 9)],
)
def test_another_step_keeps_to_one_thread(make: Any, size: int) -> None:
    """Kernels that are not fused may round an element otherwise where a share ends, and a sum over
    all depends on how many add up."""
    model = nn.ParameterList([torch.randn(size)])
    optimizer = make(model.parameters())
    own = ServerShard(model, optimizer, layout_of(model, optimizer, 1), 0)
    own.step_with(ComputeThreads(2))
    assert threads_of(own, optimizer) == [1]


def test_they_work_after_a_fork_from_one_that_had_threads() -> None:
    """In the thread that forked, OpenMP would wait for threads that are not there."""
    ComputeThreads(2).do(lambda: torch.ones(ODD * 4).add_(1.0))
    child = os.fork()
    if not child:
        found: list[float] = []
        own = ComputeThreads(2)
        step = partial(own.do, lambda: found.append(float(torch.ones(ODD * 4).add_(1.0)[-1])))
        try:
            own.host(step)
        finally:
            os._exit(0 if found == [2.0] else 1)
    assert os.waitpid(child, 0)[1] == 0
