"""Steps that are tried in a fork, and what they tell of a rank's process."""

import os
import time
from dataclasses import replace

import msgspec
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.cost.cluster import Cluster, HostGroup, Link
from shoal.cost.predict import memory_of_ranks, predict
from shoal.cost.profile import ProcessBytes
from shoal.cost.profiler import profile_run, sketch_run
from shoal.cost.trial import MOST_HEAP, crowding, heap_factor, try_steps
from shoal.data.sources import tensors
from shoal.errors import RecipeError
from shoal.system.processes import result_of_fork
from shoal.training.run import Run, resolve

CORES = Cluster("cores", (HostGroup(1, 4, 8 << 30, 1e11),), Link(1e-4, 1e9, True), Link(1e-4, 1e9))
FEATURES, TIMES, DEPTH = 64, 2048, 3


class Wide(nn.Module):
    """Activations are most of what it takes: 512 KB for each sample and each tanh."""

    def __init__(self, fails: bool = False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        assert not self.fails, "as asked"
        for layer in self.layers:
            x = layer(x)
        x = x[:, None].expand(-1, TIMES, -1)
        for _ in range(DEPTH):
            x = torch.tanh(x)
        return x.mean(1)


def run(fails: bool = False) -> Run:
    x = torch.zeros(32, FEATURES)
    return Run(
        model=lambda: Wide(fails),
        loss=F.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        data=tensors(x, x),
        batch_size=16,
        steps=2,
    )


def test_a_fork_says_what_it_made_and_never_more() -> None:
    assert result_of_fork(lambda: b"x" * (1 << 20)) == b"x" * (1 << 20)
    assert result_of_fork(lambda: os._exit(3)) == b""
    assert result_of_fork(lambda: time.sleep(60) or b"late", timeout_s=0.05) == b""


def test_steps_are_tried_in_a_fork_that_leaves_nothing() -> None:
    before = torch.random.get_rng_state()
    found = try_steps(run(), 1)
    assert found is not None and found.step_s > 0
    assert found.own_bytes > 16 * DEPTH * TIMES * FEATURES * 4, "its activations at the least"
    assert torch.equal(before, torch.random.get_rng_state())
    assert try_steps(run(fails=True), 1) is None
    assert try_steps(run(), 5) is None, "pieces that do not divide the batch"


def test_steps_are_tried_beside_others_that_end_with_them(monkeypatch) -> None:
    monkeypatch.setattr("shoal.cost.trial.cores", lambda: 2)
    alone = try_steps(run(), 1)
    assert alone is not None
    before = {*psutil.Process().children(recursive=True)}  # of other tests
    found = crowding(run(), alone)
    assert found.num_processes == 2 and found.times >= 1.0
    assert not {*psutil.Process().children(recursive=True)} - before
    roomy = msgspec.structs.replace(alone, own_bytes=1 << 60)
    assert crowding(run(), roomy).num_processes == 1, "without memory for two"


def test_memory_is_what_a_process_of_one_rank_really_takes(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a size of pieces that was not tried."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path_factory.mktemp("cache")))
    profile = profile_run(run())
    assert profile.is_measured and 1.0 <= profile.process.heap <= MOST_HEAP
    between = try_steps(run(), 4)
    assert between is not None
    apart = msgspec.structs.replace(profile.process, with_ranks=0, with_command=0)
    bare = msgspec.structs.replace(profile, process=apart)
    (told,) = memory_of_ranks(bare, resolve(run(), "data=1 accumulate=4", None), CORES)
    assert told.peak == pytest.approx(between.own_bytes, rel=0.25)


def test_shapes_tell_the_same_activations_as_values() -> None:
    plan = resolve(run(), "data=1", None)
    shapes, values = sketch_run(run(), plan), profile_run(run(), fresh=True)
    same = [msgspec.structs.replace(p, process=ProcessBytes()) for p in (shapes, values)]
    told, measured = (predict(p, plan, CORES).memory for p in same)
    assert told.activations == pytest.approx(measured.activations, rel=0.01)
    assert told.peak == pytest.approx(measured.peak, rel=0.01)
    cut = resolve(run(), "data=1 pipeline=2 accumulate=2", None)
    assert predict(sketch_run(run(), cut), cut, CORES).memory.activations > 0


def test_a_forward_that_looks_at_values_has_no_shapes() -> None:
    class Looks(Wide):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum().item() >= 0 else x

    with pytest.raises(RecipeError, match="fake tensors"):
        sketch_run(replace(run(), model=Looks), resolve(run(), "data=1", None))


@given(st.floats(1.0, MOST_HEAP), st.integers(0, 1 << 30), st.integers(1 << 24, 1 << 30))
def test_two_sizes_show_the_gaps_of_a_heap(heap: float, small: int, more: int) -> None:
    held = [(size, heap * size + 3e7) for size in (small + more, small)]
    assert heap_factor(held) == pytest.approx(heap)
    assert heap_factor(held[:1]) == ProcessBytes().heap
    assert heap_factor([(0, 0), (10, 1 << 30)]) == ProcessBytes().heap


def test_what_is_not_trained_is_there_once() -> None:
    def frozen() -> nn.Module:
        model = Wide()
        model.layers[0].requires_grad_(False)
        return model

    own = replace(run(), model=frozen)
    plan = resolve(own, "data=2", None)
    apart = [msgspec.structs.replace(sketch_run(r, plan), shares=False) for r in (run(), own)]
    sizes = [predict(p, plan, CORES).memory.parameters for p in apart]
    layer = 4 * (FEATURES * FEATURES + FEATURES)
    # Two ranks, a spare and the process that they come from.
    assert sizes[0] - sizes[1] == layer - layer // 4


def test_processes_of_a_host_share_what_they_were_forked_with() -> None:
    process = ProcessBytes(own=5, heap=1.0, with_ranks=600, with_command=1200)
    assert process.share(1) == 300 + 400
    assert process.share(4) == 120 + 200
