"""The plan of a trial, by the cores it gets; and its last word."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import UsageError
from shoal.plans.plan import Plan
from shoal.tuning.trial_process import end_path, plan_on, read_end, trial_plan, write_end
from shoal.tuning.verdicts import TrialEnd


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("data=1", ("data=1 pieces=1", 1, 1)),
        ("data=2", ("data=2 pieces=2", 2, 2)),
        ("data=2 zero=1", ("data=2 zero=1 pieces=2", 2, 2)),
        ("data=auto", ("data=1 pieces=4", 1, 4)),
        ("data=1 pieces=4", ("data=1 pieces=4", 1, 4)),
        ("zero=1", ("data=4 zero=1 pieces=4", 4, 4)),
    ],
)
def test_the_plan_of_trials(text: str, found: tuple[str, int, int]) -> None:
    assert trial_plan(text, 4, 64) == found


def test_a_trial_is_on_this_machine() -> None:
    with pytest.raises(UsageError, match="spans 2 hosts"):
        trial_plan("data=4 hosts=2 sync=server", 4, 64)


@given(st.integers(1, 8), st.integers(1, 8))
def test_a_trial_has_as_many_ranks_as_cores_and_the_same_pieces(num_cores: int, on: int) -> None:
    plan, least, most = trial_plan("data=auto", num_cores, 840)
    started = Plan.parse(plan_on(plan, on, least, most))
    assert started.num_ranks == min(on, most)
    assert started.num_pieces == most


def test_a_plan_without_room_keeps_its_ranks() -> None:
    assert plan_on("data=3 pieces=3", 2, 3, 3) == "data=3 pieces=3"


def test_the_last_word_of_a_trial(tmp_path: Path) -> None:
    run_dir = tmp_path / "0007"
    assert read_end(run_dir) is None
    write_end(run_dir, TrialEnd(1, "why\udcff", "trace", 3))
    assert read_end(run_dir) == TrialEnd(1, "why\\udcff", "trace", 3)
    end_path(run_dir).write_bytes(b'{"exit_code"')
    assert read_end(run_dir) is None


_DIFFERENCE = """
import json, os, sys
import json
import subprocess
import sys
from pathlib import Path
from shoal.system.fork_server import WorkerSpec
from shoal.training.goal import Goal
from shoal.training.options import Recipe
from shoal.tuning.space import Space
from shoal.tuning.trial_process import VARIABLE, TrialJob, prepare_trials
from shoal.storage.decoding import encode_json

recipe = Recipe.named(sys.argv[1], {"steps": "2"})
_, main = prepare_trials(recipe, Space.parse("seed=int:0..3"), Goal.parse("loss"), None, 1)
before = set(sys.modules)
cores = list(os.sched_getaffinity(0))[:1]
job = TrialJob(settings={"seed": "1"}, run_dir=sys.argv[2], cores=cores, plan="data=1 pieces=1")
code = main(WorkerSpec(0, os.devnull, {VARIABLE: encode_json(job).decode()}))
print(json.dumps([code, sorted(name for name in set(sys.modules) - before if "shoal" in name)]))
"""


@pytest.mark.full
@pytest.mark.timeout(200)
def test_a_trial_imports_nothing_that_the_others_could_share(tmp_path: Path) -> None:
    recipe = f"{Path(__file__).parents[2] / 'system' / 'tiny.py'}:line"
    done = subprocess.run(
        [sys.executable, "-c", _DIFFERENCE, recipe, str(tmp_path / "0000")],
        capture_output=True,
        text=True,
        check=False,
        timeout=190,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []]
