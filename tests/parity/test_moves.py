"""A checkpoint saved under any plan loads under any other, and training goes on as if nothing was.

For each pair of plans: what the second has loaded, saved again, is the first's state bit for bit;
and the steps that follow are those of a run under the second plan that never stopped, to the bit if
it is the same plan. The quick suite walks a ring of a few plans; the long matrix has every pair.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shoal.checkpoint.compare import compare_checkpoints
from shoal.checkpoint.load import CheckpointReader
from shoal.storage.store import DirectoryStore
from shoal.testing.ranks import Pool
from tests.support import faults
from tests.support.faults import Trained

ZOO = str(Path(__file__).parents[1] / "zoo.py")
PIECES = 4
MIDDLE, END = 5, 15
PLANS = [
    "data=1",
    "data=2",
    "data=4",
    "data=2 zero=1",
    "data=2 zero=2",
    "data=2 zero=3",
    "tensor=2",
    "pipeline=2",
    "data=2 tensor=2",
    "data=2 zero=3 tensor=2",
    "tensor=2 pipeline=2",
    "data=2 sync=server servers=2",
]
SERVED = PLANS[-1]
HOSTED = "data=4 sync=server servers=2 hosts=2"
STALE = f"{SERVED} staleness=1"  # has no one result: only its state is compared
LOCAL = "data=2 local_steps=3"  # is not what one process trains: only its state is compared
# At step 5, in the middle of a window, a fragment is under way.
OUTER = "data=2 local_steps=4 outer=nesterov fragments=2 codec=int8"
# Two replicas, cut in other ways.
MESHES = [
    "data=2 pipeline=2 microbatches=2 local_steps=3 outer=nesterov",
    "data=4 zero=1 replicas=2 local_steps=3 outer=nesterov",
    "data=2 tensor=2 local_steps=3 outer=nesterov",
    "data=4 zero=3 replicas=2 local_steps=3 outer=nesterov",
]
RING = ["data=1", "data=2 zero=3", "tensor=2 pipeline=2", "data=2 zero=1"]
MODELS = ["gpt", "bert"]  # tied weights; parameter groups
FULL = pytest.mark.full
Runs = Callable[..., Trained]


@pytest.fixture(scope="session")
def runs(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs of the zoo by what they are, each trained once."""
    made: dict[tuple[str, str, int], Trained] = {}
    folder = tmp_path_factory.mktemp("moves")

    def run(model: str, plan: str, steps: int, *words: str) -> Trained:
        key = (model, plan, steps)
        if key not in made:
            made[key] = train(pool, model, plan, folder / f"run-{len(made)}", steps, *words)
        return made[key]

    return run


def train(pool: Pool, model: str, plan: str, run_dir: Path, steps: int, *words: str) -> Trained:
    options = tuple(words)
    trained = faults.start(
        pool,
        f"{ZOO}:{model}",
        run_dir,
        plan=f"{plan} pieces={PIECES}",
        settings={"steps": steps},
        options=options,
    ).wait()
    assert trained.exit_code == 0, trained.errors
    return trained


def opened(run_dir: Path, step: int) -> CheckpointReader:
    return CheckpointReader(DirectoryStore(run_dir / "checkpoints"), f"step-{step:08d}")


def check_moved(
    pool: Pool, runs: Runs, tmp_path: Path, model: str, before: str, after: str
) -> Path:
    """The state is the same bit for bit. Returns a run that was stopped there, to go on with."""
    stopped = runs(model, before, MIDDLE)
    there = tmp_path / "there"
    source = str(stopped.run_dir / "checkpoints" / f"step-{MIDDLE:08d}")
    train(pool, model, after, there, MIDDLE, "--from", source, "--take", "everything")
    found = compare_checkpoints(opened(stopped.run_dir, MIDDLE), opened(there, MIDDLE))
    assert not found.tensors, found.tensors
    assert not [entry for entry in found.entries if entry.name.startswith("plain")]
    on = tmp_path / "on"
    shutil.copytree(stopped.run_dir, on)
    return on


def check_goes_on(pool: Pool, runs: Runs, on: Path, model: str, before: str, after: str) -> None:
    trained = train(pool, model, after, on, END, "--resume")
    whole = runs(model, after, END)
    assert [record["step"] for record in trained.steps()] == list(range(1, END + 1))
    if before == after:
        assert trained.model() == whole.model()
        losses = [record["loss"] for record in whole.steps()]
        assert [record["loss"] for record in trained.steps()] == losses
        return
    mine, theirs = (load_file(run.run_dir / "model.safetensors") for run in (trained, whole))
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, rtol=1e-3, atol=2e-4, msg=name)


def check(pool: Pool, runs: Runs, tmp_path: Path, model: str, before: str, after: str) -> None:
    on = check_moved(pool, runs, tmp_path, model, before, after)
    check_goes_on(pool, runs, on, model, before, after)


def _moves() -> list[Any]:
    """Round the ring; the moves that take longest are part of the long matrix."""
    return [
        pytest.param(
            *move,
            marks=pytest.mark.full if "zero=3" in move[0] + move[1] or "tensor" in move[0] else (),
        )
        for move in zip(RING, [*RING[1:], RING[0]])
    ]


@pytest.mark.parametrize(("before", "after"), _moves())
def test_a_ring_of_plans(pool: Pool, runs: Runs, tmp_path: Path, before: str, after: str) -> None:
    check(pool, runs, tmp_path, "gpt", before, after)


@pytest.mark.quick("data=2 sync=server servers=2-data=2 zero=1")
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param("data=1", SERVED, marks=pytest.mark.full),
        pytest.param(SERVED, SERVED, marks=pytest.mark.full),
        (SERVED, "data=2 zero=1"),
        ("data=2 zero=1", HOSTED),
        pytest.param(HOSTED, "data=1", marks=pytest.mark.full),
    ],
)
def test_to_servers_and_back(
    pool: Pool, runs: Runs, tmp_path: Path, before: str, after: str
) -> None:
    check(pool, runs, tmp_path, "gpt", before, after)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("data=2 codec=int8", "data=2 codec=int8"),
        pytest.param("data=2 zero=1 codec=topk:0.05", "data=2 zero=1 codec=topk:0.05", marks=FULL),
        pytest.param("data=2 codec=powersgd:2", "data=2 codec=powersgd:2", marks=FULL),
        pytest.param("data=2 sync=server codec=int4", "data=2 sync=server codec=int4", marks=FULL),
        pytest.param("data=2 codec=int8", "data=4 codec=int8", marks=FULL),
        pytest.param("data=2 codec=int8", "data=2 zero=2 codec=onebit", marks=FULL),
        pytest.param("data=2 codec=int8", "data=2", marks=FULL),
        pytest.param("data=2 zero=3 codec=int8", "data=2 zero=3 codec=int8", marks=FULL),
        pytest.param("data=2 zero=3 codec=int8", "data=4 codec=int8", marks=FULL),
        pytest.param("data=2 zero=1 codec=int8", "data=4 zero=3 codec=int4", marks=FULL),
    ],
)
def test_what_packing_has_not_sent_goes_with_a_run(
    pool: Pool, runs: Runs, tmp_path: Path, before: str, after: str
) -> None:
    """The same bits under the same plan; under any other, it goes on from there."""
    if before == after:
        check(pool, runs, tmp_path, "gpt", before, after)
        return
    stopped, on = runs("gpt", before, MIDDLE), tmp_path / "on"
    shutil.copytree(stopped.run_dir, on)
    trained = train(pool, "gpt", after, on, END, "--resume")
    assert [record["step"] for record in trained.steps()] == list(range(1, END + 1))


@pytest.mark.parametrize(
    ("before", "after"),
    [pytest.param(SERVED, STALE, marks=pytest.mark.full), (STALE, "data=2")],
)
def test_out_of_lockstep_the_state_is_whole(
    pool: Pool, runs: Runs, tmp_path: Path, before: str, after: str
) -> None:
    check_moved(pool, runs, tmp_path, "gpt", before, after)


@pytest.mark.full  # with what packing has not sent: above
@pytest.mark.parametrize("plan", ["data=2", "data=2 zero=3"])
def test_the_same_plan_goes_on_with_the_same_bits(
    pool: Pool, runs: Runs, tmp_path: Path, plan: str
) -> None:
    check(pool, runs, tmp_path, "gpt", plan, plan)


@pytest.mark.full
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("before", PLANS)
@pytest.mark.parametrize("after", PLANS)
def test_every_pair(
    pool: Pool, runs: Runs, tmp_path: Path, model: str, before: str, after: str
) -> None:
    check(pool, runs, tmp_path, model, before, after)


@pytest.mark.full
@pytest.mark.parametrize("model", ["cnn", "unet", "lstm", "moe", "towers", "frozen", "llama"])
@pytest.mark.parametrize(
    ("before", "after"),
    [("data=2 zero=3", "pipeline=2"), ("pipeline=2", "data=2 zero=1"), ("data=4", "tensor=2")],
)
def test_other_models(
    pool: Pool, runs: Runs, tmp_path: Path, model: str, before: str, after: str
) -> None:
    check(pool, runs, tmp_path, model, before, after)


def stopped_apart(pool: Pool, folder: Path, plan: str) -> Path:
    """A run of local steps with a checkpoint between two agreements, and nothing after it."""
    run_dir = folder / "run"
    train(pool, "gpt", plan, run_dir, MIDDLE + 1, "--set", f"save_every={MIDDLE}")
    shutil.rmtree(run_dir / "checkpoints" / f"step-{MIDDLE + 1:08d}")
    return run_dir


@pytest.fixture(scope="session")
def apart(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stopped_apart(pool, tmp_path_factory.mktemp("apart"), LOCAL)


@pytest.fixture(scope="session")
def outer(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stopped_apart(pool, tmp_path_factory.mktemp("outer"), OUTER)


def test_replicas_get_their_own_back(pool: Pool, runs: Runs, apart: Path, tmp_path: Path) -> None:
    assert any(name.startswith("replica.1.model.") for name in opened(apart, MIDDLE))
    shutil.copytree(apart, tmp_path / "on")
    check_goes_on(pool, runs, tmp_path / "on", "gpt", LOCAL, LOCAL)


@pytest.mark.full
@pytest.mark.parametrize(("plan", "other"), zip(MESHES, [*MESHES[1:], MESHES[0]]))
def test_replicas_that_are_meshes_keep_their_own_however_they_are_cut(
    pool: Pool, runs: Runs, tmp_path: Path, plan: str, other: str
) -> None:
    """In the middle of a window, under the same plan and under one of other meshes."""
    source = stopped_apart(pool, tmp_path, plan)
    assert any(name.startswith("replica.1.optimizer.") for name in opened(source, MIDDLE))
    there = moved(pool, source, tmp_path / "there", other)
    found = compare_checkpoints(opened(source, MIDDLE), there)
    assert not found.tensors, found.tensors
    shutil.copytree(source, tmp_path / "on")
    check_goes_on(pool, runs, tmp_path / "on", "gpt", plan, plan)


@pytest.mark.parametrize("plan", ["data=1", pytest.param("data=2 zero=2", marks=pytest.mark.full)])
def test_replicas_become_one(pool: Pool, apart: Path, tmp_path: Path, plan: str) -> None:
    source = str(apart / "checkpoints" / f"step-{MIDDLE:08d}")
    train(pool, "gpt", plan, tmp_path / "one", MIDDLE, "--from", source, "--take", "everything")
    many, one = opened(apart, MIDDLE), opened(tmp_path / "one", MIDDLE)
    names = [name for name in one if name.startswith(("model.", "optimizer."))]
    assert len(names) > 20
    for name in names:
        mine = [many.whole(f"replica.{number}.{name}") for number in range(2)]
        mean = torch.stack([m.double() for m in mine]).mean(0).to(mine[0].dtype)
        expected = mean if mine[0].is_floating_point() else mine[0]
        assert torch.equal(one.whole(name), expected), name


def moved(
    pool: Pool, run_dir: Path, there: Path, plan: str, model: str = "gpt"
) -> CheckpointReader:
    """What another plan makes of a checkpoint, saved again at the same step."""
    source = str(run_dir / "checkpoints" / f"step-{MIDDLE:08d}")
    train(pool, model, plan, there, MIDDLE, "--from", source, "--take", "everything")
    return opened(there, MIDDLE)


@pytest.mark.full
def test_a_fragment_under_way_is_sent_again(
    pool: Pool, runs: Runs, outer: Path, tmp_path: Path
) -> None:
    names = list(opened(outer, MIDDLE))
    assert any(name.startswith("replica.1.outer.sent.") for name in names)
    assert not all(
        f"replica.1.outer.sent.{name[13:]}" in names for name in names if "anchor" in name
    )
    shutil.copytree(outer, tmp_path / "on")
    check_goes_on(pool, runs, tmp_path / "on", "gpt", OUTER, OUTER)


@pytest.mark.parametrize("plan", [OUTER, pytest.param(LOCAL, marks=pytest.mark.full)])
def test_a_run_that_ends_where_it_began_saves_what_it_loaded(
    pool: Pool, outer: Path, apart: Path, tmp_path: Path, plan: str
) -> None:
    """In the middle of a window, though its last step is one after which replicas are alike."""
    source = outer if plan == OUTER else apart
    found = compare_checkpoints(
        opened(source, MIDDLE), moved(pool, source, tmp_path / "there", plan)
    )
    assert not found.tensors, found.tensors


def test_an_outer_state_moves_to_other_replicas(pool: Pool, outer: Path, tmp_path: Path) -> None:
    """What all share is kept, what each has of its own becomes the mean."""
    before = opened(outer, MIDDLE)
    after = moved(pool, outer, tmp_path / "four", OUTER.replace("data=2", "data=4"))
    num_seen = 0
    for name in after:
        kind = name.split(".")[:2]
        if kind[0] == "outer":
            assert torch.equal(after.whole(name), before.whole(name)), name
            num_seen += 1
        elif name.startswith("replica.3.outer.residual."):
            own = [before.whole(name.replace("replica.3", f"replica.{n}")) for n in range(2)]
            mean = torch.stack([value.double() for value in own]).mean(0).float()
            assert torch.equal(after.whole(name), mean), name
            num_seen += 1
    assert num_seen > 40


@pytest.mark.parametrize("plan", ["data=1", pytest.param(LOCAL, marks=pytest.mark.full)])
def test_a_plan_without_an_outer_optimizer_leaves_its_state(
    pool: Pool, outer: Path, tmp_path: Path, plan: str
) -> None:
    assert not [name for name in moved(pool, outer, tmp_path / "there", plan) if "outer" in name]


@pytest.mark.parametrize("plan", ["data=1", pytest.param(LOCAL, marks=pytest.mark.full)])
def test_an_outer_optimizer_begins_with_what_there_is(
    pool: Pool, runs: Runs, apart: Path, tmp_path: Path, plan: str
) -> None:
    """The anchor is what all replicas have in common, or the mean; the momentum is 0."""
    source = apart if plan == LOCAL else runs("gpt", plan, MIDDLE).run_dir
    before = opened(source, MIDDLE)
    after = moved(pool, source, tmp_path / "there", OUTER)
    kept = [name.removeprefix("outer.momentum.") for name in after if "outer.momentum" in name]
    assert len(kept) > 10
    for name in kept:
        assert not after.whole(f"outer.momentum.{name}").any()
        if plan == LOCAL:
            mine = [before.whole(f"replica.{n}.model.{name}").double() for n in range(2)]
            mean = torch.stack(mine).mean(0).float()
            assert torch.equal(after.whole(f"outer.anchor.{name}"), mean)
        else:
            assert torch.equal(after.whole(f"model.{name}"), before.whole(f"model.{name}"))
