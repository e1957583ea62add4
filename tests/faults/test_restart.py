"""kill -9 of a rank whose state no other holds: all begin again from the newest checkpoint."""

from pathlib import Path

import pytest

from shoal.testing.ranks import Pool
from tests.faults.conftest import NUM_STEPS, RECIPE
from tests.support import faults
from tests.support.faults import Trained, check_ledger, check_same

EVERY = 10
PLANS = ["data=2 zero=1 memory=apart", "data=2 zero=2 memory=apart", "data=2 zero=3"]
PLANS += ["tensor=2", "pipeline=2"]
PLANS += [
    "data=2 local_steps=4",
    "data=2 tensor=2 local_steps=4 outer=nesterov",
    "data=4 zero=1 replicas=2 local_steps=4",
    "data=2 pipeline=2 microbatches=2 sync=server servers=2 local_steps=5",
    "data=2 zero=3 tensor=2",
    "data=2 tensor=2 pipeline=2 microbatches=2",
]
POINTS = ["step.begin", "step.exchanged"]
# One raises PyTorch's own error, one Shoal's.
QUICK = (("data=2 zero=3", "step.begin"),)


class Runs:
    """Of the tiny recipe under one plan, with a checkpoint every ten steps."""

    def __init__(self, pool: Pool, folder: Path, plan: str):
        self.pool, self.folder, self.plan = pool, folder, plan

    def __call__(self, *armed: str, recipe: str = "mlp", save_every: int | None = EVERY) -> Trained:
        run_dir = self.folder / f"run-{sum(1 for _ in self.folder.glob('run-*.out'))}"
        settings: dict[str, object] = {"pause": 0.01} | (
            {"save_every": save_every} if save_every else {}
        )
        return faults.start(
            self.pool,
            f"{RECIPE}:{recipe}",
            run_dir,
            plan=self.plan,
            settings=settings,
            faults=armed,
        ).wait()


@pytest.mark.parametrize(
    ("plan", "point"),
    [
        pytest.param(plan, point, marks=[] if (plan, point) in QUICK else [pytest.mark.full])
        for plan in PLANS
        for point in POINTS
    ],
)
def test_all_go_on_from_the_checkpoint(pool: Pool, tmp_path: Path, plan: str, point: str) -> None:
    run = Runs(pool, tmp_path, plan)
    undisturbed = run()
    assert undisturbed.exit_code == 0, undisturbed.errors
    trained = run(f"{point}:kill:member=1:step=25")
    assert trained.exit_code == 0, trained.errors
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)
    (again,) = trained.events("recovered")
    assert again["rank"] == 1 and "killed by SIGKILL" in again["cause"]
    assert again["step"] in (10, 20)  # what was being written may be lost
    assert trained.result["recoveries"] == 1
    assert trained.result["steps_again"] <= 29 - again["step"]  # ranks may be a few steps apart
    others = [event for event in trained.events("exited") if event["rank"] != 1]
    assert all("was ended, since rank 1 was killed" in event["how"] for event in others)


@pytest.mark.full
def test_without_a_checkpoint_all_begin_again(pool: Pool, tmp_path: Path) -> None:
    run = Runs(pool, tmp_path, "data=2 zero=1 memory=apart")
    trained = run("step.begin:kill:member=0:step=15", save_every=None)
    assert trained.exit_code == 0, trained.errors
    check_same(trained, run(save_every=None))
    assert trained.events("recovered")[0]["step"] == 0
    assert 10 <= trained.result["steps_again"] <= 15  # as far as the supervisor had heard


def test_an_error_of_the_recipe_ends_the_run(pool: Pool, tmp_path: Path) -> None:
    trained = Runs(pool, tmp_path, "data=2 zero=3")(recipe="raises")
    assert trained.exit_code == 1
    assert "failed at step" in trained.errors and not trained.events("recovered")


@pytest.mark.full
def test_the_same_step_failing_three_times_ends_the_run(pool: Pool, tmp_path: Path) -> None:
    armed = [f"step.begin:kill:member={member}:step=25" for member in (0, 2, 4, 6)]
    trained = Runs(pool, tmp_path, "data=2 zero=1 memory=apart")(*armed)
    assert trained.exit_code == 1
    assert "failed 3 times" in trained.errors
