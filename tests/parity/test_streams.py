"""Streams, and data of Hugging Face: what one process would train, under any plan."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.testing.ranks import Pool
from tests.support import faults
from tests.support.faults import Trained, check_same

STREAMED = str(Path(__file__).with_name("streamed.py"))
QUICK = [("plain", "data=2"), ("shuffled", "data=2 sync=server")]
FULL = [
    ("plain", "pipeline=2 pieces=4"),
    ("plain", "data=2 sync=server"),
    ("plain", "data=2 zero=2"),
    ("plain", "data=2 local_steps=2"),
    ("shuffled", "data=3"),
    ("shuffled", "data=2 accumulate=2"),
    ("stated", "tensor=2"),
    ("classified", "data=2"),
    ("classified", "pipeline=2 pieces=4"),
    ("masked", "data=2"),
    ("masked", "data=2 zero=1"),
    ("padded", "data=4"),
    ("padded", "pipeline=2 pieces=4"),
]

Train = Callable[..., Trained]


@pytest.fixture
def train(pool: Pool, tmp_path: Path) -> Train:
    def run(recipe: str, plan: str, name: str = "run", **changes: Any) -> Trained:
        directory = tmp_path / name
        return faults.start(pool, f"{STREAMED}:{recipe}", directory, plan=plan, **changes).wait()

    return run


@pytest.mark.parametrize(
    ("recipe", "plan"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.full) for case in FULL)],
)
def test_it_is_what_one_process_trains(verify: Any, recipe: str, plan: str) -> None:
    if recipe in ("masked", "classified"):
        pytest.importorskip("transformers")
        pytest.importorskip("datasets")
    found = verify(f"{STREAMED}:{recipe}", plan, steps=5)
    assert found.exit_code == 0, found.errors
    assert found.verdict["identical"] or "tensor" in plan


def test_a_stream_trains_what_a_list_of_it_does(train: Train) -> None:
    check_same(train("plain", "data=2"), train("listed", "data=2", "listed"))


@pytest.mark.parametrize(
    ("how", "plan"),
    [("order", "data=2"), pytest.param("ends", "data=2 zero=1", marks=pytest.mark.full)],
)
def test_other_samples_on_one_rank_end_the_run(train: Train, how: str, plan: str) -> None:
    trained = train("unlike", plan, settings={"how": how})
    assert trained.exit_code == 1
    assert "ranks read other samples from the stream" in trained.errors


PLANS = ["data=2", "data=1 pieces=2", "data=2 zero=1", "pipeline=2 microbatches=2"]


@pytest.mark.parametrize(
    "plan",
    [pytest.param(plan, marks=[pytest.mark.full] if at else []) for at, plan in enumerate(PLANS)],
)
def test_a_resumed_run_goes_on_where_the_stream_says(
    train: Train, tmp_path: Path, plan: str
) -> None:
    whole = train("stated", "data=2", "whole")
    assert train("stated", "data=2", settings={"steps": 7}).exit_code == 0
    (tmp_path / "reads").mkdir()
    went_on = train("stated", plan, options=["--resume"], settings={"steps": 12})
    check_same(went_on, whole)
    assert "skipped" not in went_on.errors
    ranks = {str(pid) for pid in went_on.pids()[-1].values()}
    reads = [path for path in (tmp_path / "reads").iterdir() if path.name in ranks]
    for path in reads:  # step 7 is compared, the others are trained on
        assert path.read_text().split() == [
            str(position % 50) for position in range(6 * 12, 12 * 12)
        ]
    assert reads


def test_a_resumed_run_of_a_stream_that_says_nothing(train: Train) -> None:
    whole = train("plain", "data=2", "whole")
    assert train("plain", "data=2", settings={"steps": 7}).exit_code == 0
    went_on = train("plain", "data=2", options=["--resume"], settings={"steps": 12})
    check_same(went_on, whole)
    assert "84 samples are skipped, to come to sample 84" in went_on.errors


@pytest.mark.parametrize(
    ("recipe", "plan"),
    [
        ("stated", "data=2"),
        pytest.param("plain", "data=3", marks=pytest.mark.full),
        pytest.param("shuffled", "data=2 sync=server", marks=pytest.mark.full),
        pytest.param("stated", "data=2 zero=1", marks=pytest.mark.full),
    ],
)
def test_a_rank_that_is_killed_is_replaced(train: Train, recipe: str, plan: str) -> None:
    whole = train(recipe, plan, "whole")
    hurt = train(recipe, plan, faults=["step.computed:kill:member=1:step=7"])
    check_same(hurt, whole)
    if recipe == "plain":
        assert "samples are skipped" in hurt.errors
