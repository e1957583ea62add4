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

from shoal.checkpoint.compare import compare
from shoal.checkpoint.load import Opened
from shoal.checkpoint.storage import Directory
from shoal.testing import faults
from shoal.testing.faults import Trained
from shoal.testing.ranks import Pool

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
]
LOCAL = "data=2 local_steps=3"  # is not what one process trains: only its state is compared
RING = ["data=1", "data=2 zero=3", "tensor=2 pipeline=2", "data=2 zero=1"]
MODELS = ["gpt", "bert"]  # tied weights; parameter groups
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


def opened(run_dir: Path, step: int) -> Opened:
    return Opened(Directory(run_dir / "checkpoints"), f"step-{step:08d}")


def check_moved(
    pool: Pool, runs: Runs, tmp_path: Path, model: str, before: str, after: str
) -> Path:
    """The state is the same bit for bit. Returns a run that was stopped there, to go on with."""
    stopped = runs(model, before, MIDDLE)
    there = tmp_path / "there"
    source = str(stopped.run_dir / "checkpoints" / f"step-{MIDDLE:08d}")
    train(pool, model, after, there, MIDDLE, "--from", source, "--take", "everything")
    found = compare(opened(stopped.run_dir, MIDDLE), opened(there, MIDDLE))
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
        pytest.param(*move, marks=pytest.mark.full if "zero=3" in move[0] + move[1] else ())
        for move in zip(RING, [*RING[1:], RING[0]])
    ]


@pytest.mark.parametrize(("before", "after"), _moves())
def test_a_ring_of_plans(pool: Pool, runs: Runs, tmp_path: Path, before: str, after: str) -> None:
    check(pool, runs, tmp_path, "gpt", before, after)


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
def test_other_models(pool: Pool, runs: Runs, tmp_path: Path, model: str) -> None:
    for number, (before, after) in enumerate(
        [("data=2 zero=3", "pipeline=2"), ("pipeline=2", "data=2 zero=1"), ("data=4", "tensor=2")]
    ):
        check(pool, runs, tmp_path / str(number), model, before, after)


@pytest.fixture(scope="session")
def apart(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of local SGD with a checkpoint between two averages, and nothing after it."""
    run_dir = tmp_path_factory.mktemp("apart") / "run"
    train(pool, "gpt", LOCAL, run_dir, MIDDLE + 1, "--set", f"save_every={MIDDLE}")
    shutil.rmtree(run_dir / "checkpoints" / f"step-{MIDDLE + 1:08d}")
    return run_dir


def test_replicas_get_their_own_back(pool: Pool, runs: Runs, apart: Path, tmp_path: Path) -> None:
    assert any(name.startswith("replica.1.model.") for name in opened(apart, MIDDLE))
    shutil.copytree(apart, tmp_path / "on")
    check_goes_on(pool, runs, tmp_path / "on", "gpt", LOCAL, LOCAL)


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
