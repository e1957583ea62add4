"""Profiles and predictions: what plans hold and send as explained, and how figures move."""

import gc
from typing import Any

import msgspec
import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal
from shoal.comm.shared_rounds import RING, SLOT_BYTES, mail_bytes
from shoal.cost.activations import Moment, PassMemory
from shoal.cost.cluster import Cluster, HostGroup, Link, read_cluster
from shoal.cost.explain import explain
from shoal.cost.message_memory import group_bytes, pipeline_bytes
from shoal.cost.plan_facts import facts_of
from shoal.cost.predict import Prediction, predict, step_times
from shoal.cost.profile import Crowding, EvaluationMemory, Linear, Profile
from shoal.cost.profiler import at_pace, profile_run
from shoal.cost.rank_places import RankPlaces
from shoal.errors import PlanError
from shoal.parallel.pipeline.messages import most_leaving
from shoal.plans.plan import Plan
from shoal.sync.costs import Message
from shoal.training.run import Run, resolve

WIDTH = 64


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.relu(self.widen(x)))


def make_run(**changes: Any) -> Run:
    inputs = torch.linspace(-1, 1, 32 * WIDTH).view(32, WIDTH)
    given: dict[str, Any] = {
        "model": lambda: nn.Sequential(*(Block(WIDTH) for _ in range(4)), nn.Linear(WIDTH, WIDTH)),
        "loss": F.mse_loss,
        "optimizer": lambda named: torch.optim.AdamW(named, lr=0.01),
        "data": shoal.data.tensors(inputs, inputs),
        "batch_size": 32,
        "steps": 2,
        "clip": 1.0,
    }
    return Run(**given | changes)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_CACHE", str(tmp_path_factory.mktemp("cache")))
        made = profile_run(make_run())
        assert profile_run(make_run()) == made, "the second comes from the cache"
        assert profile_run(make_run(clip=None)) != made
    return msgspec.structs.replace(made, crowding=Crowding())


CORES = Cluster("cores", (HostGroup(1, 4, 8 << 30, 1e11),), Link(1e-4, 1e9, True), Link(1e-4, 1e9))
RACK = Cluster(
    "rack", (HostGroup(8, 8, 64 << 30, 1e13, "gpu"),), Link(1e-5, 2e11), Link(3e-5, 1e10)
)


def under(profile: Profile, plan: str, cluster: Cluster = CORES) -> Prediction:
    return predict(profile, resolve(make_run(), plan, None), cluster)


PLANS = [
    "data=1",
    "data=2",
    "data=2 accumulate=2",
    "data=4 sums=ring",
    "data=2 zero=1",
    "data=2 zero=2 accumulate=2",
    "data=2 zero=3",
    "data=1 tensor=2",
    "data=2 tensor=2 zero=3",
    "data=1 pipeline=2",
    "data=2 pipeline=2 zero=1",
    "data=1 pipeline=2 schedule=zbv",
    "data=1 pipeline=2 schedule=interleaved tensor=2",
    "data=1 pipeline=2 recompute=blocks",
    "data=2 sync=server servers=2",
    "data=4 sync=server hosts=2",
    "data=2 sync=server staleness=2 servers=2 copies=2",
    "data=2 local_steps=4",
    "data=2 local_steps=4 outer=nesterov fragments=2 codec=int8",
    "data=2 precision=bf16",
    "data=2 offload=optimizer",
]


@pytest.mark.parametrize("plan", PLANS)
def test_bytes_held_and_sent_are_those_that_explain_counts(profile: Profile, plan: str) -> None:
    resolved = resolve(make_run(), plan, None)
    told = explain(make_run(), resolved)
    found = predict(profile, resolved, CORES)
    first = [rank for rank in told.ranks if rank.data == rank.tensor == 0]
    sent = max(sum(m.num_bytes for m in rank.messages) for rank in first)
    assert found.bytes_sent == pytest.approx(sent / resolved.local_steps, abs=1)
    held = {rank.memory.parameters.num_bytes for rank in told.ranks}
    assert found.memory.parameters in held
    assert found.memory.optimizer in {rank.memory.optimizer.num_bytes for rank in told.ranks}
    assert found.step_s > 0 and found.time.total == pytest.approx(found.step_s)
    if told.stages:
        stages = facts_of(profile).stages(resolved)
        assert stages is not None
        held_by = [len(stage.parameters) for stage in stages.stages]
        assert [row.num_parameters > 0 for row in told.stages] == [n > 0 for n in held_by]


def test_zero_does_not_take_more_memory(profile: Profile) -> None:
    apart = msgspec.structs.replace(profile, shares=False)  # else data=4 holds all once
    sizes = [under(apart, f"data=4 zero={level}").memory for level in range(4)]
    state = [size.parameters + size.optimizer for size in sizes]
    assert state[0] > state[1] >= state[2] > state[3]


def test_time_grows_with_samples_and_with_slower_devices(profile: Profile) -> None:
    assert under(profile, "data=1").time.compute > under(profile, "data=2").time.compute
    slow = msgspec.structs.replace(CORES, hosts=(HostGroup(1, 4, 8 << 30, 5e10),))
    assert under(profile, "data=1", slow).step_s > under(profile, "data=1").step_s
    slow = msgspec.structs.replace(CORES, inside=Link(1e-4, 1e7))
    assert under(profile, "data=2", slow).time.exchange > under(profile, "data=2").time.exchange


def test_ranks_that_share_cores_take_longer(profile: Profile) -> None:
    one = msgspec.structs.replace(CORES, hosts=(HostGroup(1, 1, 8 << 30, 1e11),))
    alone, shared = under(profile, "data=4"), under(profile, "data=4", one)
    assert shared.time.compute == pytest.approx(4 * alone.time.compute)
    assert any("share" in note for note in shared.notes)


def test_the_slowest_host_decides(profile: Profile) -> None:
    hosts = (HostGroup(1, 1, 8 << 30, 1e11), HostGroup(1, 1, 8 << 30, 2.5e10))
    mixed = Cluster("mixed", hosts, Link(1e-4, 1e9), Link(1e-4, 1e9))
    alike = msgspec.structs.replace(mixed, hosts=(HostGroup(2, 1, 8 << 30, 1e11),))
    found = under(profile, "data=2", mixed)
    assert found.time.compute == pytest.approx(4 * under(profile, "data=2", alike).time.compute)
    assert any("differ" in note for note in found.notes)


def test_a_pipeline_waits_less_with_more_microbatches(profile: Profile) -> None:
    fast = msgspec.structs.replace(CORES, inside=Link(0.0, 1e12))
    few, many = (under(profile, f"data=1 pipeline=2 microbatches={m}", fast) for m in (2, 8))
    assert few.time.waiting / few.step_s > many.time.waiting / many.step_s
    times = step_times(profile, resolve(make_run(), "data=1 pipeline=2", None), fast)
    assert [stage.rank for stage in times.stages] == [0, 1] and times.num_microbatches == 4
    gpipe = under(profile, "data=1 pipeline=2 schedule=gpipe microbatches=8", fast)
    assert gpipe.memory.activations > many.memory.activations


def test_recompute_trades_time_for_activations(profile: Profile) -> None:
    plain, again = under(profile, "data=1"), under(profile, "data=1 recompute=blocks")
    assert again.time.compute > plain.time.compute
    plans = [resolve(make_run(), text, None) for text in ("data=1", "data=1 recompute=blocks")]
    kept = [step_times(profile, plan, CORES).stages[0].kept_bytes for plan in plans]
    assert kept[1] < kept[0] / 2


def test_gpus_hide_buckets_and_full_cores_do_not(profile: Profile) -> None:
    plan = resolve(make_run(), "data=4", None)
    assert step_times(profile, plan, CORES).hidden_s == 0.0
    wide = resolve(make_run(), "data=4 zero=3", None)
    assert step_times(profile, wide, CORES).hidden_s == 0.0
    assert step_times(profile, wide, RACK).hidden_s > 0.0


def test_activations_are_weighed_exactly() -> None:
    """A chain of ReLUs keeps one tensor each; a model of known size tells them apart."""

    def layers() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1), nn.ReLU())

    inputs = torch.zeros(32, WIDTH)
    run = make_run(model=layers, data=shoal.data.tensors(inputs, torch.zeros(32, 1)))
    kept = sum(t.kept_bytes.at(32) for t in profile_of(run).times)
    # The result of the first ReLU, which frees that of its layer; nothing of the inputs.
    assert 32 * WIDTH * 4 <= kept <= 32 * WIDTH * 4 + 2000


def profile_of(run: Run) -> Profile:
    return profile_run(run, fresh=True)


def test_seven_billion_parameters_are_profiled_without_memory() -> None:
    width, before = 30_000, psutil.Process().memory_info().rss
    data = torch.zeros(8, width)
    run = make_run(
        model=lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(8))),
        data=shoal.data.tensors(data, data),
        batch_size=8,
    )
    profile = profile_of(run)
    assert profile.num_parameters > 7e9 and not profile.is_measured
    assert psutil.Process().memory_info().rss - before < 1 << 30
    plan = resolve(run, "data=1 tensor=4 pipeline=2 microbatches=8", None)
    found = predict(profile, plan, read_cluster("a100-8"))
    whole = 4 * profile.num_parameters
    assert whole / 8 <= found.memory.parameters < whole / 4
    assert found.error_share >= 0.5 and found.fits
    alone = predict(profile, resolve(run, "data=1", None), read_cluster("a100-8"))
    assert 16 * profile.num_parameters <= alone.memory.peak
    assert not predict(profile, resolve(run, "data=1", None), CORES).fits
    flops_s = 6 * 8 * profile.num_parameters / 15e12
    assert alone.time.compute == pytest.approx(flops_s, rel=0.35)
    half = predict(profile, resolve(run, "data=1 precision=bf16", None), read_cluster("a100-8"))
    assert half.time.compute == pytest.approx(alone.time.compute * 15 / 180, rel=0.1)


def test_only_ranks_on_cores_share_what_they_hold(profile: Profile) -> None:
    assert profile.shares
    whole = under(profile, "data=1").memory
    on_cores, on_gpus = (under(profile, "data=4", place).memory for place in (CORES, RACK))
    assert on_cores.parameters < whole.parameters == on_gpus.parameters
    assert on_cores.optimizer < whole.optimizer == on_gpus.optimizer


def test_busy_cores_slow_each_other(profile: Profile) -> None:
    """As far as they are busy at once."""
    crowded = msgspec.structs.replace(profile, crowding=Crowding(4, 1.5))

    def times(plan: str, cluster: Cluster = CORES) -> float:
        there, alone = under(crowded, plan, cluster), under(profile, plan, cluster)
        return there.time.compute / alone.time.compute

    assert times("data=1") == pytest.approx(1.0) == times("data=4", RACK)
    assert times("data=2") == pytest.approx(1 + 0.5 / 3)
    assert times("data=4") == pytest.approx(1.5) == times("data=4 tensor=2")
    assert 1.0 < times("data=1 pipeline=4") < times("data=1 pipeline=4 microbatches=32") < 1.5


def test_copies_of_parameters_in_another_precision_do_not_grow(profile: Profile) -> None:
    """Two bytes for each weight that a backward needs, and about half for each activation."""
    found = profile.precisions["bf16"]
    assert 0.3 < found.kept <= 1.1 and 0.5 < found.copies < 2.5
    assert profile.precisions["fp32"].kept == 1.0 and profile.precisions["fp32"].copies == 0.0


def test_an_evaluation_takes_what_its_pieces_take() -> None:
    """Pieces of it are the whole batch, whatever a plan cuts a step into."""
    inputs = torch.zeros(32, WIDTH)
    trained, evaluated = (
        profile_run(make_run(evaluate=source), fresh=True)
        for source in (None, shoal.data.tensors(inputs, inputs))
    )
    assert trained.evaluation == EvaluationMemory() and evaluated.evaluation.num_samples == 32
    most = evaluated.evaluation.num_bytes
    # A layer's output, that of the activation, and the block's input; none is kept for later.
    assert 32 * 4 * (4 + 1) * WIDTH <= most < 32 * 4 * 16 * WIDTH
    assert 0 < evaluated.tensor[2].evaluation.num_bytes < most
    held = [
        under(msgspec.structs.replace(evaluated, evaluation=own), plan).memory.activations
        for plan in ("data=1", "data=1 accumulate=32")
        for own in (EvaluationMemory(), evaluated.evaluation)
    ]
    assert held[0] == held[1], "a step on the whole batch holds more"
    assert held[2] < held[3], "one on single samples does not"


def test_messages_of_a_host_are_memory(profile: Profile) -> None:
    cut = resolve(make_run(), "data=1 pipeline=2", None)
    stages = facts_of(profile).stages(cut)
    assert stages is not None
    letter = 32 // cut.num_pieces * WIDTH * 4
    boxes, kept = 2 * mail_bytes(letter) // 2, most_leaving(2) * letter
    assert [pipeline_bytes(profile, cut, stages, rank) for rank in (0, 1)] == [boxes, boxes + kept]
    larger = msgspec.structs.replace(profile, evaluation=EvaluationMemory(32, 0))
    box = (mail_bytes(32 * WIDTH * 4) + mail_bytes(letter)) // 2
    assert pipeline_bytes(larger, cut, stages, 0) == box
    given = PassMemory(10.0, [Moment(4.0, 0), Moment(12.0, 3)]).with_inputs(5.0)
    assert (given.kept, given.peak) == (15.0, 17.0), "a stage keeps what it was given"
    assert group_bytes(Plan.parse("data=1")) == 0
    two = group_bytes(Plan.parse("data=2"))
    assert group_bytes(Plan.parse("data=2 tensor=2")) > 2 * two >= 2 * RING * SLOT_BYTES


def test_parts_go_at_the_pace_of_whole_steps(profile: Profile) -> None:
    """They were measured each by itself, and a step as it is trained."""
    slow, fast = at_pace(profile, 1.0), at_pace(profile, 1e-6)
    assert slow.times == profile.times and slow.overhead_s > 0.5
    for made, seconds in ((slow, 1.0), (fast, 1e-6)):
        assert fast.overhead_s == 0.0
        core = msgspec.structs.replace(
            CORES, hosts=(HostGroup(1, 4, 8 << 30, profile.flops_per_s),)
        )
        assert under(made, "data=1", core).step_s == pytest.approx(seconds, rel=1e-6)
    assert fast.tensor[2].times[0].forward_s.at(32) < profile.tensor[2].times[0].forward_s.at(32)


def test_a_collection_of_garbage_is_no_part_of_a_model() -> None:
    """What is loaded is not walked over while passes are timed, and is again afterwards."""
    seen, before = [], gc.get_freeze_count()

    class Watches(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(gc.get_freeze_count())
            return super().forward(x)

    profile_run(make_run(model=lambda: Watches(WIDTH, WIDTH)), fresh=True)
    assert min(seen) > 10_000 and gc.get_freeze_count() == before


def test_what_the_model_refuses_is_refused(profile: Profile) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight if x.sum() > 0 else x + self.weight

    run = make_run(model=Bare)
    found = profile_of(run)
    assert found.pipeline_refusal and found.num_parameters == WIDTH
    with pytest.raises(PlanError):
        predict(found, resolve(run, "data=1 pipeline=2", None), CORES)
    with pytest.raises(PlanError, match="was not profiled"):
        predict(profile, resolve(make_run(), "data=1 tensor=16", None), CORES)


def test_a_line_goes_through_both_sizes() -> None:
    assert Linear(1.0, 2.0).at(3) == 7.0


@pytest.mark.parametrize(
    ("how", "share"), [("all-reduce", 1.0), ("reduce-scatter, gather", 1.0), ("all-to-all", 2.0)]
)
def test_over_hosts_what_is_summed_crosses_once_a_host(how: str, share: float) -> None:
    """Of 2 hosts with 2 ranks; a rank alone would send 1.5 times its gradient in a ring of 4."""
    cores = HostGroup(2, 2, 8 << 30, 1e11)
    hosts = Cluster("hosts", (cores,), Link(0.0, 1e15), Link(0.0, 1e6))
    places = RankPlaces(Plan.parse("data=4"), hosts, 1e11)
    seconds = places.seconds(Message("gradients", "data", how, 1, 1_500_000))
    assert seconds == pytest.approx(share)


class LooksAtPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if (torch.arange(3).diff() == 1).all() else x


def test_a_forward_that_looks_at_values_widens_the_error(profile: Profile) -> None:
    """Also where the pieces that are watched go the same way."""

    class Exits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if x.mean().item() > 1e9:
                    break
                x = layer(x)
            return x

    found = profile_run(make_run(model=Exits), fresh=True)
    assert found.depends_on_data and not profile.depends_on_data
    fixed = profile_run(make_run(model=LooksAtPositions), fresh=True)
    assert not fixed.depends_on_data, "what is looked at is the same for all data"
    told = under(msgspec.structs.replace(profile, depends_on_data=True), "data=2")
    assert told.error_share == pytest.approx(under(profile, "data=2").error_share + 0.25)
    assert any("depends on data" in note for note in told.notes)
