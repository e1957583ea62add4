"""What the fault tests share: the tiny run, started from the pool, and its undisturbed twin."""

import os
import random
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from shoal.checkpoint.load import CheckpointReader
from shoal.storage.store import DirectoryStore
from shoal.testing.ranks import Pool
from tests.support import faults
from tests.support.faults import Trained, Training

RECIPE = str(Path(__file__).with_name("tiny.py"))
PLAN = "data=3"
NUM_STEPS = 60
SAVE_POINTS = [
    "checkpoint.begun",
    "checkpoint.after_chunk",
    "checkpoint.after_file",
    "checkpoint.sealed",
    "checkpoint.committed",
    "checkpoint.beginning",
]

Start = Callable[..., Training]


@pytest.fixture(scope="session")
def undisturbed_under(
    pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Trained]:
    """The tiny run (or another of its file) under a plan, without faults."""

    @cache
    def train(plan: str, recipe: str = "mlp") -> Trained:
        run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
        training = faults.start(
            pool, f"{RECIPE}:{recipe}", run_dir, plan=plan, settings={"pause": 0}
        )
        trained = training.wait()
        assert trained.exit_code == 0, trained.errors
        return trained

    return train


@pytest.fixture(scope="session")
def undisturbed(undisturbed_under: Callable[..., Trained]) -> Trained:
    return undisturbed_under(PLAN)


@pytest.fixture
def start(pool: Pool, tmp_path: Path) -> Start:
    """Start the tiny run (or another of its file) with faults, in a new run directory or again."""

    def begin(
        *armed: str,
        recipe: str = "mlp",
        plan: str = PLAN,
        options: tuple[str, ...] = (),
        namespace: str = "",
        run_dir: Path | None = None,
        **settings: object,
    ) -> Training:
        number = sum(1 for _ in tmp_path.glob("run-*.out"))
        return faults.start(
            pool,
            f"{RECIPE}:{recipe}",
            run_dir or tmp_path / f"run-{number}",
            plan=plan,
            settings=settings,
            faults=armed,
            options=options,
            namespace=namespace,
        )

    return begin


@pytest.fixture
def draws() -> random.Random:
    """Others in each test run; the seed is printed, so that what fails can be repeated."""
    seed = int(os.environ.get("SHOAL_TEST_SEED", time.time_ns() % 1_000_000))
    print(f"seed {seed}: repeat with SHOAL_TEST_SEED={seed}")
    return random.Random(seed)


def checkpoints(run_dir: Path) -> list[int]:
    """The steps of the checkpoints of a run, all of which are good; nothing else is there."""
    store = DirectoryStore(run_dir / "checkpoints")
    for name in store.names():
        CheckpointReader(store, name).verify()
    assert set(os.listdir(store.path)) == set(store.names()), "something half-written remained"
    return [int(name.rpartition("-")[2]) for name in store.names()]
